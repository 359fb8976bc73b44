# SPDX-License-Identifier: Apache-2.0
"""What the kernels' custom ops return in a draft step: shape, strides and dtype of every output."""

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_lilicorr.kernels.random_step import TINY, Step

Outputs = list[tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]]


class RecordedOps(TorchDispatchMode):
    """Records the outputs of this project's custom ops."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Outputs = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "lilicorr":
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            described = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]
            self.outputs.append((func.__name__.split(".")[0], described))
        return result


def real_outputs() -> Outputs:
    """Of a step that runs; needs Triton's interpreter."""
    step = Step(TINY, torch.float32, "cpu", 0)
    with RecordedOps() as recorded:
        step.fused()
    return recorded.outputs


def fake_outputs() -> Outputs:
    """Of a step that is traced: no kernel runs, and nothing can be waited for."""
    step = Step(TINY, torch.float32, "cpu", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), RecordedOps() as recorded:
        step.fused()
    return recorded.outputs
