# SPDX-License-Identifier: Apache-2.0
"""The Model Runner V2 speculator: ready for CUDA graphs, sampling, LoRA targets, dummy weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_syncs import HostSyncs
from interpreter import run_engines
from pairs import drafter_config, target_config, write_drafter, write_target
from reference_proposals import reference_proposals
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_lilicorr.engine.speculator import LiLiCorrSpeculator
from vllm_lilicorr.method.geometry import DrafterGeometry
from vllm_lilicorr.method.head import LiLiCorrHead
from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.proposals import Sampling
from vllm_lilicorr.method.walks import expected_length_walk, greedy_walk

VOCAB_SIZE = 32
# The CPU build's LoRA kernel of the LM head does not know speculative rows: the embedding alone.
LORA = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["embed_tokens"]}


@pytest.mark.parametrize(
    "synchronise",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
    ],
)
def test_host_syncs_are_found(synchronise) -> None:
    """Catches a detector that would pass anything."""
    with torch.inference_mode(), HostSyncs() as syncs:
        synchronise(torch.ones(3))
    assert syncs.found


def test_head_and_greedy_walk_do_not_synchronise() -> None:
    """Catches an item(), nonzero() or tolist() in what a CUDA graph captures."""
    geometry = DrafterGeometry.from_config(drafter_config())
    head = LiLiCorrHead(geometry)
    head.prepare()
    slots, top_k, hidden = geometry.num_slots, geometry.top_k, geometry.hidden_size
    with torch.inference_mode(), HostSyncs() as syncs:
        edge_logits = head(
            torch.ones(2, slots, top_k, hidden),
            torch.zeros(2, slots, top_k),
            torch.ones(2, slots, hidden),
            torch.ones(2, hidden),
            torch.ones(2, dtype=torch.bool),
        )
        greedy_walk(edge_logits)
    assert syncs.found == []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("speculator")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (4, 9, 14)]
    speculative = {"method": "dflash", "model": write_drafter(folder / "d", drafter_config(vocab_size=VOCAB_SIZE))}
    base: dict[str, Any] = {
        "target": write_target(folder / "t", target_config(vocab_size=VOCAB_SIZE)),
        "speculative_config": speculative | {"num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
        "prompts": prompts,
        # Different lengths: the batch shrinks from three requests to one.
        "sampling": [{"max_tokens": length} for length in (3, 6, 9)],
        "engine": {"max_num_seqs": 4},
    }
    seeded = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    sampling = [seeded, {"max_tokens": 6}, {"temperature": 0.7, "seed": 4, "top_k": 12, "top_p": 0.9, "max_tokens": 9}]

    def with_options(**options: Any) -> dict[str, Any]:
        return base | {"sampling": sampling, "speculative_config": base["speculative_config"] | {"lilicorr": options}}

    engines = {
        "greedy": base | {"watch": True},
        "sampled": base | {"sampling": sampling, "watch": True},
        "one of sampled": base | {"sampling": [seeded], "prompts": prompts[:1]},
        "three candidates": with_options(candidate_topk=3),
        "expected length": with_options(walk="expected-length"),
        "lora": base | {"engine": base["engine"] | LORA},
    }
    return run_engines("v2", "ours", engines, folder / "jobs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_draft_step_does_not_synchronise(results, name: str) -> None:
    """Catches a host synchronisation anywhere in _generate_draft: backbone, candidates, head, walk."""
    watched = results[name]["watched"]
    assert watched["host_syncs"] == []
    assert {"topk.default", "logsumexp.default", "scaled_dot_product_attention.default"} <= set(watched["operators"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_addresses_stay_over_steps_and_batch_sizes(results, name: str) -> None:
    """Catches a buffer that is allocated anew: a captured graph would go on using the old one."""
    watched = results[name]["watched"]
    assert {1, 3} <= set(watched["batch_sizes"])
    assert {"anchor_hidden", "draft_logits", "limit_top_k", "limit_top_p", "head._attention_bias"} <= set(
        watched["addresses"]
    )
    assert {name: found for name, found in watched["addresses"].items() if len(found) != 1} == {}


def recorded_lattice(draft: dict[str, Any]) -> Lattice:
    ids, edges = torch.tensor([draft["candidate_ids"]]), torch.tensor([draft["edge_logits"]])
    return Lattice(ids, torch.log_softmax(torch.tensor([draft["logits"]]), dim=-1).gather(2, ids), edges)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled", "three candidates", "expected length"])
def test_proposals_are_the_methods(results, name: str) -> None:
    """Catches limits of another request, or none at all; a proposal with entries of an earlier step; candidates
    beyond candidate_topk."""
    kinds = set()
    for draft in results[name]["drafts"]:
        assert len(draft["candidate_ids"][0]) == (3 if name == "three candidates" else 8)
        if draft["temperature"] == 0:
            continue
        limits = (torch.tensor([draft[key]]) for key in ("temperature", "top_k", "top_p"))
        wanted = reference_proposals(
            recorded_lattice(draft), torch.tensor([draft["logits"]]), Sampling(*limits), torch.tensor([draft["tokens"]])
        )
        rows = torch.softmax(torch.tensor([draft["draft_logits"]]) / draft["temperature"], dim=-1)
        torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-6)
        kinds.add((draft["request"], round(draft["temperature"], 2), draft["top_k"], round(draft["top_p"], 2)))
    assert kinds == {(0, 1.0, VOCAB_SIZE, 1.0), (2, 0.7, 12, 0.9)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled", "three candidates", "expected length"])
def test_requests_at_temperature_0_take_the_deterministic_walk(results, name: str) -> None:
    """Catches a greedy request that shares noise with its batch, and an option that no runner reads."""
    walk = expected_length_walk if name == "expected length" else greedy_walk
    drafts = [draft for draft in results[name]["drafts"] if draft["temperature"] == 0]
    assert drafts
    for draft in drafts:
        lattice = recorded_lattice(draft)
        assert draft["tokens"] == lattice.tokens(walk(lattice.edge_logits))[0].tolist()


@pytest.mark.slow
def test_sampling_is_seeded_and_leaves_greedy_requests_alone(results) -> None:
    """Catches draft noise that is drawn from elsewhere than the request's seed: its batch would change it."""
    sampled, alone, greedy = (results[name]["outputs"] for name in ("sampled", "one of sampled", "greedy"))
    assert sampled[0] == alone[0]
    assert sampled[1] == greedy[1]
    assert all(0 <= token < VOCAB_SIZE for token in sampled[0])


