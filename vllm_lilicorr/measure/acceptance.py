# SPDX-License-Identifier: Apache-2.0
"""vLLM's own counters of speculative decoding, and the figures derived from them.

The convention everywhere in this package is the pooled one: acceptance length is
1 + accepted drafts / draft steps over all requests (the 1 is the target's own token).
"""

from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class SpeculationCounts:
    """Counters since the engine started, or a difference of two readings.

    Attributes:
        drafts: Draft steps, one per request and engine step.
        draft_tokens: Tokens drafted.
        accepted: Tokens accepted.
        accepted_by_position: How often the draft at each position was accepted. A
            position counts only if all before it were accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def from_prometheus(cls, text: str) -> "SpeculationCounts":
        """Reads the text of a server's /metrics; all zero on a server without speculation."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = (
            (sample.name, int(sample.labels.get("position", -1)), int(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total")
        )
        return cls._from_samples(samples)

    @classmethod
    def from_engine(cls, metrics: Iterable[object]) -> "SpeculationCounts":
        """Reads what `LLM.get_metrics()` returns."""
        samples: list[tuple[str, int, int]] = []
        for metric in metrics:
            name = f"{metric.name}_total"
            if not name.startswith(PREFIX):
                continue
            if hasattr(metric, "values"):
                samples += [(name, position, n) for position, n in enumerate(metric.values)]
            else:
                samples.append((name, -1, int(metric.value)))
        return cls._from_samples(samples)

    @classmethod
    def _from_samples(cls, samples: Iterable[tuple[str, int, int]]) -> "SpeculationCounts":
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for name, position, number in samples:
            kind = name.removeprefix(PREFIX).removesuffix("_total")
            if kind == "accepted_tokens_per_pos":
                positions[position] = positions.get(position, 0) + number
            else:
                totals[kind] = totals.get(kind, 0) + number
        return cls(
            drafts=totals.get("drafts", 0),
            draft_tokens=totals.get("draft_tokens", 0),
            accepted=totals.get("accepted_tokens", 0),
            accepted_by_position=tuple(positions[position] for position in sorted(positions)),
        )

    def __sub__(self, earlier: "SpeculationCounts") -> "SpeculationCounts":
        before = earlier.accepted_by_position or (0,) * len(self.accepted_by_position)
        return SpeculationCounts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(a - b for a, b in zip(self.accepted_by_position, before, strict=True)),
        )

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        mine, theirs = self.accepted_by_position, other.accepted_by_position
        length = max(len(mine), len(theirs))
        mine, theirs = (row + (0,) * (length - len(row)) for row in (mine, theirs))
        return SpeculationCounts(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per step, pooled; 1.0 without speculation."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of draft steps in which the draft at each position was accepted."""
        return tuple(n / self.drafts if self.drafts else 0.0 for n in self.accepted_by_position)
