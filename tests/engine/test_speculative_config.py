# SPDX-License-Identifier: Apache-2.0
"""The user's speculative config, before any weight is read."""

import pytest
from pairs import drafter_config, target_config
from transformers import PretrainedConfig

from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.engine.speculative_config import refuse_pipeline_parallel, rewrite_draft_config, translate

TARGET = PretrainedConfig(**{k: v for k, v in target_config().items() if k not in ("architectures", "torch_dtype")})
CHECKPOINTS = {
    "folder/drafter": drafter_config(),
    "folder/convolutions": drafter_config(dflash_config={"conv_kernel_size": 2, "conv_group_size": 16}),
    "folder/old-export": drafter_config(architectures=["DFlashDraftModel"]),
    "folder/plain-dflash": {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}},
    "other-vocabulary": drafter_config(vocab_size=1024),
    "other-width": drafter_config(hidden_size=128),
    "deeper-target": drafter_config(dflash_config={"target_layer_ids": [0, 5]}),
}


def translated(default_walk: str | None = None, **config):
    """Speculative config and options."""
    return translate(config, lambda model, revision: CHECKPOINTS.get(model), TARGET, default_walk)


def run(**config):
    return translated(**config)[0]


def options(default_walk: str | None = None, **config):
    return translated(default_walk, method="lilicorr", model="folder/drafter", **config)[1]


@pytest.mark.parametrize("method", [{"method": "lilicorr"}, {"method": "dflash"}, {}])
@pytest.mark.parametrize("model", ["folder/drafter", "folder/old-export"])
def test_fills_in_what_the_checkpoint_knows(method: dict, model: str) -> None:
    """Would catch a config that needs num_speculative_tokens, or drafts greedily for sampling requests."""
    assert run(**method, model=model) == {
        "method": "dflash",
        "model": model,
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
    }


def test_keeps_what_the_user_set() -> None:
    """Would catch defaults that win over the user."""
    config = run(
        method="lilicorr", model="folder/drafter", num_speculative_tokens=3, draft_sample_method="greedy", seed=1
    )
    assert config["num_speculative_tokens"] == 3
    assert config["draft_sample_method"] == "greedy"
    assert config["seed"] == 1
    synthetic = run(method="lilicorr", model="folder/drafter", rejection_sample_method="synthetic")
    assert "draft_sample_method" not in synthetic


@pytest.mark.parametrize(
    "config",
    [
        {"method": "dflash", "model": "folder/plain-dflash", "num_speculative_tokens": 9},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "mtp", "num_speculative_tokens": 1},
        {"model": "folder/plain-dflash"},
        {"model": "no-such-folder"},
        {"model": "ngram", "num_speculative_tokens": 3},
    ],
)
def test_other_methods_are_left_alone(config: dict) -> None:
    """Would catch the plugin changing somebody else's speculation."""
    assert translated(**config) == (config, None)


