# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are wrong in one way each, and the check that must say so.

Every case changes a copy of a whole pair (a quantized drafter and its target).
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pairs import drafter_config, target_config, write_checkpoint, write_drafter, write_target
from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint.findings import Level
from vllm_lilicorr.checkpoint.nvfp4 import encode, tensor_scale

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@dataclass(frozen=True)
class Case:
    """One way to be wrong.

    Attributes:
        name: of the case.
        check: the check that must find it.
        level: how bad it is.
        message: regular expression that the finding's sentence matches.
        damage: makes a whole pair wrong; called with the drafter's and the target's folder.
    """

    name: str
    check: str
    level: Level
    message: str
    damage: Callable[[Path, Path], None]


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A drafter with NVFP4 MLPs, in two shards with an index, and its target with a tokenizer."""
    target = write_target(folder / "target", target_config())
    vocabulary = {f"t{index}": index for index in range(2, 512)}
    tokenizer = {"added_tokens": [{"id": 1, "content": "<mask>"}], "model": {"vocab": vocabulary}}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    plain = load_file(write_drafter(folder / "plain", drafter_config()) / WEIGHTS)
    tensors: dict[str, torch.Tensor] = {}
    for layer in (0, 1):
        gate, up = f"layers.{layer}.mlp.gate_proj", f"layers.{layer}.mlp.up_proj"
        shared = tensor_scale(plain[f"{gate}.weight"], plain[f"{up}.weight"])
        for module, scale in ((gate, shared), (up, shared), (f"layers.{layer}.mlp.down_proj", None)):
            encoded = encode(plain.pop(f"{module}.weight"), scale)
            tensors |= {f"{module}.{part}": value for part, value in encoded._asdict().items()}
    tensors |= plain
    drafter = folder / "drafter"
    ignored = sorted({name.rpartition(".")[0] for name in plain if name.endswith("weight") and plain[name].dim() == 2})
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ignored}
    config = drafter_config(quantization_config=quantization)
    write_checkpoint(drafter, config, {})
    (drafter / WEIGHTS).unlink()
    names = sorted(tensors)
    for file, part in ((FIRST, names[::2]), (SECOND, names[1::2])):
        save_file({name: tensors[name] for name in part}, drafter / file)
    shards = {name: FIRST for name in names[::2]} | {name: SECOND for name in names[1::2]}
    (drafter / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return drafter, target


# What a case does to the pair.


def change_json(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def damage(drafter: Path, target: Path) -> None:
        value = json.loads((drafter / file).read_text())
        change(value)
        (drafter / file).write_text(json.dumps(value))

    return damage


def set_config(**values: Any) -> Callable[[Path, Path], None]:
    return change_json("config.json", lambda config: config.update(values))


def set_dflash_config(**values: Any) -> Callable[[Path, Path], None]:
    return change_json("config.json", lambda config: config["dflash_config"].update(values))


def set_quantization(**values: Any) -> Callable[[Path, Path], None]:
    return change_json("config.json", lambda config: config["quantization_config"].update(values))


def remove_key(*path: str) -> Callable[[Path, Path], None]:
    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change_json("config.json", change)


def overwrite(name: str, data: bytes) -> Callable[[Path, Path], None]:
    return lambda drafter, target: (drafter / name).write_bytes(data) and None


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path, Path], None]:
    """All tensors in one file, changed."""

    def damage(drafter: Path, target: Path) -> None:
        tensors = load_file(drafter / FIRST) | load_file(drafter / SECOND)
        change(tensors)
        for file in (FIRST, SECOND, INDEX):
            (drafter / file).unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, drafter / WEIGHTS)

    return damage


def replace_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path, Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: change(tensors[name])}))


def fill_tensor(name: str, value: float) -> Callable[[Path, Path], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full(tensor.shape, value).to(tensor.dtype)

    return replace_tensor(name, change)


def change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    """The first shard's header, changed; its bytes stay."""

    def damage(drafter: Path, target: Path) -> None:
        data = (drafter / FIRST).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (drafter / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def change_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    return lambda drafter, target: (drafter / FIRST).write_bytes(change((drafter / FIRST).read_bytes())) and None


def some_entry(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in header.items() if name.startswith("lilicorr."))


def place_norm(file: Any) -> Callable[[Path, Path], None]:
    return change_json(INDEX, lambda index: index["weight_map"].update({"norm.weight": file}))


def link_out(drafter: Path, target: Path) -> None:
    outside = drafter.parent / "outside.safetensors"
    (drafter / FIRST).rename(outside)
    (drafter / FIRST).symlink_to(outside)


def link_config_out(drafter: Path, target: Path) -> None:
    outside = drafter.parent / "outside.json"
    (drafter / "config.json").rename(outside)
    (drafter / "config.json").symlink_to(outside)


def dangling(drafter: Path, target: Path) -> None:
    (drafter / SECOND).unlink()
    (drafter / SECOND).symlink_to(drafter / "gone")


def linked_to_itself(drafter: Path, target: Path) -> None:
    (drafter / SECOND).unlink()
    (drafter / SECOND).symlink_to(SECOND)


def folder_for_file(drafter: Path, target: Path) -> None:
    (drafter / SECOND).unlink()
    (drafter / SECOND).mkdir()


def only_pickles(drafter: Path, target: Path) -> None:
    for file in (FIRST, SECOND, INDEX):
        (drafter / file).unlink()
    (drafter / "pytorch_model.bin").write_bytes(b"pickle")


def change_target(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def damage(drafter: Path, target: Path) -> None:
        config = json.loads((target / "config.json").read_text())
        change(config)
        (target / "config.json").write_text(json.dumps(config))

    return damage


def change_target_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path, Path], None]:
    def damage(drafter: Path, target: Path) -> None:
        tensors = load_file(target / WEIGHTS)
        change(tensors)
        save_file(tensors, target / WEIGHTS)

    return damage


def ordinary_mask(drafter: Path, target: Path) -> None:
    set_dflash_config(mask_token_id=77)(drafter, target)


def qwen_mask(drafter: Path, target: Path) -> None:
    set_config(vocab_size=262144)(drafter, target)
    set_dflash_config(mask_token_id=151669)(drafter, target)
    change_target(lambda config: config.update(vocab_size=262144))(drafter, target)


def unequal_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight_scale_2"] = tensors["layers.1.mlp.up_proj.weight_scale_2"] * 2


def undeclared(config: dict[str, Any]) -> None:
    del config["quantization_config"]


def raw(config: dict[str, Any]) -> None:
    converted = config["quantization_config"]
    config["quantization_config"] = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": converted["quant_algo"],
            "group_size": 16,
            "exclude_modules": ["dflash_module." + name for name in converted["ignore"]] + ["model*"],
        },
    }
