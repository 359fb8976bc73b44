# SPDX-License-Identifier: Apache-2.0
"""The lattices that a server wrote while it drafted (LILICORR_TRACE), matched with what it served.

Letters: S slots (drafted tokens), K candidates per slot.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TracedBlock:
    """One draft step of one request.

    Attributes:
        anchor_token_id: The token that the block continues.
        candidate_ids: [S][K] tokens, most likely first.
        log_probs: [S][K] of the drafter itself, under its full vocabulary.
        edge_logits: [S][K][K] from rank i of the slot before to rank j of this one;
            the rows of slot 0 are all alike (from the anchor).
        path: [S] ranks that the walk chose.
        served: Up to S tokens that the target really produced there.
    """

    anchor_token_id: int
    candidate_ids: list[list[int]]
    log_probs: list[list[float]]
    edge_logits: list[list[list[float]]]
    path: list[int]
    served: list[int]

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.path)

    @property
    def top_k(self) -> int:
        """K."""
        return len(self.candidate_ids[0])

    def accepted(self, ranks: Sequence[int]) -> int:
        """How many tokens of a path the target confirms: their longest common prefix."""
        count = 0
        for slot, token in enumerate(self.served[: self.num_slots]):
            if self.candidate_ids[slot][ranks[slot]] != token:
                break
            count += 1
        return count

    @property
    def num_accepted(self) -> int:
        """Accepted tokens of the chosen path."""
        return self.accepted(self.path)

    @property
    def num_accepted_by_argmax(self) -> int:
        """What the most likely candidate of every slot by itself would have got."""
        return self.accepted([0] * self.num_slots)

    def edge_probabilities(self, slot: int) -> list[float]:
        """[K] softmax over this slot's candidates, coming from the chosen one before it."""
        previous = self.path[slot - 1] if slot else 0
        row = self.edge_logits[slot][previous]
        top = max(row)
        weights = [math.exp(z - top) for z in row]
        total = sum(weights)
        return [weight / total for weight in weights]


def read_trace(path: Path, sequences: Mapping[str, list[int]]) -> list[TracedBlock]:
    """Reads the blocks of known requests.

    Args:
        path: The trace file: one JSON object per line.
        sequences: Response id -> prompt and output token ids. vLLM's request ids
            begin with the id of the response.

    Returns:
        Blocks whose S positions all lie within their sequence, in order of writing.
    """
    if not path.is_file():
        return []
    return list(_match(path.read_text().splitlines(), sequences))


def _match(lines: Iterable[str], sequences: Mapping[str, list[int]]) -> Iterable[TracedBlock]:
    for line in lines:
        record = json.loads(line)
        tokens = next((ids for name, ids in sequences.items() if record["request_id"].startswith(name)), None)
        first = record["anchor_position"] + 1
        if tokens is None or first + len(record["path"]) > len(tokens):
            continue
        yield TracedBlock(
            anchor_token_id=record["anchor_token_id"],
            candidate_ids=record["candidate_ids"],
            log_probs=record["log_probs"],
            edge_logits=record["edge_logits"],
            path=record["path"],
            served=tokens[first : first + len(record["path"])],
        )


def most_telling(blocks: Sequence[TracedBlock]) -> TracedBlock | None:
    """The block in which walking gained most over slot-wise argmax; partly accepted ones first."""
    return max(
        blocks,
        key=lambda block: (
            block.num_accepted - block.num_accepted_by_argmax,
            block.num_accepted < block.num_slots,
            block.num_accepted,
        ),
        default=None,
    )
