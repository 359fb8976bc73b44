# SPDX-License-Identifier: Apache-2.0
"""Drafters whose weights hold no numbers: refused where the correlator cannot score anything, survived
where single drafts are broken. The served tokens stay the target's."""

import logging

import pytest
import torch
from engines import Engine, greedy, tokens
from pairs import drafter_config, target_config, write_checkpoint, write_drafter, write_target
from safetensors.torch import load_file
from vllm import SamplingParams

pytestmark = pytest.mark.slow

VOCAB_SIZE = 64
SMALL = {"skip_tokenizer_init": True, "max_model_len": 128, "num_gpu_blocks_override": 64}
PROMPTS = [[2 + (5 * i + j) % 60 for j in range(4 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    target = write_target(folder / "target", target_config(vocab_size=VOCAB_SIZE))
    return folder, target, write_drafter(folder / "drafter", drafter_config(vocab_size=VOCAB_SIZE))


def break_tensor(folders, name: str, value: float):
    """A copy of the drafter in which one entry of one tensor is `value`."""
    folder, _, drafter = folders
    tensors = load_file(drafter / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[3] = value
    config = drafter_config(vocab_size=VOCAB_SIZE)
    return write_checkpoint(folder / f"{name}-{value}", config, tensors)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_correlator_without_numbers_is_refused(folders, value: float) -> None:
    """Catches a drafter whose every draft is a guess, served without a word."""
    broken = break_tensor(folders, "lilicorr.factor_input_proj.bias", value)
    with pytest.raises(ValueError, match="scores its candidates with values that are not numbers"):
        Engine(folders[1], broken, **SMALL)


def test_drafts_without_numbers_are_survived(folders, caplog) -> None:
    """Catches an invalid token id from NaN logits, an engine that ends, and silence about either."""
    broken = break_tensor(folders, "norm.weight", torch.nan)
    with Engine(folders[1], **SMALL) as engine:
        expected = tokens(engine.generate(PROMPTS, greedy(20, ignore_eos=True)))
    # Only the head's own check at load would see it: it is asked about hidden states after the norm.
    with Engine(folders[1], broken, **SMALL) as engine:
        logger = logging.getLogger("vllm.lilicorr")
        logger.addHandler(caplog.handler)
        assert tokens(engine.generate(PROMPTS, greedy(20, ignore_eos=True))) == expected
        sampled = engine.generate(PROMPTS, SamplingParams(temperature=1.0, top_k=9, max_tokens=20, ignore_eos=True))
        logger.removeHandler(caplog.handler)
        assert engine.counters.drafts > 0
    assert all(0 <= token < VOCAB_SIZE for row in tokens(sampled) for token in row)
    said = list({record.getMessage() for record in caplog.records if "not numbers" in record.getMessage()})
    assert len(said) == 1 and "request" in said[0] and str(broken) in said[0]
