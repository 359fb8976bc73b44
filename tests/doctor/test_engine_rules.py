# SPDX-License-Identifier: Apache-2.0
"""Rules about options and lengths: one case per rule, and none where all is well."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import CPU, DRAFTER, HYBRID_TARGET, planned

from vllm_lilicorr.checkpoint.findings import Level, exit_code
from vllm_lilicorr.doctor.engine_rules import RULES, check_server

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768}


def spec(text: str) -> str:
    return f"m --speculative-config '{text}'"


# Name of the rule, the server, its level, words of the finding.
CASES = [
    ("options", planned(spec('{"model": "d"}') + " --speculative-config.num_speculative_tokens 5"), "warning",
     "merged num_speculative_tokens into --speculative-config: {\"model\": \"d\", \"num_speculative_tokens\": 5}: "
     "`vllm serve` itself throws the JSON away where dotted options follow. Write every key"),
    ("options", planned(spec('{"model": "d"}') + " --config f.yaml"), "warning", "--config f.yaml: the options in"),
    ("options", planned("m"), "warning", "No speculative config: the server would not speculate."),
    ("method", planned(spec('{"method": "eagle3"}')), "error", "method 'eagle3': a LiLiCorr drafter is no drafter"),
    ("draft length", planned(spec('{"num_speculative_tokens": 8}')), "error",
     "num_speculative_tokens 8: the drafter was trained with block_size 8, which counts the anchor. Use 1..7."),
    ("draft length", planned(spec('{"num_speculative_tokens": "7"}')), "error", "num_speculative_tokens '7'"),
    ("draft length",
     planned(spec('{"num_speculative_tokens_per_batch_size": [[1, 4, 2]]}'),
             drafter={"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 16}}), "error",
     "num_speculative_tokens_per_batch_size is set: the drafter's convolutions run over blocks of one length"),
    ("drafting", planned(spec('{"lilicorr": {"walks": "greedy"}}')), "error", "has no 'walks'; it knows walk"),
    ("drafting", planned(spec('{"lilicorr": {"candidate_topk": 16}}')), "error",
     "candidate_topk 16: the drafter was trained with 8 candidates per slot. Use 1..8."),
    ("drafting", planned(spec('{"draft_sample_method": "greedy"}')), "warning",
     "draft_sample_method 'greedy': above temperature 0 fewer greedy drafts are accepted"),
    ("drafting", planned(spec('{"draft_sample_method": "probabilistic", "lilicorr": {"walk": "greedy"}}')), "error",
     "the greedy walk draws nothing"),
    ("verification", planned(spec('{"rejection_sample_method": "fly"}')), "warning",
     "rejection_sample_method 'fly': it accepts drafts that the target would not have drawn"),
    ("verification", planned(spec('{"rejection_sample_method": "synthetic"}')), "warning",
     "'synthetic': drafts are accepted at a rate that was set beforehand"),
    ("verification", planned(spec('{"synthetic_acceptance_length": 3}')), "warning", "synthetic_acceptance_length is"),
    ("ranks", planned("m -tp 3"), "error", "tensor_parallel_size 3: the drafter has 32 query and 8 key/value heads"),
    ("ranks", planned("m -pp 2", machine=CPU), "error", "pipeline_parallel_size 2: on model runner V1"),
    ("context length", planned("m --max-model-len 131072", drafter=YARN), "warning",
     "The drafter reaches 32,768 tokens, the server 131,072: with RoPE type 'yarn' Model Runner V2 lowers "
     "max_model_len to the drafter's 32,768. Set --max-model-len 32768"),
    ("context length", planned("m --max-model-len 131072", drafter=YARN, vllm_version=(0, 32)), "warning",
     "this vLLM raises the drafter's max_position_embeddings"),
    ("prefix cache", planned("m", target=HYBRID_TARGET, vllm_version=(0, 32)), "warning",
     "A hybrid target with a drafter: before 0.33 vLLM gives up the last cached block of every prefix for a drafter's "
     "sake, and a hybrid target's prefixes often have no other, so that its prefix cache hardly ever hits; this "
     'drafter does not need that. Set "disable_eagle_block_drop": true'),
    ("prefix cache", planned("m --kv-cache-dtype fp8", target=HYBRID_TARGET), "warning",
     "Blocks of 8,592 tokens (fp8 KV cache, 7 drafted tokens): a block of a hybrid target is as large as a "
     "recurrent state, and only whole blocks are reused: shorter prompts never hit. --kv-cache-dtype bfloat16"),
]  # fmt: skip


def judged(server, skip=()):
    return [finding for finding in check_server(server, skip) if finding.level is not Level.OK]


@pytest.mark.parametrize(("rule", "server", "level", "words"), CASES, ids=lambda value: str(value)[:40])
def test_every_rule_says_what_is_wrong_and_what_to_do(rule, server, level, words):
    """Would catch a rule that is switched off, that another rule stands in for, or that names no value or remedy."""
    found = [finding for finding in judged(server) if words in finding.sentence]
    assert len(found) == 1, judged(server)
    assert (found[0].check, found[0].level) == (rule, level)
    assert not [finding for finding in judged(server, skip=[rule]) if words in finding.sentence]


@pytest.mark.parametrize("machine", ["h100", "h200", "b200"])
@pytest.mark.parametrize("words", [spec('{"method": "lilicorr", "model": "d"}'), spec('{"num_speculative_tokens": 3}')])
def test_a_server_that_works_has_no_findings(machine, words):
    """Would catch a rule that cries wolf."""
    server = planned(f"{words} -tp 2", machine=machine)
    assert judged(server) == []
    assert exit_code(check_server(server), strict=True) == 0
    assert {"draft length", "verification", "context length", "attention backend"} <= {
        finding.check for finding in check_server(server)
    }


def test_a_shorter_drafter_with_plain_rope_is_lengthened_by_vllm():
    """Would catch a warning about every drafter that was trained on less context than the target."""
    server = planned("m --max-model-len 131072", drafter={"max_position_embeddings": 40960})
    (found,) = RULES["context length"](server)
    assert found.level is Level.OK
    assert "40,960 tokens, the server 131,072" in found.value
    linear = {"max_position_embeddings": 40960, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (found,) = RULES["context length"](planned("m --max-model-len 131072", drafter=linear))
    assert "reaches 163,840" in found.value, "the factor extends it"


def test_prefix_cache_rules_are_about_hybrid_targets_that_use_it():
    """Would catch warnings for dense targets, or where prefix caching is off or the cure is set."""
    assert list(RULES["prefix cache"](planned("m"))) == []
    assert list(RULES["prefix cache"](planned("m --no-enable-prefix-caching", target=HYBRID_TARGET))) == []
    cured = planned(spec('{"disable_eagle_block_drop": true}'), target=HYBRID_TARGET, vllm_version=(0, 32))
    assert [finding.value for finding in RULES["prefix cache"](cured)] == [
        "Blocks of 4,304 tokens (auto KV cache, 7 drafted tokens)"
    ]


def test_targets_are_found_inside_multimodal_configurations():
    """Would catch a nested text configuration that is not looked into."""
    server = planned("m --kv-cache-dtype fp8", target={"text_config": HYBRID_TARGET})
    assert server.has_hybrid_target
    assert server.hybrid_block_tokens == 8592
    coarse = planned("m --kv-cache-dtype fp8 --block-size 128", target=HYBRID_TARGET)
    assert coarse.hybrid_block_tokens == 8704, "rounded up to whole blocks of the user's"
    assert planned("m -tp 2 --kv-cache-dtype fp8", target=HYBRID_TARGET).hybrid_block_tokens == 8592


@pytest.mark.parametrize(
    ("target", "quantization", "flag", "expected"),
    [
        ({}, None, "", "auto"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, None, "", "fp8_e4m3"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, None, "", "fp8_e4m3"),
        ({}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "", "fp8_e4m3"),
        ({}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "--kv-cache-dtype bfloat16", "bfloat16"),
        ({}, {"quantization": {"kv_cache_quant_algo": None}}, "", "auto"),
    ],
)
def test_auto_kv_cache_is_what_the_targets_quantization_declares(target, quantization, flag, expected):
    """Would catch an FP8 cache that nobody typed, and the drafter that inherits it."""
    server = planned(f"m {flag}", target=target, target_quantization=quantization)
    assert server.target_kv_cache_dtype == server.drafter_kv_cache_dtype == expected
    own = planned(spec('{"kv_cache_dtype": "bfloat16"}'), target=target, target_quantization=quantization)
    assert own.drafter_kv_cache_dtype == "bfloat16"


def test_rules_need_no_target():
    """Would catch a crash where only a drafter was named."""
    assert judged(planned("", target=None)) == []
    assert DRAFTER["block_size"] == planned().geometry.block_size


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "fp8", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), inner),
    max_leaves=4,
)
TARGET_KEYS = [*HYBRID_TARGET, "layer_types", "rope_parameters", "quantization_config", "text_config", "dtype"]
SPECULATIVE_KEYS = [
    "method", "model", "num_speculative_tokens", "attention_backend", "kv_cache_dtype", "rejection_sample_method",
    "draft_sample_method", "lilicorr", "disable_eagle_block_drop", "num_speculative_tokens_per_batch_size",
]  # fmt: skip
DRAFTER_KEYS = ["layer_types", "rope_parameters", "rope_scaling", "max_position_embeddings", "is_causal"]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(TARGET_KEYS), JUNK),
    st.dictionaries(st.sampled_from(SPECULATIVE_KEYS), JUNK),
    st.dictionaries(st.sampled_from(DRAFTER_KEYS), JUNK),
    st.sampled_from(["gb10", "h200", CPU]),
)
def test_no_configuration_ends_in_a_traceback(target, speculative, drafter, machine):
    """Would catch a rule that takes a user's value for a number, a text or a mapping."""
    server = planned("m", machine, drafter, HYBRID_TARGET | target)
    arguments = dataclasses.replace(server.arguments, speculative=speculative)
    for finding in check_server(dataclasses.replace(server, arguments=arguments)):
        assert finding.check in RULES and finding.value
