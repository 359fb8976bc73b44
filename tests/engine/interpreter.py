# SPDX-License-Identifier: Apache-2.0
"""Runs engines in a process of its own and reports what was served and what was drafted.

Model Runner V2 needs Triton, which has no CPU backend: here it runs under Triton's
interpreter. That is a test instrument, thousands of times too slow to serve with,
but it makes vLLM's in-tree drafter an oracle: same checkpoint, same prompts, same
draft tokens. The V1 runner reports in the same format.

    python tests/engine/interpreter.py JOB.json RESULT.json

JOB: {"runner": "v1" | "v2", "which": "ours" | "in-tree", "engines": {name: engine}}
engine: {"target", "speculative_config" (None: no speculation), "prompts": [[token id]],
         "sampling": {...} or one per prompt, "engine": {...}, "watch": bool}
RESULT: {name: {"outputs": [[token id]], "drafts": [draft], "error": str | None, ...}}
draft: {"request": index of the prompt, "anchor_position", "tokens" [S],
        "candidate_ids" [S][K]: rank 0 is the best of each slot alone, "edge_logits" [S][K][K]}
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_engines(runner: str, which: str, engines: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Runs `engines` one after another in one new process; their results by name."""
    folder.mkdir(parents=True, exist_ok=True)
    job, result = folder / f"{runner}-{which}.json", folder / f"{runner}-{which}-result.json"
    job.write_text(json.dumps({"runner": runner, "which": which, "engines": engines}, default=str))
    # vLLM calls the host's compiler and imports us from the checkout.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    environment |= _environment(runner, which)
    done = subprocess.run(
        [sys.executable, __file__, str(job), str(result)], env=environment, capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise RuntimeError(
            f"{runner} {which} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
        )
    return json.loads(result.read_text())


def _environment(runner: str, which: str) -> dict[str, str]:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "0",
        "LILICORR_DISABLE": "1" if which == "in-tree" else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        variables["LD_PRELOAD"] = str(openmp)
    if runner == "v2":
        variables["TRITON_INTERPRET"] = "1"
    return variables


def interpret_triton() -> None:
    """Makes vLLM believe in a CPU backend of Triton. Call before vLLM is imported."""
    import numpy as np
    from triton.backends import Backend, backends
    from triton.runtime import interpreter

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=ActiveDriver)
    builder = interpreter.InterpreterBuilder
    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        # Triton 3.9 hands masks over as integers and then rejects them.
        mask.data = np.asarray(mask.data, dtype=np.bool_)
        return mask

    def create_masked_load(self, ptrs, mask, *rest, **named):
        return plain_load(self, ptrs, boolean(mask), *rest, **named)

    def create_masked_store(self, ptrs, value, mask, *rest, **named):
        return plain_store(self, ptrs, value, boolean(mask), *rest, **named)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store


def interpret_libdevice() -> None:
    """Replaces the one libdevice function that vLLM uses: interpreted ones return None."""
    from vllm.triton_utils import tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    class Device:
        @staticmethod
        def log1p(x: Any) -> Any:
            return tl.log(1 + x)

    rejection_sampler_utils.tldevice = Device


def sort_top_k_top_p() -> None:
    """Filters the target's logits by vLLM's PyTorch code: the interpreter cannot run its kernel."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


def keep_triton_recurrences() -> None:
    """Undoes the CPU build's replacements of mamba's updates: its convolution ignores rejected tokens."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
    from vllm.platforms import current_platform

    platform = type(current_platform)
    is_cpu = platform.is_cpu
    platform.is_cpu = lambda self: False
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssu_dispatch  # noqa: F401

    platform.is_cpu = is_cpu
    # Prefill keeps the replacement: it is exact, and the interpreter cannot run the kernel.
    causal_conv1d.causal_conv1d_fn = causal_conv1d_fn_cpu
    registry = ssu_dispatch._BACKEND_REGISTRY
    registry[ssu_dispatch.MambaBackendEnum.CPU] = registry[ssu_dispatch.MambaBackendEnum.TRITON]


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    v2 = job["runner"] == "v2"
    if v2:
        interpret_triton()
    import vllm  # noqa: F401  before the plugin, as in vLLM's own processes

    if v2:
        keep_triton_recurrences()
    import vllm_lilicorr.plugin

    vllm_lilicorr.plugin.register()
    recorder = None
    if v2:
        from vllm_lilicorr.engine.seams import normalize_each_layer

        normalize_each_layer()  # a defect of the CPU build, cured for the in-tree drafter too
        interpret_libdevice()
        sort_top_k_top_p()
        from recording import Recorder

        recorder = Recorder()
    from vllm.distributed import cleanup_dist_env_and_memory

    results = {}
    for name, engine in job["engines"].items():
        try:
            results[name] = {"error": None} | (_run_v2(engine, recorder) if recorder else _run_v1(engine))
        except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
            if not engine.get("may_fail"):
                raise
            results[name] = {"error": "".join(traceback.format_exception(error))}
        finally:
            cleanup_dist_env_and_memory()
    Path(result_file).write_text(json.dumps(results))


def _generate(engine: dict[str, Any]) -> list[list[int]]:
    """Served token ids by prompt."""
    from vllm import LLM, SamplingParams

    # Few tokens a step: interpreted kernels loop over the whole buffers.
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    options |= {"enforce_eager": True, "enable_prefix_caching": False} | engine.get("engine", {})
    llm = LLM(
        model=engine["target"], skip_tokenizer_init=True, speculative_config=engine.get("speculative_config"), **options
    )
    sampling = engine.get("sampling", {})
    sampling = sampling if isinstance(sampling, list) else [sampling] * len(engine["prompts"])
    defaults = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in engine["prompts"]],
        [SamplingParams(**defaults | values) for values in sampling],
        use_tqdm=False,
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return tokens


def _committed(drafts: list[dict[str, Any]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Drafts from a sampled anchor: those of an unfinished prefill are thrown away by vLLM."""
    return [draft for draft in drafts if draft["anchor_position"] >= len(prompts[draft["request"]])]


def _run_v1(engine: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        os.environ["LILICORR_TRACE"] = str(trace)
        outputs = _generate(engine)
        lines = trace.read_text().splitlines() if trace.exists() else []
    drafts = []
    for record in map(json.loads, lines):
        drafts.append(
            {
                "request": int(record["request_id"].partition("-")[0]),
                "anchor_position": record["anchor_position"],
                "tokens": record["draft_token_ids"],
                "candidate_ids": record["candidate_ids"],
                "edge_logits": record["edge_logits"],
            }
        )
    return {"outputs": outputs, "drafts": _committed(drafts, engine["prompts"])}


def _run_v2(engine: dict[str, Any], recorder: Any) -> dict[str, Any]:
    recorder.clear(watch=engine.get("watch", False))
    outputs = _generate(engine)
    drafts = _committed(recorder.drafts, engine["prompts"])
    return {"outputs": outputs, "drafts": drafts, "speculator": recorder.speculator, "watched": recorder.watched}


if __name__ == "__main__":
    main(*sys.argv[1:])
