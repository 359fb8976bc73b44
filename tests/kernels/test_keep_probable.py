# SPDX-License-Identifier: Apache-2.0
"""The in-place top-k and top-p filter against the method's, under Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted

from vllm_lilicorr.method.proposals import keep_probable

pytest.importorskip("triton")

# Request states: temperature, top-k and top-p of each; the vocabulary limits nothing.
TEMPERATURE = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.0, 0.7])
TOP_P = torch.tensor([1.0, 1.0, 0.6, 0.9, 1.0, 0.5, 0.95])


@pytest.mark.parametrize("vocab_size", [7, 9001])
def test_keeps_what_the_method_keeps(tmp_path: Path, vocab_size: int) -> None:
    """Would catch a wrong request's limits, a wrong temperature, and tails of the vocabulary taken for tokens."""
    top_k = torch.tensor([vocab_size, 3, vocab_size, 5, 1, 2, 6], dtype=torch.int32)
    req_states = torch.tensor([4, 2, 0, -1, 3, 1, 5, 6, 0, 3])
    generator = torch.Generator().manual_seed(0)
    padded = 2 * torch.randn(len(req_states), vocab_size + 3, generator=generator)
    logits = padded[:, :vocab_size]
    logits[7, 1:3] = -torch.inf
    logits[8] = torch.nan
    logits[9] = logits[9].round()  # ties
    is_distribution = torch.arange(len(req_states)) != 8
    args = (padded, is_distribution, req_states, TEMPERATURE, top_k, TOP_P)
    ((log_partition, (result, *_)),) = run_interpreted(
        [("keep_probable", "keep_probable_", (logits, *args[1:]))], tmp_path
    )
    for row, state in enumerate(req_states.tolist()):
        limited = state >= 0 and TEMPERATURE[state] > 0 and (top_k[state] < vocab_size or TOP_P[state] < 1)
        if row == 8:
            assert torch.equal(result[row], torch.zeros(vocab_size))
        elif not limited:
            assert torch.equal(result[row], logits[row])
            assert log_partition[row] == torch.inf
        else:
            scaled = logits[row] / TEMPERATURE[state]
            probs = torch.softmax(scaled, dim=0)[None]
            kept = keep_probable(probs, top_k[state : state + 1], TOP_P[state : state + 1])[0] > 0
            wanted = logits[row].masked_fill(~kept, -torch.inf)
            assert torch.equal(result[row], wanted), (row, (result[row] != wanted).sum())
            torch.testing.assert_close(log_partition[row], torch.logsumexp(scaled, dim=0), rtol=1e-5, atol=1e-5)
