# SPDX-License-Identifier: Apache-2.0
"""Candidates against a sort of the whole row; shards against the whole."""

import subprocess
import sys

import pytest
import torch

from vllm_lilicorr.kernels.reference import merge_candidates, partial_candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary", "top_k"), [(1, 17, 1), (3, 1000, 8), (7, 2051, 16)])
def test_candidates_are_the_best_of_the_row(dtype: torch.dtype, rows: int, vocabulary: int, top_k: int) -> None:
    """Would catch a wrong order, or log-probabilities normalised over the candidates alone."""
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    logits = logits.to(dtype)
    wanted = torch.log_softmax(logits.double(), dim=-1)
    values, ids, partition = partial_candidates(logits.clone(), top_k)
    log_probs = values - partition
    torch.testing.assert_close(log_probs.double(), wanted.gather(1, ids), rtol=0, atol=2e-5)
    torch.testing.assert_close(log_probs.double(), wanted.topk(top_k).values, rtol=0, atol=2e-5)


def test_padding_counts_for_nothing() -> None:
    """Would catch rows of the padded vocabulary drafted, or added to the normaliser."""
    logits = torch.zeros(2, 12)
    logits[:, 8:] = 50.0
    values, ids, partition = partial_candidates(logits, 4, num_padding=4)
    assert int(ids.max()) < 8
    torch.testing.assert_close(values - partition, torch.full((2, 4), -torch.log(torch.tensor(8.0)).item()))


def test_shards_merge_exactly() -> None:
    """Would catch tensor parallelism that drafts other tokens than one rank."""
    logits = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    values, ids, partition = partial_candidates(logits.clone(), 8)
    parts = [partial_candidates(shard.clone(), 8) for shard in logits.split(32, dim=1)]
    merged_ids, log_probs = merge_candidates(
        torch.cat([part[0] for part in parts], dim=1),
        torch.cat([part[1] + 32 * index for index, part in enumerate(parts)], dim=1),
        torch.cat([part[2] for part in parts], dim=1),
        8,
    )
    assert torch.equal(merged_ids, ids)
    torch.testing.assert_close(log_probs, values - partition)


@pytest.mark.parametrize("with_triton", [True, False])
def test_imports_with_and_without_triton(with_triton: bool) -> None:
    """Would catch a CPU install, which brings no Triton, failing to import the operations."""
    block = "" if with_triton else "import sys; sys.modules['triton'] = None\n"
    code = block + "import vllm_lilicorr.kernels.reference as r; print(r.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "vllm_lilicorr.kernels.reference", result.stderr
