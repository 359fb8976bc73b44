# SPDX-License-Identifier: Apache-2.0
"""Draws of the Model Runner V2 speculator from given lattices, against the method's proposals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_walk import run_walks
from reference_proposals import reference_proposals
from scipy import stats
from vllm_sources import fetch

from vllm_lilicorr.kernels.reference import partial_candidates
from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.proposals import Sampling
from vllm_lilicorr.method.walks import expected_length_walk, greedy_walk

pytestmark = pytest.mark.slow

NUM_SLOTS, TOP_K, VOCAB_SIZE = 3, 4, 12
NUM_DRAWS = 250


def random_case(num_reqs: int, max_num_reqs: int | None = None, **options: Any) -> dict[str, Any]:
    """A case of interpreted_walk.run_walks in which every request has a lattice of its own."""
    max_num_reqs = max_num_reqs or num_reqs
    generator = torch.Generator().manual_seed(num_reqs)
    case = {
        "logits": 1.5 * torch.randn(num_reqs * NUM_SLOTS, VOCAB_SIZE, generator=generator),
        "edge_logits": 3 * torch.randn(num_reqs, NUM_SLOTS, TOP_K, TOP_K, generator=generator),
        "req_states": torch.randperm(max_num_reqs, generator=generator)[:num_reqs],
        "temperature": torch.ones(max_num_reqs),
        "seeds": torch.randint(-(2**62), 2**62, (max_num_reqs,), generator=generator),
    }
    case["edge_logits"][:, 0] = case["edge_logits"][:, 0, :1]
    return case | options


def lattice_of(case: dict[str, Any]) -> Lattice:
    values, ids, partition = partial_candidates(case["logits"].clone(), TOP_K)
    shape = case["edge_logits"].shape[:3]
    return Lattice(ids.view(shape), (values - partition).view(shape), case["edge_logits"])


def proposals_of(case: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """What the method says each token was drawn from, [R, S, V]."""
    lattice, states = lattice_of(case), case["req_states"]
    max_num_reqs = len(case["temperature"])
    top_k = case.get("top_k", torch.full((max_num_reqs,), VOCAB_SIZE))[states]
    top_p = case.get("top_p", torch.ones(max_num_reqs))[states]
    sampling = Sampling(case["temperature"][states], top_k, top_p)
    return reference_proposals(lattice, case["logits"].view(*tokens.shape, -1), sampling, tokens)


def limited() -> dict[str, torch.Tensor]:
    """Parameters of 24 request states: every combination of four temperatures, three top-k, two top-p."""
    temperatures, top_k, top_p = [0.0, 0.5, 1.0, 1.6], [1, 5, VOCAB_SIZE], [0.7, 1.0]
    grid = torch.cartesian_prod(*(torch.tensor(values, dtype=torch.float32) for values in (temperatures, top_k, top_p)))
    return {"temperature": grid[:, 0].contiguous(), "top_k": grid[:, 1].int(), "top_p": grid[:, 2].contiguous()}


def broken() -> dict[str, Any]:
    """Requests 0 to 3: logits all NaN, one +inf, all -inf, edges NaN; the others are sound."""
    case = random_case(8, top_p=torch.full((8,), 0.8))
    rows = case["logits"].view(8, NUM_SLOTS, -1)
    rows[0, 1], rows[1, :, 3], rows[2] = torch.nan, torch.inf, -torch.inf
    case["edge_logits"][3] = torch.nan
    case["temperature"][case["req_states"][1]] = 0.0
    return case


def same_lattice(num_draws: int, **options: Any) -> dict[str, Any]:
    """One request's lattice, drawn from by many requests with other seeds."""
    case = random_case(num_draws, **options)
    rows = case["logits"].view(num_draws, -1)
    rows[:], case["edge_logits"][:] = rows[0].clone(), case["edge_logits"][0].clone()
    return case


