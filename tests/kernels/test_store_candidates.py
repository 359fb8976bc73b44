# SPDX-License-Identifier: Apache-2.0
"""The write of candidates' scores against its reference, under Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted

from vllm_lilicorr.kernels.reference import store_candidates

pytest.importorskip("triton")


@pytest.mark.parametrize("top_k", [1, 5, 8])
def test_writes_what_the_reference_writes(tmp_path: Path, top_k: int) -> None:
    """Would catch padding that writes into a request, and a row or stride of another slot."""
    num_slots, vocab_size = 3, 11
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, num_slots, vocab_size, generator=generator)
    req_states = torch.tensor([4, 0, -1, 2]).repeat_interleave(num_slots)
    # One more column than K, as the walk has.
    ids = torch.rand(len(req_states), vocab_size, generator=generator).argsort(dim=1)[:, : top_k + 1]
    scores = torch.randn(ids.shape, generator=generator)
    scores[0, 0] = -torch.inf
    args = (rows, ids[:, :top_k], scores[:, :top_k], req_states)
    ((_, (result, *_)),) = run_interpreted([("store_candidates", "store_candidates", args)], tmp_path)
    assert not torch.equal(result, rows)
    store_candidates(*args)
    assert torch.equal(result, rows)
