# SPDX-License-Identifier: Apache-2.0
"""Wrong settings end with one clear ValueError, before any weight is read: these folders hold none."""

import json

import pytest
from pairs import drafter_config, target_config
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_lilicorr.method.geometry import ARCHITECTURE


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folders with a config.json and nothing else."""
    root = tmp_path_factory.mktemp("configs")

    def write(name, config):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        return str(root / name)

    plain = drafter_config(architectures=["DFlashDraftModel"])
    plain["dflash_config"] = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    return {
        "target": write("target", target_config()),
        "drafter": write("drafter", drafter_config()),
        "plain": write("plain", plain),
        "deeper": write("deeper", drafter_config(dflash_config={"target_layer_ids": [0, 9]})),
        "other vocabulary": write("other", drafter_config(vocab_size=1024)),
    }


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "lilicorr", "model": "drafter", "num_speculative_tokens": 8}, r"use 1\.\.7"),
        ({"method": "dflash", "model": "drafter", "num_speculative_tokens": 0}, r"use 1\.\.7"),
        ({"method": "lilicorr", "model": "plain"}, ARCHITECTURE),
        ({"method": "lilicorr", "model": "deeper"}, "target_layer_ids"),
        ({"method": "lilicorr", "model": "other vocabulary"}, "vocab_size 1024"),
        ({"method": "lilicorr", "num_speculative_tokens": 5}, "one JSON object"),
        ({"num_speculative_tokens": 5}, "one JSON object"),
    ],
)
def test_wrong_settings(configs, speculative, message):
    """Catches a mistake that shows only after minutes of loading, or as poor acceptance."""
    speculative = {key: configs.get(value, value) for key, value in speculative.items()}
    with pytest.raises(ValueError, match=message):
        LLM(configs["target"], skip_tokenizer_init=True, speculative_config=speculative)


def test_flags(configs):
    """Catches flags that the parser refuses, or that lose what the checkpoint knows."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", configs["target"], "--skip-tokenizer-init", "--load-format", "dummy"]
    words += ["--spec-method", "lilicorr", "--spec-model", configs["drafter"]]
    config = EngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config().speculative_config
    assert config.method == "dflash" and config.num_speculative_tokens == 7
    assert config.draft_model_config.architectures == [ARCHITECTURE]
    assert config.draft_sample_method == "probabilistic"