CASES = {
    "mixed": random_case(24, **limited()),
    "fp64": random_case(24, use_fp64=True, **limited()),
    "padded": random_case(6, max_num_reqs=10, num_steps=2),
    "broken": broken(),
    "flat": random_case(24),  # half of what is drawn is from elsewhere
    "drawn often": same_lattice(NUM_DRAWS),
    "expected length": random_case(24, expected_length=True, adaptive=True, **limited()),
    "greedy": random_case(8, draws=False, adaptive=True),
    "expected length, greedy": random_case(8, draws=False, expected_length=True, adaptive=True),
}
CASES["padded"]["req_states"][[2, 5]] = -1
CASES["flat"]["logits"] *= 0.3
CASES["some of mixed"] = CASES["mixed"] | {
    "logits": CASES["mixed"]["logits"][5 * NUM_SLOTS : 11 * NUM_SLOTS],
    "edge_logits": CASES["mixed"]["edge_logits"][5:11],
    "req_states": CASES["mixed"]["req_states"][5:11],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_walks(CASES, tmp_path_factory.mktemp("walks"))


def assert_drawn_from_its_proposals(case: dict[str, Any], result: dict[str, Any]) -> None:
    states = case["req_states"]
    temperature = case["temperature"][states]
    draws = temperature > 0
    rows = torch.softmax(result["draft_logits"][states] / temperature.clamp_min(1e-3)[:, None, None], dim=-1)
    torch.testing.assert_close(rows[draws], proposals_of(case, result["tokens"])[draws], rtol=2e-4, atol=1e-6)
    assert torch.equal(result["redrawn"][draws], result["tokens"][draws])


@pytest.mark.parametrize("name", ["mixed", "fp64", "flat", "drawn often", "some of mixed"])
def test_draft_logits_are_what_was_drawn_from(results, name: str) -> None:
    """Would catch any entry of draft_logits, stale, of another row or on another scale, that the draw did not use.

    The second half would catch noise that is not keyed as vLLM's: a draw of the
    whole row with it gives the same token, bit for bit.
    """
    assert_drawn_from_its_proposals(CASES[name], results[name])
    is_candidate = (lattice_of(CASES[name]).candidate_ids == results[name]["tokens"][:, :, None]).any(-1)
    assert is_candidate.any() and not is_candidate.all()


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_draws_alike_in_other_releases(version: str, tmp_path: Path) -> None:
    """Would catch a release that keys the noise of the two draws differently: 0.33 mixes the slot into the seed."""
    try:
        package = fetch(version)
    except RuntimeError as error:  # offline, and not fetched before
        pytest.skip(str(error))
    result = run_walks({"flat": CASES["flat"]}, tmp_path, package)["flat"]
    assert_drawn_from_its_proposals(CASES["flat"], result)


def test_draws_follow_the_proposals(results) -> None:
    """Would catch noise that prefers a rank or the token from elsewhere: chi-square of every slot's draws."""
    case, tokens = CASES["drawn often"], results["drawn often"]["tokens"]
    rows = proposals_of(case, tokens).double()
    for slot in range(NUM_SLOTS):
        previous = torch.zeros(NUM_DRAWS) if slot == 0 else tokens[:, slot - 1]
        for token in previous.unique():
            drawn = previous == token
            observed = torch.bincount(tokens[drawn, slot], minlength=VOCAB_SIZE).double()
            expected = rows[drawn, slot].sum(dim=0)
            assert not observed[expected == 0].any()
            common = expected >= 5
            observed, expected = (torch.cat((x[common], x[~common].sum()[None])) for x in (observed, expected))
            if len(observed) > 2 and expected[-1] > 0:
                assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_requests_at_temperature_0_walk_greedily(results) -> None:
    """Would catch a flattened row or a token from elsewhere in a deterministic walk."""
    for name in ("mixed", "greedy"):
        greedy = torch.ones(8, dtype=torch.bool) if name == "greedy" else CASES[name]["temperature"] == 0
        lattice = lattice_of(CASES[name])
        states = CASES[name]["req_states"]
        wanted = lattice.tokens(greedy_walk(lattice.edge_logits))
        assert torch.equal(results[name]["tokens"][greedy[states]], wanted[greedy[states]])


def test_requests_at_temperature_0_walk_by_expected_length_where_asked(results) -> None:
    """Would catch an option that does nothing, or that touches requests that sample."""
    for name in ("expected length", "expected length, greedy"):
        case, result = CASES[name], results[name]
        lattice = lattice_of(case)
        path = expected_length_walk(lattice.edge_logits)
        wanted = lattice.tokens(path)
        assert not torch.equal(path, greedy_walk(lattice.edge_logits))
        if name == "expected length":
            greedy = case["temperature"][case["req_states"]] == 0
            assert torch.equal(result["tokens"][greedy], wanted[greedy])
            assert torch.equal(result["tokens"][~greedy], results["mixed"]["tokens"][~greedy])
        else:
            assert torch.equal(result["tokens"], wanted)


def test_a_batch_does_not_change_a_draw(results) -> None:
    """Would catch noise keyed by the row of the batch: seeded requests would not be repeatable."""
    assert torch.equal(results["some of mixed"]["tokens"], results["mixed"]["tokens"][5:11])


def test_padding_writes_nothing(results) -> None:
    """Would catch a padded row of a captured graph that writes to a live request; the second step would catch
    entries of the first that were wiped or kept."""
    case, result = CASES["padded"], results["padded"]
    live = case["req_states"][case["req_states"] >= 0]
    others = [state for state in range(10) if state not in live]
    assert result["draft_logits"][others].isneginf().all()
    assert (result["tokens"][[2, 5]] == -7).all()
    rows = torch.softmax(result["draft_logits"][case["req_states"]], dim=-1)
    wanted = proposals_of(case, result["tokens"].clamp_min(0))
    real = case["req_states"] >= 0
    torch.testing.assert_close(rows[real], wanted[real], rtol=2e-4, atol=1e-6)


def test_what_is_not_a_number_is_drafted_from_uniformly(results) -> None:
    """Would catch an invalid token, or a proposal that is NaN: rejection would accept anything."""
    case, result = CASES["broken"], results["broken"]
    tokens = result["tokens"]
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
    states = case["req_states"]
    draws = case["temperature"][states] > 0
    rows = torch.softmax(result["draft_logits"][states], dim=-1)[draws]
    assert not rows.isnan().any()
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:2]))
    assert torch.equal(result["redrawn"][draws], tokens[draws])
    # All that is possible among the candidates is rank 0; the rest of the vocabulary is uniform.
    uniform = rows[0, 1].sort().values
    torch.testing.assert_close(uniform[TOP_K - 1 : -1], torch.full((VOCAB_SIZE - TOP_K,), 1 / VOCAB_SIZE))
    torch.testing.assert_close(uniform[-1], torch.tensor(TOP_K / VOCAB_SIZE))
    sound = torch.arange(8) > 3
    torch.testing.assert_close(rows[3:], proposals_of(case, tokens)[sound], rtol=2e-4, atol=1e-6)


