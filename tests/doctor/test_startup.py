# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks before a server loads weights."""

import json
import logging
from dataclasses import replace

import pytest
from broken import write_pair
from planned import CPU
from vllm.engine.arg_utils import EngineArgs

from vllm_lilicorr.checkpoint.doctor import WEIGHT_CHECKS
from vllm_lilicorr.doctor import gpu_rules, startup
from vllm_lilicorr.doctor.machines import KNOWN_MACHINES
from vllm_lilicorr.doctor.startup import check_before_loading


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path)


def check(pair, machine=CPU, monkeypatch=None, speculative=None, **arguments):
    drafter, target = pair
    if monkeypatch:
        monkeypatch.setattr(startup, "this_machine", lambda: machine)
    given = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 7} | (speculative or {})
    config = json.loads((target / "config.json").read_text())
    return check_before_loading(EngineArgs(model=str(target), **arguments), given, config)


def change(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_whole_pair_passes_in_silence(pair, caplog):
    """Would catch a start that warns about nothing, or that is changed where nothing needs changing."""
    assert check(pair) == {}
    assert caplog.records == []


def test_errors_stop_the_start_and_are_all_listed(pair):
    """Would catch 70 GB loaded before a mistake in the drafter shows, and mistakes told one by one."""
    drafter, _ = pair
    change(drafter, layer_types=["full_attention"], num_target_layers=99)
    with pytest.raises(ValueError, match="2 errors:") as error:
        check(pair)
    assert "layer_types has 1 entries" in str(error.value)
    assert "num_target_layers 99: the target has 3 layers" in str(error.value)


def test_warnings_are_logged(pair, caplog):
    """Would catch a warning that only the command line shows."""
    change(pair[0], is_neox_style=False)
    with caplog.at_level(logging.WARNING, "vllm.lilicorr"):
        check(pair)
    (record,) = caplog.records
    assert record.message.startswith("attention: is_neox_style false")


def test_a_working_backend_is_set(pair, monkeypatch):
    """Would catch DGX Spark's start ending in an assertion although the plugin knows what works there."""
    spark = KNOWN_MACHINES["gb10"]
    share = {"gpu_memory_utilization": 0.7, "dtype": "bfloat16"}
    assert check(pair, spark, monkeypatch, **share) == {"attention_backend": "TRITON_ATTN"}
    assert check(pair, spark, monkeypatch, {"attention_backend": "TRITON_ATTN"}, **share) == {}
    with pytest.raises(ValueError, match="FLASH_ATTN, set in the speculative config"):
        check(pair, spark, monkeypatch, {"attention_backend": "FLASH_ATTN"}, **share)
    assert check(pair, KNOWN_MACHINES["h200"], monkeypatch, dtype="bfloat16") == {}


def test_what_the_options_ask_for_is_checked(pair):
    """Would catch engine arguments that never reach the rules."""
    with pytest.raises(ValueError, match="4 query and 2 key/value heads"):
        check(pair, tensor_parallel_size=3)


def test_api_servers_do_not_ask_for_memory_that_the_engine_has_taken(pair, monkeypatch):
    """Would catch several API servers that end on unified memory once the engine has begun to load."""
    spark = replace(KNOWN_MACHINES["gb10"], is_present=True)
    monkeypatch.setattr(gpu_rules, "available_memory_gib", lambda: 1.0)
    with pytest.raises(ValueError, match="are available now"):
        check(pair, spark, monkeypatch, dtype="bfloat16")
    with pytest.raises(ValueError, match="are available now"):
        check(pair, spark, monkeypatch, dtype="bfloat16", _api_process_count=2, _api_process_rank=-1)
    found = check(pair, spark, monkeypatch, dtype="bfloat16", _api_process_count=2, _api_process_rank=1)
    assert found == {"attention_backend": "TRITON_ATTN"}


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_the_targets_own_cache_type_counts(pair, monkeypatch, caplog, file):
    """Would catch an FP8 cache that a multimodal target declares beside its text configuration overlooked."""
    drafter, target = pair
    text = json.loads((target / "config.json").read_text())
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    if file == "config.json":
        change(target, quantization_config=stated)
    else:
        (target / file).write_text(json.dumps({"quantization": stated}))
    monkeypatch.setattr(startup, "this_machine", lambda: KNOWN_MACHINES["rtx-pro-6000"])
    arguments = EngineArgs(model=str(target), dtype="bfloat16")
    with caplog.at_level(logging.WARNING, "vllm.lilicorr"):
        check_before_loading(arguments, {"method": "dflash", "model": str(drafter)}, text)
    assert "kv_cache_dtype fp8_e4m3 for the drafter" in caplog.text


def test_pipeline_stages_are_vllms_to_judge(pair):
    """Would catch a start stopped on GPUs whose driver's command is not in the container."""
    assert check(pair, pipeline_parallel_size=2) == {}


def test_weights_made_up_at_load_need_no_files(pair):
    """Would catch --load-format dummy refused because there are no weights."""
    drafter, _ = pair
    for file in drafter.glob("model*"):
        file.unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        check(pair)
    assert check(pair, load_format="dummy") == {}
    made_up = {"draft_load_config": {"load_format": "dummy"}}
    assert check(pair, speculative=made_up) == {}
    with pytest.raises(ValueError, match="holds no weights"):
        check(pair, load_format="dummy", speculative={"draft_load_config": {"load_format": "auto"}})
    assert "files" in WEIGHT_CHECKS


def test_a_target_that_is_nowhere_has_no_tokenizer(pair, tmp_path, caplog, monkeypatch):
    """Would catch the tokenizer of whatever folder the server is started in taken for the target's."""
    drafter, target = pair
    vocabulary = {f"t{index}": index for index in range(512)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {"method": "dflash", "model": str(drafter)}
    config = json.loads((target / "config.json").read_text())
    arguments = EngineArgs(model=str(target))
    arguments.model = "nobody/target"
    assert check_before_loading(arguments, given, config) == {}
    assert caplog.records == []


def test_a_drafter_that_is_nowhere_is_left_to_vllm(pair, caplog, monkeypatch):
    """Would catch a check that makes vLLM's own download, or its own message, impossible."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with caplog.at_level(logging.WARNING, "vllm.lilicorr"):
        assert check(pair, speculative={"model": "nobody/nothing"}) == {}
    assert "not on disk" in caplog.text