@pytest.mark.parametrize("length", [0, 8, -1, 2.5, "7", True])
def test_draft_length_outside_the_block(length: object) -> None:
    """Would catch silently low acceptance: 8 tokens from a block of 8 read past the trained slots."""
    with pytest.raises(ValueError, match=r"num_speculative_tokens=.* block_size 8; use 1\.\.7"):
        run(method="lilicorr", model="folder/drafter", num_speculative_tokens=length)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("folder/plain-dflash", r"needs a LiLiCorrDraftModel checkpoint, but 'folder/plain-dflash' has architectures"),
        ("no-such-folder", "has no config.json"),
        ("other-vocabulary", "vocab_size 1024: the target's is 512"),
        ("other-width", "hidden_size 128: it drafts on"),
        ("deeper-target", r"target_layer_ids \[0, 5\]: the target has 3 layers, 0..2"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(model: str, message: str) -> None:
    """Would catch 70 GB loaded before a mismatch shows, or acceptance that is silently broken."""
    with pytest.raises(ValueError, match=message):
        run(method="lilicorr", model=model)


def test_convolutions_draft_one_length() -> None:
    """Would catch blocks of another length read through convolutions of the first: silently low acceptance."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 8, 3]]}
    assert run(method="lilicorr", model="folder/drafter", **schedule)["num_speculative_tokens"] == 7
    with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size is set, but .* choose one"):
        run(method="lilicorr", model="folder/convolutions", **schedule)


def test_a_lost_object_is_explained() -> None:
    """Would catch the bare error after a dotted option replaced the whole object."""
    with pytest.raises(ValueError, match="replace the whole .*one JSON object.*lilicorr serve"):
        run(num_speculative_tokens=5)
    with pytest.raises(ValueError, match="names no drafter"):
        run(method="lilicorr")


def test_pipeline_parallel_is_refused() -> None:
    """Would catch an assertion deep inside a worker, after the weights were loaded."""
    refuse_pipeline_parallel(1)
    with pytest.raises(ValueError, match="pipeline_parallel_size=2, but .* use pipeline_parallel_size=1"):
        refuse_pipeline_parallel(2)


def test_older_exports_become_one_dialect() -> None:
    """Would catch an export named DFlashDraftModel that drafts without its correlator."""
    values = drafter_config(architectures=["DFlashDraftModel"], dflash_config={"block_size": 8})
    del values["block_size"]
    config = rewrite_draft_config(lambda c: c, None, PretrainedConfig(**values))
    assert config.architectures == ["LiLiCorrDraftModel"]
    assert config.block_size == 8
    assert config.dflash_config["block_size"] == 8
    plain = rewrite_draft_config(lambda c: c, None, PretrainedConfig(architectures=["DFlashDraftModel"]))
    assert plain.architectures == ["DFlashDraftModel"]


def test_options_are_taken_out() -> None:
    """Would catch a key that vLLM refuses, or an option that gets lost on the way."""
    config, found = translated(method="lilicorr", model="folder/drafter", lilicorr={"walk": "expected-length"})
    assert "lilicorr" not in config
    assert found == Options(walk="expected-length")
    assert options(lilicorr={"candidate-topk": 2}) == Options(candidate_topk=2)
    assert options() == Options()
    assert Options.from_mapping(found.to_mapping()) == found


def test_walk_of_the_environment_is_a_default() -> None:
    """Would catch an environment that wins over what stands in the config, or is not checked."""
    assert options("greedy").walk == "greedy"
    assert options("greedy", lilicorr={"candidate_topk": 4}) == Options(walk="greedy", candidate_topk=4)
    assert options("greedy", lilicorr={"walk": "sampled"}).walk == "sampled"
    with pytest.raises(ValueError, match="walk='longest' is no walk; use one of sampled, greedy, expected-length"):
        options("longest")


def test_greedy_walk_draws_nothing() -> None:
    """Would catch proposals asked for from a walk that has none."""
    assert (
        run(method="lilicorr", model="folder/drafter", lilicorr={"walk": "greedy"})["draft_sample_method"] == "greedy"
    )
    with pytest.raises(ValueError, match='walk="greedy" draws nothing, but draft_sample_method="probabilistic"'):
        options(lilicorr={"walk": "greedy"}, draft_sample_method="probabilistic")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"walk": "viterbi"}, "walk='viterbi' is no walk; use one of sampled, greedy, expected-length"),
        ({"wlak": "greedy"}, "has no 'wlak'; it knows walk, candidate_topk"),
        ({"candidate_topk": 0}, "candidate_topk=0 is no number of candidates; use 1 or more"),
        ({"candidate_topk": True}, "candidate_topk=True is no number of candidates"),
        ({"candidate_topk": 9}, r"candidate_topk=9, but this drafter was trained with 8 .*use 1\.\.8"),
        ("greedy", "'greedy' in the speculative config is no object"),
    ],
)
def test_bad_options_are_refused(given: object, message: str) -> None:
    """Would catch a typing mistake that silently leaves the default in place."""
    with pytest.raises(ValueError, match=message):
        options(lilicorr=given)


def test_options_belong_to_a_lilicorr_drafter() -> None:
    """Would catch options that another drafter ignores without a word."""
    with pytest.raises(ValueError, match='without "lilicorr" options for a plain DFlash one'):
        run(method="dflash", model="folder/plain-dflash", lilicorr={"walk": "greedy"})


@pytest.mark.parametrize("method", ["lilicor", "LiLiCorr", "lilicorrr"])
def test_a_misspelt_method_is_named(method: str) -> None:
    """Would catch vLLM's list of methods shown to somebody who missed a letter: ours is not in it."""
    with pytest.raises(ValueError, match=f"method '{method}' .* write \"lilicorr\""):
        run(method=method, model="folder/drafter")