def test_draft_steps_do_not_synchronise(results) -> None:
    """Would catch a boolean mask or an item() in the draw: a CUDA graph could not capture it."""
    assert {name: result["host_syncs"] for name, result in results.items() if result["host_syncs"]} == {}


def test_adaptive_verification_reads_whole_proposals(results) -> None:
    """Would catch a prediction that depends on which token was drawn from elsewhere: trimming by it is not lossless."""
    for name in ("expected length", "greedy", "expected length, greedy"):
        case, result = CASES[name], results[name]
        states = case["req_states"]
        lattice = lattice_of(case)
        walks = expected_length_walk if "expected" in name else greedy_walk
        path = walks(lattice.edge_logits)
        previous = torch.cat((torch.zeros_like(path[:, :1]), path[:, :-1]), dim=1)[:, :, None, None]
        best = torch.softmax(lattice.edge_logits, -1).gather(2, previous.expand(-1, -1, 1, TOP_K))[:, :, 0].amax(-1)
        if name == "expected length":
            draws = case["temperature"][states] > 0
            best[draws] = proposals_of(case, result["tokens"]).amax(-1)[draws]
        wanted = torch.logit(best.double()).float()
        certain = best > 1 - 1e-5  # clamped there
        torch.testing.assert_close(result["features"][states][~certain], wanted[~certain], rtol=1e-3, atol=1e-3)
        assert (result["features"][states][certain] > 5).all()
