# SPDX-License-Identifier: Apache-2.0
"""What fails on one kind of GPU and works on another, told before anything is loaded."""

from collections.abc import Iterable, Mapping

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.checkpoint.quantization import Format
from vllm_lilicorr.doctor.attention_rules import (
    BACKENDS,
    COVERED_KV_CACHE_DTYPES,
    predict_backend,
    refusal,
)
from vllm_lilicorr.doctor.engine_arguments import EngineArguments
from vllm_lilicorr.doctor.machines import GIB, Machine
from vllm_lilicorr.doctor.planned_server import PlannedServer
from vllm_lilicorr.serving.preflight import Findings, available_memory_gib, check_machine

# Linears whose input vLLM splits over the ranks, by the last part of their names.
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
NVFP4_KERNEL_WIDTH = 32
# On memory shared with the operating system, which needs some of it itself.
LARGEST_SHARED_SHARE = 0.85
_KEPT_FREE_GIB = 2.0
_FLOAT_CACHE = 'Set "kv_cache_dtype": "bfloat16" in the speculative config'
_TRITON = '"attention_backend": "TRITON_ATTN"'


def attention_backend(server: PlannedServer) -> Iterable[Finding]:
    """The drafter's attention backend, and whether it works there."""
    check, capability, attention = "attention backend", server.machine.capability, server.attention
    if capability is None:
        yield Finding(check, Level.OK, "CPU_ATTN", "vLLM's only one on a CPU")
        return
    if attention.kv_cache_dtype not in COVERED_KV_CACHE_DTYPES:
        yield Finding(
            check,
            Level.WARNING,
            f"kv_cache_dtype {attention.kv_cache_dtype} for the drafter",
            "which attention backend vLLM picks with it is not known here",
            f"{_FLOAT_CACHE}; it holds for the drafter only.",
        )
        return
    backend, how = _named_backend(server), "set in the speculative config"
    if backend is None:
        backend, how = predict_backend(capability, attention), f"vLLM's own choice on the {server.machine.title}"
        if backend is None:
            reasons = [f"{name}: {refusal(name, capability, attention)}" for name in BACKENDS]
            yield Finding(
                check,
                Level.ERROR,
                f"No attention backend takes the drafter's layers on the {server.machine.title}",
                "; ".join(reasons),
                "Leave out --block-size, or choose another --dtype or kv_cache_dtype.",
            )
            return
    elif backend not in BACKENDS:
        yield Finding(
            check,
            Level.WARNING,
            f"attention_backend {backend}",
            f"whether it takes this drafter is known here only of {', '.join(BACKENDS)}",
            f"Leave it out, or set {_TRITON}.",
        )
        return
    elif reason := refusal(backend, capability, attention):
        other = predict_backend(capability, attention)
        yield Finding(
            check,
            Level.ERROR,
            f"attention_backend {backend}, {how}",
            f"vLLM refuses it for this drafter on the {server.machine.title}: {reason}",
            f"Leave it out: vLLM picks {other}." if other else f"{_FLOAT_CACHE}.",
        )
        return
    if backend_to_set(server):
        yield Finding(
            check,
            Level.OK,
            f"{backend_to_set(server)}, set by this plugin",
            f"with {backend}, {how}, the server would stop at start-up with a device-side assertion, because the "
            "drafter attends in both directions inside a block",
        )
    elif _asserts(server, backend):
        yield Finding(
            check,
            Level.ERROR,
            f"FLASH_ATTN, {how}",
            "its kernel stops with a device-side assertion at start-up there, because the drafter attends in both "
            "directions inside a block",
            f"Set {_TRITON} in the speculative config.",
        )
    else:
        yield Finding(check, Level.OK, backend, how)


def drafter_kv_cache(server: PlannedServer) -> Iterable[Finding]:
    """An FP8 KV cache read by a drafter that attends in both directions."""
    check, capability, attention = "drafter KV cache", server.machine.capability, server.attention
    if attention.kv_cache_dtype not in COVERED_KV_CACHE_DTYPES:
        return
    if capability is None or capability[0] != 12 or not (attention.non_causal and attention.has_fp8_cache):
        per_token = server.drafter_kv_bytes(attention.kv_cache_dtype)
        yield Finding(check, Level.OK, f"{attention.kv_cache_dtype}, {per_token:,} bytes a token", "on every rank")
        return
    backend = _named_backend(server) or predict_backend(capability, attention)
    crashes = backend == "FLASHINFER"
    now, then = (server.drafter_kv_bytes(kind) for kind in (attention.kv_cache_dtype, "bfloat16"))
    cost = f"it costs {then - now:,} more bytes of KV cache a token on every rank ({then:,} instead of {now:,})"
    if length := server.arguments.max_model_len:
        cost += f", {(then - now) * length / GIB:.2f} GiB for {length:,} tokens"
    if server.has_hybrid_target:
        cost += ", and more where a hybrid target makes vLLM pad caches of different types to one another"
    yield Finding(
        check,
        Level.ERROR if crashes else Level.WARNING,
        f"kv_cache_dtype {attention.kv_cache_dtype} for the drafter, read by {backend}",
        f"on the {server.machine.title} this ends in an illegal memory access, because the drafter attends in both "
        "directions inside a block"
        if crashes
        else f"an FP8 cache read in both directions has crashed on GPUs like the {server.machine.title} with other "
        "backends, and this one is untested",
        f"{_FLOAT_CACHE}, together with {_TRITON}: the target keeps its own type; {cost}.",
    )


