# SPDX-License-Identifier: Apache-2.0
"""Fails what a CUDA graph cannot capture: operators and reads that wait for the device."""

import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result, or its size, must reach the host.
OPERATORS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "nonzero_static", "argwhere", "equal",
    "allclose", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
    "repeat_interleave",
)  # fmt: skip
# Reads of a CPU tensor that no operator shows.
READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__")


class HostSyncs:
    """Context manager; `found` lists what would synchronise, `seen` every operator that ran."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.seen: set[str] = set()
        self._modes = (_Operators(self), _Reads(self))

    def __enter__(self) -> "HostSyncs":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        self._syncs.seen.add(name)
        operator = name.partition(".")[0]
        # With a size given, repeat_interleave needs nothing from the device.
        if operator in OPERATORS and not (kwargs or {}).get("output_size"):
            self._syncs.found.append(name)
        # Indexing by a boolean mask is nonzero in disguise.
        if operator in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                self._syncs.found.append(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Triton's interpreter reads tensors where the compiled kernel would not.
        if name in READS and not caller.startswith("triton."):
            self._syncs.found.append(f"Tensor.{name} in {caller}")
        return func(*args, **(kwargs or {}))
