# SPDX-License-Identifier: Apache-2.0
"""Where a model lies on this machine: a folder, or the Hugging Face cache."""

import os
from pathlib import Path

_FILES = ["*.json", "*.safetensors"]


def local_folder(model: str, revision: str | None, download_dir: str | None, fetch: bool) -> Path | None:
    """The folder of a model, None where it is on no disk of this machine.

    Args:
        model: folder or Hugging Face repository.
        revision: of the repository.
        download_dir: its cache, None for Hugging Face's own.
        fetch: whether to download what is missing, where downloads are allowed.
    """
    if Path(model).is_dir():
        return Path(model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=_FILES,
                local_files_only=offline or not fetch,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None
