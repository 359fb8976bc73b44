# SPDX-License-Identifier: Apache-2.0
"""Rules that depend on the GPU: one case per rule, on the GPU that it is about and on others."""

import dataclasses

import pytest
from planned import CPU, DENSE_TARGET, HYBRID_TARGET, planned

from vllm_lilicorr.checkpoint.findings import Level
from vllm_lilicorr.doctor import gpu_rules
from vllm_lilicorr.doctor.engine_arguments import EngineArguments
from vllm_lilicorr.doctor.engine_rules import RULES, check_server
from vllm_lilicorr.doctor.gpu_rules import backend_to_set, nvfp4_widths
from vllm_lilicorr.doctor.machines import KNOWN_MACHINES

BLACKWELL_12 = ("gb10", "rtx-pro-6000")
OTHERS = ("h100", "h200", "b200")
SHARE = "--gpu-memory-utilization 0.75"
TRITON = """m --gpu-memory-utilization 0.75 --speculative-config '{"attention_backend": "TRITON_ATTN"}'"""


def judged(server, skip=()):
    return [finding for finding in check_server(server, skip) if finding.level is not Level.OK]


@pytest.mark.parametrize("name", BLACKWELL_12)
def test_a_working_backend_is_set_where_flash_attention_asserts(name):
    """Would catch a start that ends in a device-side assertion after minutes of loading."""
    server = planned(f'm {SHARE} -sc \'{{"model": "d"}}\'', machine=name)
    assert judged(server) == []
    (found,) = RULES["attention backend"](server)
    assert found.value == "TRITON_ATTN, set by this plugin"
    assert f"FLASH_ATTN, vLLM's own choice on the {server.machine.title}" in found.rule
    assert backend_to_set(server) == "TRITON_ATTN"
    causal = planned(f"{SHARE}", machine=name, drafter={"dflash_config": {"causal": True}})
    for other in (planned(TRITON, machine=name), causal, planned(SHARE, machine="h200"), planned("", machine=CPU)):
        assert backend_to_set(other) is None


def test_flash_attention_set_by_the_user_asserts_too():
    """Would catch a rule that looks at vLLM's own choice only."""
    (found,) = judged(planned(f"{SHARE} -sc.attention_backend flash_attn", machine="gb10"))
    assert (found.check, found.level) == ("attention backend", Level.ERROR)
    assert found.value == "FLASH_ATTN, set in the speculative config"
    assert found.remedy == 'Set "attention_backend": "TRITON_ATTN" in the speculative config.'


@pytest.mark.parametrize("name", BLACKWELL_12)
@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_cache_crashes_a_non_causal_drafter(name, kind):
    """Would catch an illegal memory access in the first draft; or a cost that is not the geometry's."""
    server = planned(f"{SHARE} --kv-cache-dtype {kind} --max-model-len 131072", machine=name)
    (found,) = judged(server)
    assert (found.check, found.level) == ("drafter KV cache", Level.ERROR)
    assert found.value == f"kv_cache_dtype {kind} for the drafter, read by FLASHINFER"
    assert 'Set "kv_cache_dtype": "bfloat16" in the speculative config, together with' in found.remedy
    assert "10,240 more bytes of KV cache a token on every rank (20,480 instead of 10,240), 1.25 GiB" in found.remedy
    assert judged(server, skip=["drafter KV cache"]) == []
    cured = f"{SHARE} --kv-cache-dtype {kind} -sc.kv_cache_dtype bfloat16 -sc.attention_backend TRITON_ATTN"
    assert judged(planned(cured, machine=name)) == [], "the remedy must work"


def test_fp8_cache_with_another_backend_is_a_warning():
    """Would catch a refusal of what nobody has seen fail."""
    (found,) = judged(planned(f"{SHARE} --kv-cache-dtype fp8 -sc.attention_backend TRITON_ATTN", machine="gb10"))
    assert (found.check, found.level) == ("drafter KV cache", Level.WARNING)
    assert "read by TRITON_ATTN: an FP8 cache read in both directions has crashed" in found.sentence


