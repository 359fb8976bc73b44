# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint beside its weights and configuration: tokenizer, licence, model card."""

from pathlib import Path

from vllm_lilicorr.checkpoint.reader import CONFIG_NAME, INDEX_NAME, QUANTIZATION_NAME, is_inside

_REWRITTEN = (CONFIG_NAME, INDEX_NAME, QUANTIZATION_NAME)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def other_files(folder: Path) -> list[Path]:
    """Regular files at a checkpoint's top level that a rewritten checkpoint takes over, sorted.

    Hidden files and weights in other formats are left out, and so are links to files outside the folder: nothing
    outside it is read.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in _REWRITTEN
        and path.suffix not in _WEIGHTS
        and is_inside(folder, path)
    ]