@pytest.mark.slow
def test_target_with_lora_drafts_as_without(results) -> None:
    """Catches an embedding wrapped for LoRA: the in-tree speculator refuses it."""
    assert results["lora"]["outputs"] == results["greedy"]["outputs"]
    for ours, plain in zip(results["lora"]["drafts"], results["greedy"]["drafts"], strict=True):
        assert [ours[key] for key in ("request", "tokens", "edge_logits")] == [
            plain[key] for key in ("request", "tokens", "edge_logits")
        ]


class Vocabulary(VocabParallelEmbedding):
    """A vocabulary matrix as far as the speculator looks at one, without a process group."""

    def __init__(self, width: int = 64, added: int = 0) -> None:
        nn.Module.__init__(self)
        self.embedding_dim = width
        self.shard_indices = SimpleNamespace(num_added_elements=added)


def load_beside(monkeypatch: pytest.MonkeyPatch, embedding: Any, lm_head: Any) -> LiLiCorrSpeculator:
    """A speculator that loaded a drafter without reading weights, beside a target with these matrices."""
    geometry = DrafterGeometry.from_config(drafter_config())
    drafter = SimpleNamespace(
        model=SimpleNamespace(lilicorr=LiLiCorrHead(geometry)),
        lm_head=lm_head,
        config=SimpleNamespace(hidden_size=geometry.hidden_size),
    )
    monkeypatch.setattr(DFlashSpeculator, "load_draft_model", lambda self, target, names: drafter)
    speculator = object.__new__(LiLiCorrSpeculator)
    target = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding))
    speculator.model = speculator.load_draft_model(target, set())
    return speculator


def test_head_is_ready_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a head whose buffers exist only after weights were read (load_format "dummy")."""
    speculator = load_beside(monkeypatch, Vocabulary(), Vocabulary())
    speculator.anchor_hidden, speculator.anchor_valid = torch.zeros(4, 64), torch.zeros(4, dtype=torch.bool)
    speculator.target_embeddings = lambda ids: torch.zeros(*ids.shape, 64)
    ids = torch.zeros(2, 7, 8, dtype=torch.int64)
    with torch.inference_mode():
        scores = speculator._score_candidates(ids, torch.zeros(2, 7, 8), torch.zeros(2, 7, 64))
    assert scores.shape == (2, 7, 8, 8)


def test_lora_wrappers_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches drafting on an adapter's embedding, which the drafter was not trained on."""
    embedding, lm_head = Vocabulary(), Vocabulary()
    wrapped = [SimpleNamespace(base_layer=layer) for layer in (embedding, lm_head)]
    speculator = load_beside(monkeypatch, *wrapped)
    assert speculator.target_embeddings is embedding
    assert speculator.model.lm_head is lm_head


@pytest.mark.parametrize(
    ("embedding", "lm_head", "message"),
    [
        (None, Vocabulary(), "token embedding is NoneType on this rank.*pipeline_parallel_size=1"),
        (Vocabulary(), nn.Identity(), "LM head is Identity on this rank.*pipeline_parallel_size=1"),
        (Vocabulary(width=32), Vocabulary(), "is 32 wide, but this drafter's head was trained on embeddings of 64"),
        (Vocabulary(), Vocabulary(added=3), "LM head has 3 added vocabulary rows.*without added tokens"),
    ],
)
def test_unfit_targets_are_refused(monkeypatch: pytest.MonkeyPatch, embedding, lm_head, message: str) -> None:
    """Catches a target that would fail in the middle of a step, or draft nonsense."""
    with pytest.raises(ValueError, match=message):
        load_beside(monkeypatch, embedding, lm_head)
