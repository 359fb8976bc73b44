# SPDX-License-Identifier: Apache-2.0
"""Keeps what the drafter saw of a few requests, from their first token on, for an examination.

Kept are token ids, features, and the outputs of a few other target layers, which
forward hooks copy while an eager target computes. Memory: at most MAX_BYTES; a request
that does not begin at position 0, or leaves a gap, is not kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vllm_lilicorr.engine.examination import Transcript

MAX_BYTES = 64 << 20
MAX_REQUESTS, MAX_TOKENS = 16, 512
# Forwards after which a tap closes by itself: a suspended drafter asks for nothing.
MAX_FORWARDS = 512


class LayerTap:
    """Copies the outputs of target layers (hidden state plus residual) while it is open.

    `outputs` holds those of the last forward, none where they would take more than MAX_BYTES.
    """

    def __init__(self, layers: nn.ModuleList, wanted: Sequence[int]) -> None:
        self.outputs: dict[int, torch.Tensor] = {}
        self._calls_left = MAX_FORWARDS * len(wanted)
        self._handles = [layers[index].register_forward_hook(self._keep(index)) for index in wanted]

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._calls_left -= 1
            if self._calls_left < 0:
                self.close()
                return
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            if hidden.nbytes * len(self._handles) > MAX_BYTES:
                self.outputs.pop(index, None)
                return
            # The next layer's norm changes both in place.
            self.outputs[index] = hidden.clone() if residual is None else hidden + residual

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.outputs.clear()


class _Request:
    def __init__(self) -> None:
        self.num_prompt_tokens: int | None = None
        self.token_ids: list[torch.Tensor] = []
        self.features: list[torch.Tensor] = []
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.length = 0
        self.next_token_id = 0


class Transcripts:
    """Requests that are followed; `add` is called once per step."""

    def __init__(self, bytes_per_token: int, tap: LayerTap | None) -> None:
        self._tap = tap
        self._tokens_left = MAX_BYTES // bytes_per_token
        self._requests: dict[str, _Request] = {}
        self._gone: set[str] = set()

    def add(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int],  # first row of each request
        ends: Sequence[int],  # behind its last committed row
        first_positions: Sequence[int],
        is_partial: Sequence[bool],
        token_ids: torch.Tensor,  # [N] int
        next_token_ids: Sequence[int],
        features: torch.Tensor,  # [N, D]
    ) -> None:
        layers = self._tap.outputs if self._tap is not None else {}
        for row, request_id in enumerate(request_ids):
            request = self._requests.get(request_id)
            if request is None:
                if first_positions[row] or request_id in self._gone or len(self._requests) == MAX_REQUESTS:
                    continue
                request = self._requests[request_id] = _Request()
            length = ends[row] - starts[row]
            if first_positions[row] != request.length or request.length + length > MAX_TOKENS:
                if first_positions[row] < request.length:  # computes again what was evicted
                    self._gone.add(request_id)
                    del self._requests[request_id]
                continue
            if length > self._tokens_left:
                continue
            self._tokens_left -= length
            rows = slice(starts[row], ends[row])
            request.token_ids.append(token_ids[rows].clone())
            request.features.append(features[rows].clone())
            for index, output in layers.items():
                request.layers.setdefault(index, []).append(output[rows].clone())
            request.length += length
            request.next_token_id = next_token_ids[row]
            if request.num_prompt_tokens is None and not is_partial[row]:
                request.num_prompt_tokens = request.length
        layers.clear()

    def num_positions(self, num_slots: int) -> int:
        """Positions of all answers that are followed by `num_slots` tokens."""
        answers = (one.length - one.num_prompt_tokens for one in self._requests.values() if one.num_prompt_tokens)
        return sum(max(length + 1 - num_slots, 0) for length in answers)

    def finished(self) -> list[Transcript]:
        """What was kept of every request that has answered something."""
        return [
            Transcript(
                request.num_prompt_tokens,
                torch.cat((*request.token_ids, request.token_ids[0].new_tensor([request.next_token_id]))).long(),
                torch.cat(request.features),
                {
                    index: torch.cat(outputs)
                    for index, outputs in request.layers.items()
                    if sum(map(len, outputs)) == request.length
                },
            )
            for request in self._requests.values()
            if request.num_prompt_tokens is not None
        ]

    def close(self) -> None:
        if self._tap is not None:
            self._tap.close()