def test_cost_of_a_float_cache_counts_ranks_and_hybrid_padding():
    """Would catch the cost of all heads on one rank, and silence about padding between cache groups."""
    server = planned(f"{SHARE} -tp 2 --kv-cache-dtype fp8", machine="gb10", target=HYBRID_TARGET)
    (found,) = RULES["drafter KV cache"](server)
    assert "5,120 more bytes" in found.remedy
    assert "pad caches of different types" in found.remedy
    (found,) = RULES["drafter KV cache"](planned("-tp 16 --kv-cache-dtype fp8", machine="gb10"))
    assert "(2,560 instead of 1,280)" in found.remedy, "no rank holds less than one head"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("words", ["", "--kv-cache-dtype fp8"])
def test_other_gpus_need_no_setting(name, words):
    """Would catch warnings about GPUs on which nothing fails."""
    assert judged(planned(words, machine=name)) == []


@pytest.mark.parametrize(
    ("name", "words", "level", "sentence"),
    [
        ("h200", "-sc.attention_backend FLASHINFER --kv-cache-dtype fp8", "ok", "FLASHINFER: set in the speculative"),
        ("h200", "-sc.attention_backend auto", "ok", "FLASH_ATTN: vLLM's own choice on the H200"),
        ("h200", "-sc.attention_backend FLEX_ATTENTION --kv-cache-dtype fp8", "error",
         "vLLM refuses it for this drafter on the H200: it reads no KV cache of type fp8. Leave it out: vLLM picks "
         "FLASH_ATTN."),
        ("h200", "-sc.attention_backend TREE_ATTN", "warning", "attention_backend TREE_ATTN: whether it takes"),
        ("h200", "--kv-cache-dtype nvfp4", "warning", "kv_cache_dtype nvfp4 for the drafter: which attention backend"),
        ("h200", "--block-size 8", "error",
         "No attention backend takes the drafter's layers on the H200: FLASH_ATTN: its KV cache blocks are multiples "
         "of 16 tokens, not 8; FLASHINFER"),
    ],
)  # fmt: skip
def test_backends_that_a_user_sets(name, words, level, sentence):
    """Would catch a setting that vLLM refuses after the target was loaded."""
    (found,) = RULES["attention backend"](planned(words, machine=name))
    assert found.level == level
    assert sentence in found.sentence


def test_bytes_of_other_cache_types_are_not_guessed():
    """Would catch a 4-bit cache counted as 16 bits."""
    server = planned("--kv-cache-dtype nvfp4", target=HYBRID_TARGET)
    assert list(RULES["drafter KV cache"](server)) == []
    assert server.hybrid_block_tokens is None


def test_a_cpu_has_one_backend():
    """Would catch GPU rules applied to a CPU."""
    (found,) = RULES["attention backend"](planned(machine=CPU))
    assert (found.level, found.value) == (Level.OK, "CPU_ATTN")
    assert judged(planned("--kv-cache-dtype fp8", machine=CPU)) == []


WIDTHS = {
    "layers.0.mlp.down_proj": (4096, 12304),
    "layers.0.mlp.up_proj": (12304, 4096),
    "layers.1.mlp.down_proj": (4096, 12304),
    "mixer.experts.0.down_proj": (4096, 12304 - 16),
    "lilicorr.layers.0.attn.out_proj": (1024, 1024),
}


@pytest.mark.parametrize("name", BLACKWELL_12)
def test_nvfp4_widths_on_a_rank(name):
    """Would catch garbage from NVFP4 kernels over a rank's K of 12304 / 2 = 6152 = 32 * 192 + 8."""
    machine = KNOWN_MACHINES[name]
    (found,) = nvfp4_widths(WIDTHS, EngineArguments(tensor_parallel_size=2), machine)
    assert found.level is Level.ERROR
    assert "tensor_parallel_size 2 with layers.0.mlp.down_proj (K 12304, 6152 on a rank), layers.1" in found.sentence
    assert found.remedy == "Use --linear-backend marlin, or another --tensor-parallel-size."
    assert "up_proj" not in found.sentence
    marlin = EngineArguments(tensor_parallel_size=2, linear_backend="marlin")
    assert list(nvfp4_widths(WIDTHS, marlin, machine)) == []
    even = {"layers.0.mlp.down_proj": (4096, 12288)}
    (found,) = nvfp4_widths(even, EngineArguments(tensor_parallel_size=2), machine)
    assert found.level is Level.OK
    assert list(nvfp4_widths({}, EngineArguments(), machine)) == []


