# SPDX-License-Identifier: Apache-2.0
"""The ways in which a checkpoint can be wrong, and what must be said of each."""

import json
import struct

import torch
from broken import (
    FIRST,
    INDEX,
    SECOND,
    WEIGHTS,
    Case,
    change_bytes,
    change_header,
    change_json,
    change_target,
    change_target_tensors,
    change_tensors,
    dangling,
    fill_tensor,
    folder_for_file,
    link_config_out,
    link_out,
    only_pickles,
    ordinary_mask,
    overwrite,
    place_norm,
    qwen_mask,
    raw,
    remove_key,
    replace_tensor,
    set_config,
    set_dflash_config,
    set_quantization,
    some_entry,
    undeclared,
    unequal_scales,
)

from vllm_lilicorr.checkpoint.findings import Level

ERROR, WARNING = Level.ERROR, Level.WARNING
GATE, FC = "layers.0.mlp.gate_proj", "fc.weight"
CASES = (
    # files
    Case(
        "truncated in the header", "files", ERROR, r"header alone takes .* truncated", change_bytes(lambda b: b[:100])
    ),
    Case(
        "truncated in the data",
        "files",
        ERROR,
        r"its tensors end at .* it is truncated",
        change_bytes(lambda b: b[:-1]),
    ),
    Case("bytes at the end", "files", ERROR, r"the rest belongs to no tensor", change_bytes(lambda b: b + b"\0")),
    Case(
        "empty file", "files", ERROR, r"0 bytes long, but a safetensors file begins with 8", change_bytes(lambda b: b"")
    ),
    Case(
        "header bomb",
        "files",
        ERROR,
        r"announces a header of 1,152,921,504,606,846,976 bytes",
        change_bytes(lambda b: struct.pack("<Q", 2**60) + b[8:]),
    ),
    Case("header is no JSON", "files", ERROR, r"no JSON header", change_bytes(lambda b: b[:8] + b"x" + b[9:])),
    Case(
        "deep JSON",
        "files",
        ERROR,
        r"no JSON header",
        change_bytes(lambda b: struct.pack("<Q", 200_000) + b"[" * 200_000),
    ),
    Case(
        "header is a list",
        "files",
        ERROR,
        r"header that is no JSON object",
        change_bytes(lambda b: b"\2" + b"\0" * 7 + b"[]"),
    ),
    Case(
        "unknown dtype",
        "files",
        ERROR,
        r"describes tensor .* in a way that the format does not know",
        change_header(lambda header: some_entry(header).update(dtype="F12")),
    ),
    Case(
        "negative dimension",
        "files",
        ERROR,
        r"both must be counts",
        change_header(lambda header: some_entry(header).update(shape=[-1])),
    ),
    Case(
        "shape needs more bytes",
        "files",
        ERROR,
        r"but its shape needs",
        change_header(lambda header: some_entry(header)["shape"].append(2)),
    ),
    Case(
        "overlapping tensors",
        "files",
        ERROR,
        r"(overlaps the tensor|leaves a gap) before it",
        change_header(
            lambda header: some_entry(header).update(
                data_offsets=[offset + 4 for offset in some_entry(header)["data_offsets"]]
            )
        ),
    ),
    Case(
        "missing shard",
        "files",
        ERROR,
        r"model-00002-of-00002.safetensors is missing: .* lists it",
        lambda drafter, target: (drafter / SECOND).unlink(),
    ),
    Case(
        "index names the wrong shard",
        "files",
        ERROR,
        r"places norm.weight in files that do not hold them",
        lambda drafter, target: place_norm(
            SECOND if json.loads((drafter / INDEX).read_text())["weight_map"]["norm.weight"] == FIRST else FIRST
        )(drafter, target),
    ),
    Case(
        "index leaves a tensor out",
        "files",
        ERROR,
        r"does not list norm.weight",
        change_json(INDEX, lambda index: index["weight_map"].pop("norm.weight")),
    ),
    Case(
        "index leads up",
        "files",
        ERROR,
        r"places 'norm.weight' in '\.\./target/model.safetensors'",
        place_norm("../target/model.safetensors"),
    ),
    Case(
        "index has an absolute path",
        "files",
        ERROR,
        r"places 'norm.weight' in '/etc/passwd.safetensors'",
        place_norm("/etc/passwd.safetensors"),
    ),
    Case("index has a number", "files", ERROR, r"places 'norm.weight' in 3: only .safetensors files", place_norm(3)),
    Case("index without a map", "files", ERROR, r"has no weight_map", overwrite(INDEX, b'{"metadata": {}}')),
    Case("index is no JSON", "files", ERROR, r"index.json is no JSON", overwrite(INDEX, b"weights")),
    Case("link out of the folder", "files", ERROR, r"is a link to .*outside.safetensors: nothing outside", link_out),
    Case("config.json links out", "files", ERROR, r"is a link to .*outside.json: nothing outside", link_config_out),
    Case("link to nothing", "files", ERROR, r"is a link to nothing", dangling),
    Case("folder in place of a file", "files", ERROR, r"is no regular file", folder_for_file),
    Case(
        "no safetensors", "files", WARNING, r"holds only pytorch_model.bin: .* Save it in the safetensors", only_pickles
    ),
    Case(
        "no config.json",
        "files",
        ERROR,
        r"has no config.json",
        lambda drafter, target: (drafter / "config.json").unlink(),
    ),
    Case("config.json is no JSON", "files", ERROR, r"config.json is no JSON", overwrite("config.json", b"{")),
    Case("config.json is a list", "files", ERROR, r"holds a JSON list", overwrite("config.json", b"[1]")),
    Case(
        "config.json is no text", "files", ERROR, r"config.json is no JSON", overwrite("config.json", b"\xff\xfe\xfa")
    ),
    Case(
        "target's file is truncated",
        "target files",
        ERROR,
        r"Target: model.safetensors .* truncated",
        lambda drafter, target: (target / WEIGHTS).write_bytes((target / WEIGHTS).read_bytes()[:-5]) and None,
    ),
    # config.json
    Case(
        "another architecture",
        "architecture",
        ERROR,
        r"architectures \['Eagle'\] .* a LiLiCorr drafter says",
        change_json(
            "config.json", lambda c: (c.update(architectures=["Eagle"]), c["dflash_config"].pop("projector_type"))
        ),
    ),
    Case(
        "older export",
        "architecture",
        WARNING,
        r"an older export.*lilicorr convert",
        set_config(architectures=["DFlashDraftModel"]),
    ),
    Case("no block_size", "geometry", ERROR, r"config.json has no block_size", remove_key("block_size")),
    Case(
        "contradictory width",
        "geometry",
        ERROR,
        r"lilicorr_num_heads=5.*must divide",
        set_dflash_config(lilicorr_num_heads=5),
    ),
    Case(
        "dimension is text",
        "geometry",
        ERROR,
        r"hidden_size='wide' in .*: it must be a whole number",
        set_config(hidden_size="wide"),
    ),
    Case(
        "dimension is a list",
        "geometry",
        ERROR,
        r"hidden_size=\[64\] in .*whole number",
        set_config(hidden_size=[64]),
    ),
    Case(
        "mask outside the vocabulary",
        "geometry",
        ERROR,
        r"mask_token_id=512.*vocabulary of 512",
        set_dflash_config(mask_token_id=512),
    ),
    Case(
        "too few layer types",
        "attention",
        ERROR,
        r"layer_types has 1 entries: the drafter has 2 layers",
        set_config(layer_types=["full_attention"]),
    ),
    Case(
        "unknown layer type",
        "attention",
        ERROR,
        r"layer_types has linear_attention: known are",
        set_config(layer_types=["full_attention", "linear_attention"]),
    ),
    Case(
        "no window",
        "attention",
        ERROR,
        r"sliding_window None: sliding attention needs a window",
        set_config(layer_types=["sliding_attention"] * 2),
    ),
    Case(
        "mixed layers",
        "attention",
        WARNING,
        r"mixes full and sliding attention: only Model Runner V2",
        set_config(layer_types=["sliding_attention", "full_attention"], sliding_window=64),
    ),
    Case("other RoPE layout", "attention", WARNING, r"is_neox_style false", set_config(is_neox_style=False)),
    Case(
        "scale of another method",
        "head constants",
        WARNING,
        r"lilicorr_logit_scale 0.01",
        set_dflash_config(lilicorr_logit_scale=0.01),
    ),
    # tensors
    Case(
        "missing tensor",
        "tensors",
        ERROR,
        r"1 tensor missing: norm.weight \[64\]",
        change_tensors(lambda t: t.pop("norm.weight")),
    ),
    Case(
        "extra tensor",
        "tensors",
        ERROR,
        r"1 tensor unexpected: gate \[3\]",
        change_tensors(lambda t: t.update(gate=torch.ones(3))),
    ),
    Case(
        "swapped shape",
        "tensors",
        ERROR,
        r"of another shape: fc.weight: expected \[64, 128\], found \[128, 64\]",
        replace_tensor(FC, lambda tensor: tensor.T),
    ),
    Case("block of another size", "tensors", ERROR, r"of another shape: lilicorr", set_config(block_size=16)),
    Case(
        "integer weight",
        "storage",
        ERROR,
        r"fc.weight is I32: weights are F32",
        replace_tensor(FC, lambda t: t.to(torch.int32)),
    ),
    Case(
        "integer norm",
        "storage",
        ERROR,
        r"slot_embedding is I64",
        replace_tensor("lilicorr.slot_embedding", lambda t: t.long()),
    ),
    Case(
        "no scales",
        "storage",
        ERROR,
        r"gate_proj has no weight_scale: a NVFP4 weight cannot",
        change_tensors(lambda t: t.pop(f"{GATE}.weight_scale")),
    ),
    Case(
        "no second scale",
        "storage",
        ERROR,
        r"gate_proj has no weight_scale_2",
        change_tensors(lambda t: t.pop(f"{GATE}.weight_scale_2")),
    ),
    Case(
        "scales of another type",
        "storage",
        ERROR,
        r"weight_scale is BF16: NVFP4 needs F8_E4M3",
        replace_tensor(f"{GATE}.weight_scale", lambda t: t.float().bfloat16()),
    ),
    Case(
        "scales of another shape",
        "storage",
        ERROR,
        r"weight_scale has shape \[128, 2\]: its weight needs \[128, 4\]",
        replace_tensor(f"{GATE}.weight_scale", lambda t: t[:, :2]),
    ),
    Case(
        "scales without a quantized weight",
        "storage",
        ERROR,
        r"fc has weight_scale_2, and its weight is F32",
        change_tensors(lambda t: t.update({"fc.weight_scale_2": torch.ones(())})),
    ),
    # quantization
    Case(
        "raw dictionary",
        "quantization",
        WARNING,
        r"Model Optimizer's own dictionary",
        change_json("config.json", raw),
    ),
    Case(
        "nothing declared",
        "quantization",
        WARNING,
        r"are stored as nvfp4-w4a16, and no file declares it",
        change_json("config.json", undeclared),
    ),
    Case(
        "declared as FP8",
        "quantization",
        WARNING,
        r"declares fp8, but layers.0.mlp.* are nvfp4-w4a16",
        set_quantization(quant_algo="FP8"),
    ),
    Case(
        "unknown algorithm", "quantization", WARNING, r"declares 'modelopt INT3'", set_quantization(quant_algo="INT3")
    ),
    Case(
        "group size",
        "quantization",
        WARNING,
        r"group_size 32: NVFP4 scales groups of 16",
        set_quantization(group_size=32),
    ),
    Case("nothing excluded", "quantization", WARNING, r"but the weights are float", set_quantization(ignore=[])),
    Case(
        "everything excluded",
        "quantization",
        WARNING,
        r"as not quantized, but the weights are",
        set_quantization(ignore=["layers*", "*"]),
    ),
    Case(
        "unequal scales",
        "fused scales",
        WARNING,
        r"layers.1.mlp.gate/up have different weight_scale_2",
        change_tensors(unequal_scales),
    ),
    # the pair
    Case(
        "wider target",
        "target dimensions",
        ERROR,
        r"target_hidden_size 64: the target's hidden_size is 96",
        change_target(lambda c: c.update(hidden_size=96)),
    ),
    Case(
        "shallower target",
        "target layers",
        ERROR,
        r"target_layer_ids \[0, 2\]: the target has 2 layers",
        change_target(lambda c: c.update(num_hidden_layers=2)),
    ),
    Case(
        "another target",
        "target layers",
        ERROR,
        r"num_target_layers 3: the target has 36",
        change_target(lambda c: c.update(num_hidden_layers=36)),
    ),
    Case(
        "layers in another order",
        "target layers",
        WARNING,
        r"ascending order",
        set_dflash_config(target_layer_ids=[2, 0]),
    ),
    Case(
        "target without layers",
        "target layers",
        WARNING,
        r"num_hidden_layers None",
        change_target(lambda c: c.pop("num_hidden_layers")),
    ),
    Case(
        "other vocabulary",
        "vocabulary",
        ERROR,
        r"vocab_size 512: the target's is 640",
        change_target(lambda c: c.update(vocab_size=640)),
    ),
    Case("Qwen3's mask", "vocabulary", ERROR, r"mask_token_id 151669: it is Qwen3's mask token", qwen_mask),
    Case("mask is a word", "mask token", WARNING, r"mask_token_id 77 is the ordinary token 't77'", ordinary_mask),
    Case(
        "embedding too short",
        "target tensors",
        ERROR,
        r"token embedding has shape \[500, 64\]: the drafter needs at least 512 rows",
        change_target_tensors(
            lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:500].clone()})
        ),
    ),
    Case(
        "no LM head",
        "target tensors",
        WARNING,
        r"No LM head is found",
        change_target(lambda c: c.update(tie_word_embeddings=False)),
    ),
)
DEEP_CASES = (
    Case("NaN", "values", ERROR, r"fc.weight: NaN", fill_tensor(FC, float("nan"))),
    Case("infinite", "values", ERROR, r"fc.weight: infinite", fill_tensor(FC, float("inf"))),
    Case("zeros", "values", ERROR, r"fc.weight: zeros only", fill_tensor(FC, 0.0)),
    Case("packed zeros", "values", ERROR, r"gate_proj.weight: zeros only", fill_tensor(f"{GATE}.weight", 0)),
    Case("NaN in scales", "values", ERROR, r"weight_scale: NaN", fill_tensor(f"{GATE}.weight_scale", float("nan"))),
    Case(
        "negative scale",
        "values",
        ERROR,
        r"weight_scale_2: a scale is zero, negative",
        fill_tensor(f"{GATE}.weight_scale_2", -1.0),
    ),
    Case(
        "scale out of range",
        "values",
        ERROR,
        r"weight_scale_2: a scale is zero, negative or out",
        fill_tensor(f"{GATE}.weight_scale_2", 1e9),
    ),
    Case("weights too large", "values", WARNING, r"fc.weight: values out of all proportion", fill_tensor(FC, 1e6)),
    Case(
        "norms too small",
        "values",
        WARNING,
        r"norm.weight: values out of all proportion",
        fill_tensor("norm.weight", 1e-9),
    ),
)
