# SPDX-License-Identifier: Apache-2.0
"""Prompts that no pair of this project was trained on: PyTorch's own modules, code and prose."""

import inspect

SOURCES = ("activation", "batchnorm", "conv", "loss", "module", "pooling", "rnn", "sparse", "transformer")
PROMPT_CHARACTERS = 240


def held_out_text(num_prompts: int) -> list[str]:
    """Pieces of 240 characters from places spread evenly, the same for one version of PyTorch."""
    from importlib import import_module

    text = "".join(inspect.getsource(import_module(f"torch.nn.modules.{name}")) for name in SOURCES)
    stride = len(text) // num_prompts
    return [text[start : start + PROMPT_CHARACTERS] for start in range(0, stride * num_prompts, stride)]
