# SPDX-License-Identifier: Apache-2.0
"""Two ranks serve the tokens, drafts and accepted counts of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from engines import Engine, greedy, tokens

if __name__ == "__main__":
    target, drafter, ranks, prompts, out = sys.argv[1:]
    with Engine(target, drafter, tensor_parallel_size=int(ranks)) as engine:
        served = tokens(engine.generate(json.loads(prompts), greedy(32)))
        counters = engine.counters
    with open(out, "w") as file:
        json.dump({"tokens": served, "drafts": counters.drafts, "accepted": counters.accepted}, file)
"""


def serve(pair, ranks: int, prompts, folder: Path) -> dict:
    """Tokens and counters of an engine of so many ranks, in a process of its own."""
    script, out = folder / "serve.py", folder / f"{ranks}.json"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core % os.cpu_count()) for core in range(ranks)),
    }
    words = [
        sys.executable,
        str(script),
        str(pair.target),
        str(pair.drafter),
        str(ranks),
        json.dumps(prompts),
        str(out),
    ]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks(pair, prompts, reference, tmp_path):
    """Catches candidates or log-probabilities of one rank's part of the vocabulary."""
    one, two = (serve(pair, ranks, prompts[:24], tmp_path) for ranks in (1, 2))
    assert two == one
    assert one["accepted"] > 0
    assert one["tokens"] == [ids[:32] for ids in reference[:24]]