@pytest.mark.parametrize("machine", [*(KNOWN_MACHINES[name] for name in OTHERS), CPU])
def test_nvfp4_widths_matter_on_sm12x_only(machine):
    """Would catch errors about GPUs whose kernels take any width."""
    assert list(nvfp4_widths(WIDTHS, EngineArguments(tensor_parallel_size=2), machine)) == []


def test_default_share_of_shared_memory():
    """Would catch a DGX Spark whose default asks for what the operating system holds."""
    server = planned(TRITON.replace(SHARE, ""), machine="gb10")
    (found,) = judged(server)
    assert (found.check, found.level) == ("GPU memory", Level.WARNING)
    assert found.value == "gpu_memory_utilization 0.92, vLLM's default: 112.0 of 121.7 GiB"
    assert "with MemAvailable of the whole machine" in found.rule
    assert "--gpu-memory-utilization 0.75" in found.remedy
    assert judged(server, skip=["GPU memory"]) == []
    (older,) = RULES["GPU memory"](dataclasses.replace(server, vllm_version=(0, 31)))
    assert "in which the page cache does not count" in older.rule
    assert list(RULES["GPU memory"](planned(machine="h200"))) == []


@pytest.mark.parametrize(("available", "level"), [(60.0, Level.ERROR), (100.0, Level.OK)])
def test_share_of_memory_on_this_machine(monkeypatch, available, level):
    """Would catch a start that vLLM refuses at once, and a remedy that it refuses again."""
    monkeypatch.setattr(gpu_rules, "available_memory_gib", lambda: available)
    machine = dataclasses.replace(KNOWN_MACHINES["gb10"], is_present=True)
    (found,) = RULES["GPU memory"](planned(SHARE, machine=machine))
    assert found.level is level
    if level is Level.ERROR:
        assert "60.0 GiB are available now" in found.rule
        assert found.remedy == "Close other programs, or set --gpu-memory-utilization 0.47."
        assert 0.47 * machine.memory_gib < available


@pytest.mark.parametrize(
    ("problems", "remarks", "level", "words"),
    [
        (["1.0 GiB of memory are available, and 4 GiB are needed; close other programs."], [], "error",
         "1.0 GiB of memory are available, and 4 GiB are needed. Close other programs."),
        ([], ["No AVX-512."], "warning", "No AVX-512."),
        ([], [], "ok", "16.0 GiB available"),
    ],
)  # fmt: skip
def test_a_present_cpu_is_checked_as_before_a_start(monkeypatch, problems, remarks, level, words):
    """Would catch a CPU without memory or instructions that passes."""

    def check(findings):
        findings.problems += problems
        findings.remarks += remarks

    monkeypatch.setattr(gpu_rules, "check_machine", check)
    (found,) = RULES["CPU"](planned(machine=dataclasses.replace(CPU, is_present=True)))
    assert found.level == level
    assert words in found.sentence
    assert list(RULES["CPU"](planned(machine=CPU))) == []


def test_dtype_of_the_drafter_is_the_targets():
    """Would catch a backend predicted for another dtype: float32 has no FlashAttention."""
    (found,) = RULES["attention backend"](planned("--dtype float32"))
    assert found.value == "TRITON_ATTN"
    half = planned(target=DENSE_TARGET | {"torch_dtype": "float16"})
    assert half.attention.dtype == "float16"
    assert half.drafter_kv_bytes("auto") == 20480
    assert planned("--dtype float").drafter_kv_bytes("auto") == 40960
