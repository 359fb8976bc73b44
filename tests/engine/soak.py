# SPDX-License-Identifier: Apache-2.0
"""Serves sampled requests of every kind, with aborts and preemptions, and reports what was left of the memory.

python tests/engine/soak.py TARGET DRAFTER DRAFT_STEPS RESULT.json
"""

import ctypes
import gc
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from engines import Engine
from held_out import held_out_prompts
from tokenizers import Tokenizer
from vllm import SamplingParams

IN_FLIGHT = 8
REPORT_EVERY = 2000


def resident_mib() -> float:
    """Memory of this process, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def requests(prompts: list[list[int]], chance: random.Random) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Endless requests of every kind of sampling."""
    index = 0
    while True:
        sampling = {
            "temperature": chance.choice([0, 0.2, 0.7, 1.0, 1.5]),
            "top_k": chance.choice([0, 0, 1, 5, 50, 5000]),
            "top_p": chance.choice([1.0, 1.0, 0.9, 0.3]),
            "seed": chance.choice([None, None, index]),
            "max_tokens": chance.choice([1, 2, 17, 60, 120]),
        }
        yield str(index), chance.choice(prompts)[:200], SamplingParams(ignore_eos=True, **sampling)
        index += 1


def main(target: str, drafter: str, draft_steps: int, result: str) -> None:
    chance = random.Random(0)
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    prompts = held_out_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    # The cache holds three long requests: the rest is preempted.
    with Engine(Path(target), Path(drafter), num_gpu_blocks_override=30, max_num_seqs=IN_FLIGHT) as engine:
        core, vocab_size = engine.llm.llm_engine, engine.llm.model_config.get_vocab_size()
        source = requests(prompts, chance)
        running: list[str] = []
        memory: list[float] = []
        aborted = invalid = 0
        while engine.counters.drafts < draft_steps:
            while len(running) < IN_FLIGHT:
                name, prompt, params = next(source)
                core.add_request(name, {"prompt_token_ids": prompt}, params)
                running.append(name)
            for output in core.step():
                invalid += sum(not 0 <= token < vocab_size for token in output.outputs[0].token_ids)
                if output.finished:
                    running.remove(output.request_id)
            if running and chance.random() < 0.01:
                core.abort_request([running.pop(chance.randrange(len(running)))])
                aborted += 1
            if engine.counters.drafts >= REPORT_EVERY * (len(memory) + 1):
                memory.append(resident_mib())
        core.abort_request(running)
        counters = {key: getattr(engine.counters, key) for key in ("drafts", "accepted", "preemptions")}
    Path(result).write_text(json.dumps({"memory": memory, "aborted": aborted, "invalid": invalid} | counters))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