def _named_backend(server: PlannedServer) -> str | None:
    named = str(server.speculative.get("attention_backend") or "auto").upper()
    return None if named == "AUTO" else named


def backend_to_set(server: PlannedServer) -> str | None:
    """The attention backend that this plugin sets for the drafter, because vLLM's own choice would not start."""
    if server.machine.capability is None or _named_backend(server):
        return None
    predicted = predict_backend(server.machine.capability, server.attention)
    return "TRITON_ATTN" if predicted and _asserts(server, predicted) else None


def _asserts(server: PlannedServer, backend: str) -> bool:
    return backend == "FLASH_ATTN" and server.attention.non_causal and server.machine.capability[0] == 12


def nvfp4_widths(
    shapes: Mapping[str, tuple[int, int]], arguments: EngineArguments, machine: Machine
) -> Iterable[Finding]:
    """Whether NVFP4 products over a rank's part of a row are whole for the kernels of SM12x.

    Args:
        shapes: [N, K] of every linear whose weight and input are NVFP4, by module name
            (weight-only NVFP4 goes to Marlin by itself and does not matter).
        arguments: for the ranks and the linear backend.
        machine: where they run.
    """
    check = "NVFP4 widths"
    if machine.capability is None or machine.capability[0] != 12 or arguments.linear_backend == "marlin":
        return
    ranks, odd = arguments.tensor_parallel_size, []
    for name, (_, width) in shapes.items():
        split = name.rpartition(".")[2] in ROW_PARALLEL and ".experts." not in name and "lilicorr." not in name
        each = width // ranks if split else width
        if each % NVFP4_KERNEL_WIDTH:
            odd.append(f"{name} (K {width}, {each} on a rank)")
    if odd:
        yield Finding(
            check,
            Level.ERROR,
            f"tensor_parallel_size {ranks} with {some(odd)}",
            f"on the {machine.title} vLLM's NVFP4 kernels give garbage, without an error, where a rank's K is no "
            f"multiple of {NVFP4_KERNEL_WIDTH}",
            "Use --linear-backend marlin, or another --tensor-parallel-size.",
        )
    elif shapes:
        yield Finding(
            check, Level.OK, f"{len(shapes)} linears", f"every rank's K is a multiple of {NVFP4_KERNEL_WIDTH}"
        )


def nvfp4_dtype(formats: Iterable[Format], server: PlannedServer) -> Iterable[Finding]:
    """Whether vLLM serves a target of these weight formats in the activations' dtype, on any machine."""
    if server.dtype == "float32" and any(form.is_nvfp4 for form in formats):
        yield Finding(
            "dtype",
            Level.ERROR,
            "dtype float32 with an NVFP4 target",
            "vLLM serves NVFP4 targets in bfloat16 and float16 only",
            "Use --dtype bfloat16.",
        )


def shared_memory(server: PlannedServer) -> Iterable[Finding]:
    """The share of memory asked for at start, where the operating system has its memory in the same place."""
    machine, share = server.machine, server.arguments.memory_share
    if not machine.integrated or machine.capability is None:
        return
    check, wanted = "GPU memory", share * machine.memory_gib
    given = "" if server.arguments.gpu_memory_utilization is not None else ", vLLM's default"
    value = f"gpu_memory_utilization {share:g}{given}: {wanted:.1f} of {machine.memory_gib:.1f} GiB"
    compared = (
        "vLLM compares it with MemAvailable of the whole machine before it loads anything"
        if server.vllm_version >= (0, 32)
        else "vLLM compares it with the free memory, in which the page cache does not count: drop the cache first"
    )
    if machine.is_present:
        available = available_memory_gib()
        if wanted > available:
            fits = max(0.0, int(100 * (available - _KEPT_FREE_GIB) / machine.memory_gib) / 100)
            yield Finding(
                check,
                Level.ERROR,
                value,
                f"{compared}, and {available:.1f} GiB are available now",
                f"Close other programs, or set --gpu-memory-utilization {fits:g}.",
            )
            return
    if share > LARGEST_SHARED_SHARE:
        yield Finding(
            check,
            Level.WARNING,
            value,
            f"{compared}; whether so much is available depends on what else runs, and the rest is the operating "
            "system's",
            "Set --gpu-memory-utilization 0.75, and raise it only where the KV cache is too small.",
        )
    else:
        yield Finding(check, Level.OK, value, compared)


def cpu(server: PlannedServer) -> Iterable[Finding]:
    """What a CPU must have."""
    if server.machine.capability is not None or not server.machine.is_present:
        return
    found = Findings()
    check_machine(found)
    for level, texts in ((Level.ERROR, found.problems), (Level.WARNING, found.remarks)):
        for text in texts:
            value, _, remedy = text.partition("; ")
            yield Finding("CPU", level, value, "", remedy[:1].upper() + remedy[1:])
    if not (found.problems or found.remarks):
        yield Finding("CPU", Level.OK, f"{server.machine.memory_gib:.1f} GiB available", "instruction set and memory")
