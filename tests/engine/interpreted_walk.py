# SPDX-License-Identifier: Apache-2.0
"""Walks given lattices with the Model Runner V2 speculator, under Triton's interpreter and without an engine.

    python tests/engine/interpreted_walk.py CASES.pt [vLLM sources]

With a folder of another release's sources, its noise and its walk are used.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# What the releases have of their own in a draw.
NOISE_AND_WALK = ("vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.spec_decode.dflash2.speculator")


def run_walks(cases: dict[str, dict[str, Any]], folder: Path, sources: Path | None = None) -> dict[str, dict[str, Any]]:
    """Results by name of the case.

    A case: "logits" [R * S, V] of the drafter, "edge_logits" [R, S, K, K] of the head,
    "req_states" [R] (negative for padding); temperature, seeds, top_k, top_p [max_num_reqs];
    optional "num_steps", "draws", "expected_length", "adaptive", "use_fp64".
    A result: "tokens" [R, S]; "draft_logits" [max_num_reqs, S, V] after `num_steps` walks;
    "redrawn" [R, S]: vLLM's own draw from draft_logits; "host_syncs"; "features" and
    "walked" [R * S, ...]: what adaptive verification and the walk's rows held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cases.pt"
    torch.save(cases, file)
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "engine")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, __file__, str(file), *([str(sources)] if sources else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-5000:])
    return torch.load(file)


def _use_sources(package: Path) -> None:
    for name in NOISE_AND_WALK:
        file = package.joinpath(*name.split(".")[1:]).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _speculator(case: dict[str, Any], max_num_reqs: int) -> Any:
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from vllm_lilicorr.engine.speculator import LiLiCorrSpeculator, ProposalSampler
    from vllm_lilicorr.kernels.reference import partial_candidates
    from vllm_lilicorr.method.lattice import finite_log_probs

    edge_logits, draws = case["edge_logits"], case.get("draws", True)
    num_reqs, num_slots, top_k, _ = edge_logits.shape
    vocab_size = case["logits"].shape[1]

    def compute_candidates_and_logits(hidden_states):
        logits = case["logits"].clone()
        values, ids, partition = partial_candidates(logits, top_k)
        return ids, finite_log_probs(values - partition), logits

    model = SimpleNamespace(
        compute_candidates_and_logits=compute_candidates_and_logits,
        compute_candidates=lambda hidden_states: compute_candidates_and_logits(hidden_states)[:2],
    )
    speculator = object.__new__(LiLiCorrSpeculator)
    device = torch.device("cpu")
    sample_idx_mapping = torch.full((max_num_reqs * num_slots,), -1)
    sample_idx_mapping[: num_reqs * num_slots] = case["req_states"].repeat_interleave(num_slots)
    sample_pos = torch.zeros(max_num_reqs * num_slots, dtype=torch.int64)
    sample_pos[: num_reqs * num_slots] = (10 + torch.arange(num_slots)).repeat(num_reqs)
    vars(speculator).update(
        model=model,
        top_k=top_k,
        num_speculative_steps=num_slots,
        draft_logits=torch.full((max_num_reqs, num_slots, vocab_size), -torch.inf) if draws else None,
        draft_tokens=torch.full((max_num_reqs, num_slots), -7),
        candidate_sampler=ProposalSampler(max_num_reqs, num_slots, top_k + draws, device),
        sample_idx_mapping=sample_idx_mapping,
        sample_pos=sample_pos,
        sample_col=torch.arange(num_slots, dtype=torch.int32).repeat(max_num_reqs),
        temperature=case["temperature"],
        seeds=case["seeds"],
        limit_top_k=case.get("top_k", torch.full((max_num_reqs,), vocab_size, dtype=torch.int32)),
        limit_top_p=case.get("top_p", torch.ones(max_num_reqs)),
        use_fp64_gumbel=case.get("use_fp64", False),
        walks_by_expected_length=case.get("expected_length", False),
        enable_adaptive_verification=case.get("adaptive", False),
        acceptance_estimator=OnlineAcceptanceEstimator(max_num_reqs, num_slots, device),
        draft_token_confidence_probs=torch.empty(max_num_reqs, num_slots),
        _score_candidates=lambda candidate_ids, log_probs, hidden_states: edge_logits,
    )
    return speculator


@torch.inference_mode()
def _walk(case: dict[str, Any]) -> dict[str, Any]:
    from host_syncs import HostSyncs
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    num_reqs, num_slots = case["edge_logits"].shape[:2]
    max_num_reqs = len(case["temperature"])
    speculator = _speculator(case, max_num_reqs)
    num_rows = num_reqs * num_slots
    for _ in range(case.get("num_steps", 1)):
        with HostSyncs() as syncs:
            speculator._walk(num_reqs, torch.zeros(num_rows, 1))
    result = {
        "tokens": speculator.draft_tokens[:num_reqs],
        "host_syncs": syncs.found,
        "features": speculator.acceptance_estimator.features,
        "walked": speculator.candidate_sampler.scores[:num_reqs],
    }
    if speculator.draft_logits is not None:
        states = speculator.sample_idx_mapping[:num_rows]
        columns = speculator.sample_col[:num_rows]
        result["draft_logits"] = speculator.draft_logits
        result["redrawn"] = gumbel_sample(
            speculator.draft_logits[states, columns.long()],
            states,
            speculator.temperature,
            speculator.seeds,
            speculator.sample_pos[:num_rows] - 1,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=torch.empty_like(speculator.draft_logits),
            logits_cache_col=columns,
            use_fp64=speculator.use_fp64_gumbel,
        ).view(num_reqs, num_slots)
    return result


def main(file: str, sources: str | None = None) -> None:
    from interpreter import interpret_triton

    interpret_triton()
    import vllm  # noqa: F401

    if sources:
        _use_sources(Path(sources))
    torch.save({name: _walk(case) for name, case in torch.load(file).items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
