# SPDX-License-Identifier: Apache-2.0
"""Leave to use the CPU's tile registers (AMX), which vLLM's CPU kernels take for granted.

Linux gives a process these registers only when it asks. vLLM 0.32's CPU attention uses
them for bfloat16 wherever the CPU has them and relies on another library having asked;
where none has, the first request ends in "Illegal instruction", with or without
speculation. It can go when vLLM asks by itself.
"""


def allow_amx_tiles() -> None:
    """Asks for this process and all its threads; does nothing on a CPU without AMX."""
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    ask = getattr(torch.cpu, "_init_amx", None)
    if supported is not None and ask is not None and supported():
        ask()
