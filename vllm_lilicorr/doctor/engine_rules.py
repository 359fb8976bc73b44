# SPDX-License-Identifier: Apache-2.0
"""Checks of a server before it starts: its options, its lengths, its machine.

Each rule looks at one thing and can be left out by name. None imports vLLM.
"""

from collections.abc import Callable, Iterable

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.doctor import gpu_rules
from vllm_lilicorr.doctor.planned_server import PlannedServer, longest_context, rope_type
from vllm_lilicorr.engine.options import KEY, Options

METHODS = ("lilicorr", "dflash", None)
# RoPE types for which vLLM lengthens the drafter's position table to the target's length.
LENGTHENED_ROPE_TYPES = ("default", "linear", "llama3", "ntk", "proportional")
Rule = Callable[[PlannedServer], Iterable[Finding]]


def check_server(server: PlannedServer, skip: Iterable[str] = ()) -> list[Finding]:
    """Runs every rule but those named in `skip`, in order."""
    left_out = set(skip)
    return [finding for name, rule in RULES.items() if name not in left_out for finding in rule(server)]


def options(server: PlannedServer) -> Iterable[Finding]:
    """How the options are written."""
    check, arguments = "options", server.arguments
    if arguments.merged:
        yield Finding(
            check,
            Level.WARNING,
            f"Dotted options beside the JSON: {arguments.merged}",
            "`vllm serve` itself throws the JSON away where dotted options follow",
            "Write every key into the JSON, or start with `lilicorr serve`, which merges them.",
        )
    if arguments.config_file:
        yield Finding(
            check,
            Level.WARNING,
            f"--config {arguments.config_file}",
            "the options in that file are not looked at here",
            "Give them on the command line to have them checked.",
        )
    if arguments.target and not server.speculative:
        yield Finding(
            check,
            Level.WARNING,
            "No speculative config",
            "the server would not speculate",
            'Add --speculative-config \'{"method": "lilicorr", "model": DRAFTER}\'.',
        )


def method(server: PlannedServer) -> Iterable[Finding]:
    """The speculative method."""
    named = server.speculative.get("method")
    if named not in METHODS:
        yield Finding(
            "method", Level.ERROR, f"method {named!r}", "a LiLiCorr drafter is no drafter of that method",
            'Set "method": "lilicorr" in the speculative config.',
        )  # fmt: skip


def draft_length(server: PlannedServer) -> Iterable[Finding]:
    """num_speculative_tokens against the block that the drafter was trained with."""
    check, geometry = "draft length", server.geometry
    length = server.speculative.get("num_speculative_tokens", geometry.num_slots)
    allowed = f"the drafter was trained with block_size {geometry.block_size}, which counts the anchor"
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= geometry.num_slots:
        yield Finding(
            check, Level.ERROR, f"num_speculative_tokens {length!r}", allowed, f"Use 1..{geometry.num_slots}."
        )
        return
    yield Finding(check, Level.OK, f"{length} drafted tokens", allowed)
    if geometry.conv_kernel_size and server.speculative.get("num_speculative_tokens_per_batch_size"):
        yield Finding(
            check,
            Level.ERROR,
            "num_speculative_tokens_per_batch_size is set",
            "the drafter's convolutions run over blocks of one length, fixed at start",
            "Leave it out, and choose one num_speculative_tokens.",
        )


def drafting(server: PlannedServer) -> Iterable[Finding]:
    """How drafts are drawn, and the options of our own."""
    check, given = "drafting", server.speculative.get(KEY, {})
    try:
        chosen = Options.from_mapping(given)
    except (ValueError, TypeError) as error:
        yield Finding(check, Level.ERROR, str(error), "")
        return
    top_k = server.geometry.top_k
    if chosen.candidate_topk is not None and chosen.candidate_topk > top_k:
        yield Finding(
            check,
            Level.ERROR,
            f"candidate_topk {chosen.candidate_topk}",
            f"the drafter was trained with {top_k} candidates per slot",
            f"Use 1..{top_k}.",
        )
    draws = server.speculative.get("draft_sample_method")
    if draws == "greedy" and chosen.walk != "greedy":
        yield Finding(
            check,
            Level.WARNING,
            "draft_sample_method 'greedy'",
            "above temperature 0 fewer greedy drafts are accepted than drawn ones; the output is the same either way",
            "Leave it out: requests that sample then get drawn drafts.",
        )
    elif draws == "probabilistic" and chosen.walk == "greedy":
        yield Finding(
            check, Level.ERROR, "walk 'greedy' with draft_sample_method 'probabilistic'",
            "the greedy walk draws nothing", "Leave one of them out.",
        )  # fmt: skip


