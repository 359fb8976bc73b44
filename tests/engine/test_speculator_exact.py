# SPDX-License-Identifier: Apache-2.0
"""On Model Runner V2, every served token follows the target's own distribution.

A random target with eight tokens, sampled under Triton's interpreter from one prompt
with many seeds: pairs of neighbouring tokens are compared with the enumerated distribution.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distribution import joint_distribution, pair_p_values
from interpreter import run_engines
from pairs import drafter_config, target_config, write_drafter, write_target
from vllm import SamplingParams

pytestmark = pytest.mark.slow

VOCAB_SIZE, NUM_TOKENS = 8, 3
PROMPT = [2, 5, 3]
KINDS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}]
NUM_SAMPLES = 60  # of each kind; the interpreter takes most of a second for one
# The seeds are fixed, so an exact sampler passes for good.
EXACT = 1e-3


def test_served_tokens_are_distributed_as_the_targets(tmp_path: Path) -> None:
    """Catches draft_logits that are not what the drafts were drawn from, as the rejection sampler reads them."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    config = drafter_config(dflash_config={"lilicorr_candidate_topk": 4, "lilicorr_logit_scale": 64.0}, **sizes)
    target = write_target(tmp_path / "target", target_config(**sizes))
    sampling = [KINDS[i % len(KINDS)] | {"seed": i, "max_tokens": NUM_TOKENS} for i in range(NUM_SAMPLES * len(KINDS))]
    engine = {
        "target": target,
        "speculative_config": {
            "method": "lilicorr",
            "model": write_drafter(tmp_path / "drafter", config),
            "num_speculative_tokens": 2,
            "lilicorr": {"candidate_topk": 3},
        },
        "prompts": [PROMPT] * len(sampling),
        "sampling": sampling,
        "engine": {"max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 64},
    }
    result = run_engines("v2", "ours", {"exact": engine}, tmp_path / "jobs")["exact"]
    elsewhere = [
        token not in candidates
        for draft in result["drafts"]
        for token, candidates in zip(draft["tokens"], draft["candidate_ids"], strict=True)
    ]
    assert 0.02 < sum(elsewhere) / len(elsewhere) < 0.98
    samples = torch.tensor(result["outputs"])
    for index, kind in enumerate(KINDS):
        joint = joint_distribution(target, PROMPT, SamplingParams(**kind), NUM_TOKENS)
        values = pair_p_values(samples[index :: len(KINDS)], joint)
        assert min(values) > EXACT, (kind, values)
