# SPDX-License-Identifier: Apache-2.0
"""The few options of `vllm serve` that decide whether a drafter works, read without vLLM."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm_lilicorr.serving.speculative_overrides import merge_speculative_overrides

DEFAULT_MEMORY_SHARE = 0.92  # vLLM's own, 0.31 to 0.33
# vLLM's suffixes of whole numbers: small letters are decimal, capitals binary.
_FACTORS = {"": 1, **{s: 1000**i for i, s in enumerate("kmgt", 1)}, **{s: 1024**i for i, s in enumerate("KMGT", 1)}}
_SHORTHANDS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


@dataclass(frozen=True)
class EngineArguments:
    """What was asked of vLLM; None where a flag was not given.

    Attributes:
        target: the model to serve.
        speculative: the speculative config as vLLM would get it, keys with underscores.
        merged: the line that says which dotted options were merged into the JSON, if any.
        config_file: a file of more options, which is not read here.
    """

    target: str | None = None
    speculative: Mapping[str, Any] = field(default_factory=dict)
    merged: str | None = None
    config_file: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    linear_backend: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"

    @property
    def memory_share(self) -> float:
        return DEFAULT_MEMORY_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization


def parse_engine_arguments(words: Sequence[str]) -> EngineArguments:
    """Reads `--option value`, `--option=value`, either with underscores, and dotted speculative options.

    Args:
        words: what follows `vllm serve`, a leading `vllm` `serve` allowed; options that
            do not matter here are passed over.

    Raises:
        ValueError: a value that vLLM would not read either.
    """
    words = list(words)
    for prefix in ("vllm", "serve"):
        if words[:1] == [prefix]:
            words = words[1:]
    words, merged = merge_speculative_overrides(words)
    words, dotted = _take_dotted(words)
    target = words[0] if words and not words[0].startswith("-") else None
    given, _ = _parser().parse_known_args([_dashed(word) for word in words])
    values = {name: value for name, value in vars(given).items() if value is not None}
    model = values.pop("model", None)
    speculative = _read_object(values.pop("speculative_config", None))
    speculative.update(dotted)
    for option, key in _SHORTHANDS.items():
        if option in values:
            speculative.setdefault(key, values.pop(option))
    return EngineArguments(target=target or model, speculative=speculative, merged=merged, **values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"vLLM's options cannot be read: {message}; write them as for `vllm serve`.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-config", "-sc")
    for name in ("--model", "--dtype", "--kv-cache-dtype", "--linear-backend", "--mamba-ssm-cache-dtype"):
        parser.add_argument(name)
    parser.add_argument("--config", dest="config_file")
    parser.add_argument("--spec-method")
    parser.add_argument("--spec-model")
    parser.add_argument("--spec-tokens", type=int)
    parser.add_argument("--tensor-parallel-size", "-tp", type=_count)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=_count)
    parser.add_argument("--block-size", type=_count)
    parser.add_argument("--max-model-len", type=_length)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    return parser


def _dashed(word: str) -> str:
    """--max_model_len=8 as --max-model-len=8, as vLLM reads it."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _length(text: str) -> int | None:
    """None for "auto" and -1: as much as the memory holds."""
    return None if text in ("auto", "-1") else _whole_number(text)


def _whole_number(text: str) -> int:
    """131072, 128k (decimal), 128K (binary), 1.5k."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if not found:
        raise ValueError(text)
    return int(float(found[1]) * _FACTORS[found[2]])


def _take_dotted(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Speculative options without any JSON beside them: vLLM makes one object of them."""
    plain = [word for word in words if word.partition("=")[0].replace("_", "-") in ("--speculative-config", "-sc")]
    if plain:
        return words, {}
    merged, line = merge_speculative_overrides(["--speculative-config", "{}", *words])
    return (merged[2:], json.loads(merged[1])) if line else (words, {})


def _read_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config={text!r} is not JSON ({error}); quote one JSON object.") from None
    if not isinstance(value, dict):
        raise ValueError(f"--speculative-config={text!r} is not a JSON object; use {{...}}.")
    return {str(key).replace("-", "_"): item for key, item in value.items()}
