# SPDX-License-Identifier: Apache-2.0
"""Defects of vLLM's CPU build, each shown without its cure, and the cure."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from vllm_lilicorr.engine import seams


@pytest.fixture
def cured():
    """All cures in place, as in a worker."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    seams.normalize_each_layer()
    seams.expand_exactly()
    seams.constrain_no_rows()


@pytest.mark.parametrize("num_context", [1, 8, 95])
def test_every_layer_has_its_own_key_norm(cured, num_context: int) -> None:
    """Would catch acceptance lost in silence: stock gives every drafter layer the first layer's k_norm."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, num_context, 2, 64, generator=generator)
    weights = torch.rand(3, 64, generator=generator) + 0.5
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    wanted = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + 1e-6) * weights[:, None, None]
    torch.testing.assert_close(DFlashQwen3Model._normalize_context_k(model, keys), wanted)
    stock = DFlashQwen3Model._normalize_context_k.__wrapped__(model, keys)
    torch.testing.assert_close(stock[0], wanted[0])
    assert (stock[1:] - wanted[1:]).abs().max() > 0.1, "vLLM is cured: the seam can go"


def test_drafted_tokens_have_their_requests_parameters(cured) -> None:
    """Would catch top-k or temperature of a neighbour, and greedy rows divided by zero."""
    counts = torch.tensor([2, 2, 5, 6])
    temperature = torch.tensor([0.5, 9.0, 0.0, 2.0])
    found = rejection_sampler.expand_batch_to_tokens(temperature, counts, 6, replace_from=0, replace_to=1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0]
    top_k = torch.tensor([3, 4, 5, 6], dtype=torch.int32)
    assert rejection_sampler.expand_batch_to_tokens(top_k, counts, 6).tolist() == [3, 3, 5, 5, 5, 6]


def test_a_step_without_drafts_has_no_top_k(cured) -> None:
    """Would catch an engine that ends at the first request with top-k alone: its prefill drafts nothing."""
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.ones(1), top_k=torch.tensor([3]), top_p=None)
    logits, counts = torch.empty(0, 32), torch.zeros(1, dtype=torch.int32)
    assert rejection_sampler.apply_sampling_constraints(logits, counts, metadata).shape == (0, 32)
    with pytest.raises(RuntimeError, match="reduction dim"):
        rejection_sampler.apply_sampling_constraints.__wrapped__(logits, counts, metadata)
    rows = torch.arange(8.0)[None].repeat(2, 1)
    counts = torch.tensor([2], dtype=torch.int32)
    limited = rejection_sampler.apply_sampling_constraints(rows.clone(), counts, metadata)
    assert limited.isfinite().sum(-1).tolist() == [3, 3]