def verification(server: PlannedServer) -> Iterable[Finding]:
    """Rejection methods that are not speculative decoding."""
    check, named = "verification", server.speculative.get("rejection_sample_method", "standard")
    made_up = sorted(key for key in server.speculative if key.startswith("synthetic_acceptance"))
    if named == "synthetic" or made_up:
        yield Finding(
            check,
            Level.WARNING,
            "rejection_sample_method 'synthetic'" if named == "synthetic" else f"{some(made_up)} is set",
            "drafts are accepted at a rate that was set beforehand: the output is not the target's, and acceptance "
            "says nothing about the drafter",
            "Leave it out.",
        )
    elif named == "fly":
        yield Finding(
            check,
            Level.WARNING,
            "rejection_sample_method 'fly'",
            "it accepts drafts that the target would not have drawn, so that the output differs from the target's",
            "Leave it out: the standard method keeps the target's distribution.",
        )
    else:
        yield Finding(
            check, Level.OK, f"rejection_sample_method {named!r}", "the output is distributed as the target's"
        )


def ranks(server: PlannedServer) -> Iterable[Finding]:
    """Whether the drafter can be split over the ranks."""
    geometry, arguments = server.geometry, server.arguments
    size, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    if heads % size or max(kv_heads, size) % min(kv_heads, size):
        yield Finding(
            "ranks",
            Level.ERROR,
            f"tensor_parallel_size {size}",
            f"the drafter has {heads} query and {kv_heads} key/value heads, which cannot be shared out evenly",
            "Use a --tensor-parallel-size that divides them.",
        )
    if stages > 1 and server.machine.capability is None:
        yield Finding(
            "ranks",
            Level.ERROR,
            f"pipeline_parallel_size {stages}",
            "on model runner V1 the drafter needs the target's embedding and features on one rank",
            "Use --pipeline-parallel-size 1; tensor parallelism works.",
        )


def context_length(server: PlannedServer) -> Iterable[Finding]:
    """The drafter's longest context against the target's."""
    check, drafter = "context length", longest_context(server.drafter)
    wanted = server.arguments.max_model_len or longest_context(server.target_text)
    if drafter is None or wanted is None:
        return
    value = f"The drafter reaches {drafter:,} tokens, the server {wanted:,}"
    if drafter >= wanted:
        yield Finding(check, Level.OK, value, "no position is beyond the drafter")
    elif (kind := rope_type(server.drafter)) in LENGTHENED_ROPE_TYPES:
        yield Finding(
            check,
            Level.OK,
            value,
            "vLLM lengthens the drafter's position table; beyond what it was trained on, fewer drafts are accepted",
        )
    else:
        lowers = server.vllm_version >= (0, 33)
        yield Finding(
            check,
            Level.WARNING,
            value,
            f"with RoPE type {kind!r} Model Runner V2 lowers max_model_len to the drafter's {drafter:,}"
            if lowers
            else f"this vLLM raises the drafter's max_position_embeddings, which RoPE type {kind!r} is computed from, "
            "so that drafts can be bad at every length",
            f"Set --max-model-len {drafter} if that is enough, or use a drafter trained for {wanted:,}.",
        )


def prefix_cache(server: PlannedServer) -> Iterable[Finding]:
    """Prefix caching of targets with a recurrent state."""
    check = "prefix cache"
    if not server.has_hybrid_target or server.arguments.enable_prefix_caching is False:
        return
    if server.vllm_version < (0, 33) and not server.speculative.get("disable_eagle_block_drop"):
        yield Finding(
            check,
            Level.WARNING,
            "A hybrid target with a drafter",
            "before 0.33 vLLM gives up the last cached block of every prefix for a drafter's sake, and a hybrid "
            "target's prefixes often have no other, so that its prefix cache hardly ever hits; this drafter does not "
            "need that",
            'Set "disable_eagle_block_drop": true in the speculative config, or use vLLM 0.33.',
        )
    tokens = server.hybrid_block_tokens
    if tokens is None:
        return
    bits = "fp8" if server.target_kv_cache_dtype.startswith("fp8") else server.target_kv_cache_dtype
    remedy = "Share prefixes longer than that, or save the memory with --no-enable-prefix-caching."
    if bits == "fp8":
        remedy = f"--kv-cache-dtype bfloat16 makes blocks half as long, at twice the KV cache. {remedy}"
    yield Finding(
        check,
        Level.WARNING,
        f"Blocks of {tokens:,} tokens ({bits} KV cache, {server.num_drafted} drafted tokens)",
        "a block of a hybrid target is as large as a recurrent state, and only whole blocks are reused: shorter "
        "prompts never hit",
        remedy,
    )


RULES: dict[str, Rule] = {
    "options": options,
    "method": method,
    "draft length": draft_length,
    "drafting": drafting,
    "verification": verification,
    "ranks": ranks,
    "context length": context_length,
    "prefix cache": prefix_cache,
    "attention backend": gpu_rules.attention_backend,
    "drafter KV cache": gpu_rules.drafter_kv_cache,
    "GPU memory": gpu_rules.shared_memory,
    "CPU": gpu_rules.cpu,
}
