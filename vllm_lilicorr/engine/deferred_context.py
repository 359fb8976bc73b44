# SPDX-License-Identifier: Apache-2.0
"""Context of a suspended drafter: kept as target features, written to its KV cache in bulk.

While nothing is drafted, nobody reads the drafter's context K/V, so projecting and
writing it at every step is work without use. The rows are kept in the order in which
they were computed and written before anything is drafted again.

Blocks may change hands in between: a request ends or is preempted, its blocks go to
another, or to a request that shares its prefix. Every row that any owner computed is
kept, and of several rows for one slot the last one is written. So a block holds, once
it is read, what it would have held without the delay; older rows survive only beyond
its owner's length, where attention does not look.

Without prefix caching nobody reads the blocks of a request that has ended: its rows are
dropped instead of written (a row of the embedded pair costs as much as 4 % of a token).
"""

from collections.abc import Callable

import torch

# Where every row is to be written, more of them would stall the resumption (4096 rows of the embedded pair
# take 30 ms on one core); where only those of living requests are, the bytes are what counts.
MAX_ROWS = 4096
MAX_BYTES = 64 * 2**20
# Tensors kept one by one before they are joined: a Python object per step adds up.
_MAX_PIECES = 256

_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # features [N, F], positions [N], slots [N]


class DeferredContext:
    """Rows of context that are still to be written.

    Memory: at most `max_bytes` of features, and what one step adds on top.
    """

    def __init__(
        self,
        write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        rows_per_write: int,
        is_needed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        max_rows: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Args:
        write: takes features [N, F], positions [N] int64 and slots [N] int64, no slot twice.
        rows_per_write: the largest N that `write` is given.
        is_needed: which of these slots [N] int64 may be read again, [N] bool; None for all.
        max_rows: rows that may be kept; the step that reaches it writes them all, 0 keeps nothing.
            None is MAX_ROWS without `is_needed`, no bound with it.
        max_bytes: the same bound on the features' bytes.
        """
        self._write = write
        self._is_needed = is_needed
        self._rows_per_write = rows_per_write
        if max_rows is None and is_needed is None:
            max_rows = MAX_ROWS
        self._max_rows = float("inf") if max_rows is None else max_rows
        self._max_bytes = max_bytes
        # One piece a step, and what was joined of earlier ones.
        self._pieces: list[_Rows] = []
        self._joined: list[_Rows] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def defer(
        self,
        features: torch.Tensor,  # [N, F] of the target, before fc; kept, not copied
        positions: torch.Tensor,  # [N] int64, copied
        slots: torch.Tensor,  # [N] int64 of the drafter's KV cache, copied
        rows: torch.Tensor | None = None,  # [M] int64: which rows to keep; None keeps all
    ) -> bool:
        """Keeps one step's rows; True where the bound was reached and all rows were written."""
        if rows is None:
            piece = (features, positions.clone(), slots.clone())
        else:
            piece = (features[rows], positions[rows], slots[rows])
        self._pieces.append(piece)
        self._num_rows += len(piece[0])
        num_bytes = self._num_rows * features.shape[1] * features.element_size()
        if self._num_rows >= self._max_rows or num_bytes >= self._max_bytes:
            return self.flush() > 0
        if len(self._pieces) >= _MAX_PIECES:
            self._joined.append(_join(self._pieces))
            self._pieces.clear()
        return False

    def flush(self) -> int:
        """Writes every row that may be read, each slot once; returns how many rows were kept until now."""
        num_rows = self._num_rows
        if num_rows:
            features, positions, slots = _join(self._joined + self._pieces)
            self._joined.clear()
            self._pieces.clear()
            self._num_rows = 0
            rows_to_write = last_of_each(slots)
            if self._is_needed is not None:
                rows_to_write = rows_to_write[self._is_needed(slots[rows_to_write])]
            for rows in rows_to_write.split(self._rows_per_write):
                self._write(features[rows], positions[rows], slots[rows])
        return num_rows


def _join(pieces: list[_Rows]) -> _Rows:
    if len(pieces) == 1:
        return pieces[0]
    features, positions, slots = zip(*pieces, strict=True)
    return torch.cat(features), torch.cat(positions), torch.cat(slots)


def last_of_each(
    slots: torch.Tensor,  # [N] int64
) -> torch.Tensor:
    """Indices [M] int64 of the last row of every slot, in the order of the rows."""
    order = torch.argsort(slots, stable=True)
    in_order = slots[order]
    is_last = torch.ones_like(in_order, dtype=torch.bool)
    is_last[:-1] = in_order[1:] != in_order[:-1]
    return order[is_last].sort().values


def committed_rows(
    query_start_loc: torch.Tensor,  # [R + 1] int32
    num_rejected: torch.Tensor,  # [R] int32
) -> torch.Tensor:
    """Indices [M] int64 of a step's rows without the rejected ones at each request's end."""
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    lengths = ends - starts
    row = torch.arange(int(lengths.sum()), device=query_start_loc.device)
    limit = (ends - num_rejected).repeat_interleave(lengths)
    return (row < limit).nonzero()[:, 0]
