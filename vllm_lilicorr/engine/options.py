# SPDX-License-Identifier: Apache-2.0
"""What a user may set under "lilicorr" inside the speculative config.

vLLM refuses keys that it does not know, so they leave the speculative config before it
is validated and travel to the workers in `additional_config`, vLLM's place for plugins.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm_lilicorr.engine.step_costs import curves_in_seconds

KEY = "lilicorr"
WALKS = ("sampled", "greedy", "expected-length")


@dataclass(frozen=True)
class Options:
    """How to draft; every value has a default that needs no setting.

    Attributes:
        walk: "sampled": the greedy walk at temperature 0, a drawn path above;
            "expected-length": the walk of that name at temperature 0, a drawn path
            above; "greedy": the greedy walk at every temperature.
        candidate_topk: candidates per slot, at most what the drafter was trained with;
            None for all of them.
        adaptive_length: verify only as many drafted tokens as pay, and suspend the drafter where
            none do (model runner V1 with synchronous scheduling).
        cost_curve: what steps cost, for adaptive_length, instead of measuring it at start-up:
            {"target": {tokens: milliseconds}, "drafter": {requests: milliseconds}}.
        guard: watch acceptance, and say once where the drafter looks broken (model runner V1).
    """

    walk: str = WALKS[0]
    candidate_topk: int | None = None
    adaptive_length: bool = False
    cost_curve: Mapping[str, Mapping[str, float]] | None = None
    guard: bool = True

    @classmethod
    def from_mapping(cls, values: Any) -> "Options":
        """Raises ValueError for an unknown key or a value outside its range; names both."""
        if not isinstance(values, Mapping):
            raise ValueError(f'"{KEY}": {values!r} in the speculative config is no object; write "{KEY}": {{...}}.')
        values = {str(key).replace("-", "_"): value for key, value in values.items()}
        known = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise ValueError(f'"{KEY}" in the speculative config has no {unknown[0]!r}; it knows {", ".join(known)}.')
        options = cls(**values)
        if options.walk not in WALKS:
            raise ValueError(f"walk={options.walk!r} is no walk; use one of {', '.join(WALKS)}.")
        top_k = options.candidate_topk
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"candidate_topk={top_k!r} is no number of candidates; use 1 or more.")
        for name in ("adaptive_length", "guard"):
            if not isinstance(getattr(options, name), bool):
                raise ValueError(f"{name}={getattr(options, name)!r} is neither true nor false; use one of them.")
        if options.cost_curve is not None:
            curves_in_seconds(options.cost_curve)
        return options

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> "Options":
        """The options that a worker was started with."""
        return cls.from_mapping(vllm_config.additional_config.get(KEY, {}))

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)
