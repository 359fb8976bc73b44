# SPDX-License-Identifier: Apache-2.0
"""Draft tokens of both runners against vLLM's in-tree LiLiCorr drafter, position by position.

Random float32 pairs over a vocabulary of 32 that favour the same few tokens, so
that part of the drafts is accepted. One process per runner and drafter runs every geometry.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import as_older_export
from interpreter import run_engines
from pairs import drafter_config, target_config, write_drafter, write_target
from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint.convert import plan_conversion
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import write_checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry
from vllm_lilicorr.method.walks import greedy_walk

pytestmark = pytest.mark.slow

VOCAB_SIZE = 32
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 16}
# Name: (num_speculative_tokens, top-level keys, dflash_config keys).
GEOMETRIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (7, {}, {}),
    "grouped-conv": (7, {}, {"lilicorr_candidate_topk": 4} | CONVOLUTION),
    "sliding-window, five slots of seven": (5, SLIDING, {}),
    "own-lm-head": (7, {"has_own_lm_head": True}, {"lilicorr_candidate_topk": 16}),
    "no-token-proj, exported names": (7, {}, {"lilicorr_hidden_size": 64}),
    "one-candidate": (7, {}, {"lilicorr_candidate_topk": 1}),
    "block-16, grouped-conv": (15, {"block_size": 16}, CONVOLUTION),
}
# The in-tree drafter reads what `lilicorr convert` made of the older export that ours reads.
CONVERTED = "converted, from an older export"
GEOMETRIES[CONVERTED] = (7, SLIDING | {"use_sliding_window": False}, CONVOLUTION)
TRAINED = "trained pair"
PAIRS = (*GEOMETRIES, TRAINED)
PROMPT_LENGTHS = (5, 17, 40)  # the last is prefilled in two chunks
EXPORTED_NAMES = (
    ("feature_norm.", "feature_mlp.0."),
    ("feature_mlp.up_proj.", "feature_mlp.1."),
    ("feature_mlp.down_proj.", "feature_mlp.3."),
    (".mlp.up_proj.", ".mlp.0."),
    (".mlp.down_proj.", ".mlp.2."),
)


def favour_few_tokens(tensors: dict[str, torch.Tensor], embedding: str | None, lm_head: str) -> None:
    """Gives tokens 2 to 6 high logits everywhere, so that target and drafter often agree.

    One direction is added to every embedding, which the residual stream keeps, and
    to these tokens' rows of the LM head.
    """
    direction = torch.nn.functional.normalize(torch.ones(tensors[lm_head].shape[1]), dim=0)
    if embedding:
        tensors[embedding] += 4 * direction
    tensors[lm_head][2:7] += 2 * direction


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def rename_as_exported(folder: Path) -> None:
    """Gives the head's MLPs the names of Model Optimizer's export."""

    def exported(name: str) -> str:
        if name.startswith("lilicorr."):
            for ours, theirs in EXPORTED_NAMES:
                name = name.replace(ours, theirs)
        return name

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[exported(name)] = tensors.pop(name)

    edit(folder, rename)


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def engines(pair, prompts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pairs")
    target = write_target(folder / "target", target_config(vocab_size=VOCAB_SIZE, tie_word_embeddings=False))
    edit(target, lambda tensors: favour_few_tokens(tensors, "model.embed_tokens.weight", "lm_head.weight"))
    base = {"target": target, "prompts": random_prompts(), "sampling": {"max_tokens": 14}}
    engines = {"no-speculation": base | {"speculative_config": None}}
    for name, (num_speculative_tokens, top_level, nested) in GEOMETRIES.items():
        config = drafter_config(vocab_size=VOCAB_SIZE, dflash_config=nested, **top_level)
        drafter = write_drafter(folder / name, config)
        if config.get("has_own_lm_head"):
            edit(drafter, lambda tensors: favour_few_tokens(tensors, None, "lm_head.weight"))
        if name == CONVERTED:
            plan = plan_conversion(Checkpoint.open(as_older_export(drafter)))
            drafter = folder / "in-tree"
            write_checkpoint(drafter, plan)
        speculative = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": num_speculative_tokens,
            "draft_sample_method": "greedy",
        }
        engines[name] = base | {"speculative_config": speculative}
    trained = {
        "target": pair.target,
        "prompts": [prompts[index][:length] for index, length in zip((1, 2, 4), PROMPT_LENGTHS, strict=True)],
        "sampling": {"max_tokens": 24},
    }
    geometry = DrafterGeometry.from_config(json.loads((pair.drafter / "config.json").read_text()))
    speculative = {
        "method": "dflash",
        "model": pair.drafter,
        "num_speculative_tokens": geometry.num_slots,
        "draft_sample_method": "greedy",
    }
    engines[TRAINED] = trained | {"speculative_config": speculative}
    engines[f"{TRAINED}, no speculation"] = trained | {"speculative_config": None}
    return engines


@pytest.fixture(scope="module")
def results(engines: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by runner and drafter, then by geometry."""
    folder = tmp_path_factory.mktemp("jobs")
    results = {"in-tree": run_engines("v2", "in-tree", engines, folder)}
    # From here on under names that the oracle cannot read.
    rename_as_exported(engines["no-token-proj, exported names"]["speculative_config"]["model"])
    converted = engines[CONVERTED]["speculative_config"]
    converted["model"] = converted["model"].with_name(CONVERTED)
    return results | {runner: run_engines(runner, "ours", engines, folder) for runner in ("v2", "v1")}


