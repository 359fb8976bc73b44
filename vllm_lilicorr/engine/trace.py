# SPDX-License-Identifier: Apache-2.0
"""A record of every lattice that was drafted from, one JSON line each (LILICORR_TRACE)."""

import json
from pathlib import Path

import torch

from vllm_lilicorr.method.lattice import Lattice


class LatticeTrace:
    """Appends lattices to a file; a line is written whole or not at all."""

    def __init__(self, path: str, max_lines: int | None = None) -> None:
        """Raises ValueError where the file cannot be opened for appending."""
        self._lines_left = float("inf") if max_lines is None else max_lines
        try:
            self._file = Path(path).open("a", buffering=1)
        except OSError as error:
            raise ValueError(
                f"LILICORR_TRACE={path!r} cannot be written ({error.strerror}); name a file in a folder that exists."
            ) from error

    def write(
        self,
        request_ids: list[str],
        anchor_positions: torch.Tensor,  # [R] int64
        anchor_token_ids: torch.Tensor,  # [R] int64
        lattice: Lattice,
        path: torch.Tensor,  # [R, S] int64 ranks; K for a token from outside the candidates
        draft_token_ids: torch.Tensor,  # [R, S] int64
    ) -> None:
        for row, request_id in enumerate(request_ids):
            if self._lines_left <= 0:
                return
            self._lines_left -= 1
            record = {
                "request_id": request_id,
                "anchor_position": int(anchor_positions[row]),
                "anchor_token_id": int(anchor_token_ids[row]),
                "candidate_ids": lattice.candidate_ids[row].tolist(),
                "log_probs": lattice.log_probs[row].tolist(),
                "edge_logits": lattice.edge_logits[row].tolist(),
                "path": path[row].tolist(),
                "draft_token_ids": draft_token_ids[row].tolist(),
            }
            self._file.write(json.dumps(record) + "\n")