def drafts_by_position(result: dict[str, Any]) -> dict[tuple[int, int], list[int]]:
    return {(draft["request"], draft["anchor_position"]): draft["tokens"] for draft in result["drafts"]}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_drafts_equal_the_in_tree_drafters(results, engines, runner: str, name: str) -> None:
    """Catches any difference in features, anchors, candidates, head or walk, at any position."""
    ours, oracle = results[runner][name], results["in-tree"][name]
    assert oracle["speculator"] == "vllm.v1.worker.gpu.spec_decode.lilicorr.speculator.LiLiCorrSpeculator"
    if runner == "v2":
        assert ours["speculator"] == "vllm_lilicorr.engine.speculator.LiLiCorrSpeculator"
    expected = drafts_by_position(oracle)
    assert drafts_by_position(ours) == expected
    num_slots = engines[name]["speculative_config"]["num_speculative_tokens"]
    assert {len(tokens) for tokens in expected.values()} == {num_slots}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("runner", ["in-tree", "v1", "v2"])
def test_served_tokens_are_the_targets(results, runner: str, name: str) -> None:
    """Catches a draft that is served without the target's consent."""
    alone = f"{TRAINED}, no speculation" if name == TRAINED else "no-speculation"
    assert results[runner][name]["outputs"] == results[runner][alone]["outputs"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_drafts_are_a_walk_and_not_the_best_of_each_slot(results, runner: str) -> None:
    """Catches a proposer that ignores the head: equal drafts prove nothing if argmax gives them too."""
    for name in PAIRS:
        drafts = results[runner][name]["drafts"]
        differing = sum(draft["tokens"] != [slot[0] for slot in draft["candidate_ids"]] for draft in drafts)
        assert (differing == 0) if name == "one-candidate" else (differing > 0), name


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_walk_equals_the_methods(results, runner: str) -> None:
    """Catches a runner whose walk reads another row than method/walks.py."""
    for name in PAIRS:
        for draft in results[runner][name]["drafts"]:
            path = greedy_walk(torch.tensor(draft["edge_logits"])[None])[0]
            candidates = torch.tensor(draft["candidate_ids"])
            assert draft["tokens"] == candidates.gather(1, path[:, None])[:, 0].tolist(), name


def test_steps_accept_and_reject(results) -> None:
    """Catches a test pair that never leaves the first case: all rejected, or all accepted."""
    accepted = set()
    result = results["v2"][TRAINED]
    for (request, anchor), tokens in drafts_by_position(result).items():
        start = anchor + 1 - PROMPT_LENGTHS[request]
        served = result["outputs"][request][start : start + len(tokens)]
        accepted.add(next((i for i, (a, b) in enumerate(zip(tokens, served, strict=False)) if a != b), len(served)))
    assert {0, 1, 2, 3} <= accepted
