# SPDX-License-Identifier: Apache-2.0
"""Above temperature 0, every served token follows the target's own distribution.

A random target with eight tokens, sampled 20,000 times from one prompt: tokens 2
to 5 are drafted, so accepted, recovered and bonus tokens are all among them, from the
lattice and from elsewhere. Each pair of neighbouring tokens is compared with the
enumerated distribution.
"""

from collections.abc import Sequence
from copy import copy

import pytest
import torch
from distribution import joint_distribution, pair_p_values
from engines import Engine, without_head
from pairs import drafter_config, target_config, write_drafter, write_target
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from vllm_lilicorr.engine import proposer

pytestmark = pytest.mark.slow

VOCAB_SIZE, NUM_TOKENS = 8, 5
NUM_SAMPLES, NUM_MUTANT_SAMPLES = 20_000, 6_000
PROMPT = [2, 5, 3]
# The seed is fixed, so an exact sampler passes for good; a broken one is many orders below.
EXACT, BROKEN = 1e-4, 1e-9
GROUP = 10  # completions per request: what shares a batch stays mixed


def sampling(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": GROUP} | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target, LiLiCorr drafter and the same drafter without its head."""
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    # The high scale makes proposals sharp: neighbouring rows then differ much.
    config = drafter_config(dflash_config={"lilicorr_candidate_topk": 4, "lilicorr_logit_scale": 64.0}, **sizes)
    drafter = write_drafter(folder / "drafter", config)
    target = write_target(folder / "target", target_config(**sizes))
    return target, drafter, without_head(drafter, folder / "dflash")


def build(target, drafter, **speculative) -> Engine:
    return Engine(
        target,
        drafter,
        speculative={"num_speculative_tokens": 3} | speculative,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=250,
        num_gpu_blocks_override=600,
    )


@pytest.fixture(scope="module")
def engine(folders):
    with build(*folders[:2]) as engine:
        yield engine


def draw(engine: Engine, kinds: Sequence[SamplingParams], num_samples: int) -> list[torch.Tensor]:
    """For each kind of request [num_samples, 5] tokens (a greedy kind has one per request);
    all kinds share every batch."""
    torch.manual_seed(7)
    num_requests = num_samples // GROUP * len(kinds)
    drafts = engine.counters.drafts
    outputs = engine.generate([PROMPT] * num_requests, [kinds[i % len(kinds)] for i in range(num_requests)])
    assert engine.counters.drafts > drafts + num_requests
    rows: list[list[list[int]]] = [[] for _ in kinds]
    for index, output in enumerate(outputs):
        rows[index % len(kinds)] += [list(completion.token_ids) for completion in output.outputs]
    return [torch.tensor(row) for row in rows]


def p_values(folders, samples: torch.Tensor, params: SamplingParams) -> list[float]:
    return pair_p_values(samples, joint_distribution(folders[0], PROMPT, params, NUM_TOKENS))


def test_temperature_1(folders, engine):
    """Catches any proposal q that is not what the draft was drawn from."""
    before = copy(engine.counters)
    (samples,) = draw(engine, [sampling()], NUM_SAMPLES)
    drafts, accepted = engine.counters.drafts - before.drafts, engine.counters.accepted - before.accepted
    assert 0.1 * drafts < accepted < 2 * drafts, "drafts must be both accepted and rejected"
    values = p_values(folders, samples, sampling())
    assert min(values) > EXACT, values


def test_mixed_batch_with_top_k_and_top_p(folders, engine):
    """Catches sampling parameters or proposals of one request applied to another in its batch."""
    kinds = [
        sampling(),
        sampling(temperature=0, n=1),
        sampling(top_k=3),
        sampling(top_p=0.7),
        sampling(temperature=0.6, top_k=5, top_p=0.9),
        sampling(temperature=1.7),
    ]
    for params, samples in zip(kinds, draw(engine, kinds, NUM_SAMPLES // 4), strict=True):
        values = p_values(folders, samples, params)
        assert min(values) > EXACT, (params, values)


def test_each_walk(folders):
    """Catches a walk whose one-hot drafts are verified against a distribution, or the other way round,
    and fewer candidates whose proposals are spread over more."""
    kinds = [sampling(), sampling(temperature=0.7, top_p=0.8), sampling(temperature=0, n=1)]
    for options in ({"walk": "greedy"}, {"walk": "expected-length"}, {"candidate_topk": 1}, {"candidate_topk": 3}):
        with build(*folders[:2], lilicorr=options) as engine:
            for params, samples in zip(kinds, draw(engine, kinds, NUM_SAMPLES // 4), strict=True):
                values = p_values(folders, samples, params)
                assert min(values) > EXACT, (options, params, values)


def test_top_k_1_is_greedy(folders, engine):
    """Catches top-k without any drafted token in the batch (the CPU build's engine ends), and a token
    that the target cannot sample."""
    (greedy,) = draw(engine, [sampling(temperature=0, n=1)], GROUP)
    (samples,) = draw(engine, [sampling(top_k=1)], 10 * GROUP)
    assert (samples == greedy[0]).all()


def test_seeds_repeat_in_any_batch(folders, engine):
    """Catches draft noise that a neighbour, a chunk of the prompt or the row in the batch moves."""
    seeded = [sampling(n=1, seed=seed, temperature=0.9, top_p=0.95) for seed in range(40)]
    prompts = [PROMPT + [2 + seed % 6] * (1 + seed % 20) for seed in range(40)]
    together = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, seeded)]
    crowd = [sampling(n=3)] * 40
    mixed = engine.generate(
        [prompt for pair in zip([PROMPT] * 40, prompts[::-1], strict=True) for prompt in pair],
        [params for pair in zip(crowd, seeded[::-1], strict=True) for params in pair],
    )
    assert [list(output.outputs[0].token_ids) for output in mixed[1::2]][::-1] == together
    alone = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts[:8], seeded[:8], strict=True)]
    assert [list(output.outputs[0].token_ids) for output in alone] == together[:8]
    assert len({tuple(row) for row in together}) > 20


# A verified token costs a thousandth of a step's fixed time: some drafts are verified whole, some in part.
CHEAP_TOKENS = {"target": {"1": 100.1, "1000": 200.0}, "drafter": {"1": 0.001, "250": 0.001}}


@pytest.fixture(scope="module")
def adaptive_engine(folders):
    options = {"adaptive_length": True, "cost_curve": CHEAP_TOKENS}
    with build(*folders[:2], lilicorr=options) as engine:
        yield engine


def test_adaptive_lengths(folders, adaptive_engine, monkeypatch):
    """Catches lengths that depend on the token that was drawn: then likely tokens are served too often."""
    policy = adaptive_engine.proposer._policy
    begin, choose, lengths = policy.begin_step, policy.choose, set()

    def chosen(*arguments):
        found = choose(*arguments)
        lengths.update(found.tolist())
        return found

    monkeypatch.setattr(policy, "begin_step", lambda view, can_draft, must_draft: begin(view, can_draft, True))
    monkeypatch.setattr(policy, "choose", chosen)
    kinds = [sampling(), sampling(temperature=0.7, top_p=0.9), sampling(temperature=0, n=1)]
    for params, samples in zip(kinds, draw(adaptive_engine, kinds, NUM_SAMPLES // 2), strict=True):
        values = p_values(folders, samples, params)
        assert min(values) > EXACT, (params, values)
    assert lengths == {0, 1, 2, 3}


def test_a_length_that_follows_the_draw_is_noticed(folders, adaptive_engine, monkeypatch):
    """Catches a test of lengths that passes whatever decides them."""
    drafter = adaptive_engine.proposer
    policy, begin = drafter._policy, drafter._policy.begin_step

    def by_rank(features, *_):
        lattice, path = drafter._walked
        return (path < 1).long().cumprod(1).sum(1).numpy()

    monkeypatch.setattr(policy, "begin_step", lambda view, can_draft, must_draft: begin(view, can_draft, True))
    monkeypatch.setattr(policy, "choose", by_rank)
    (samples,) = draw(adaptive_engine, [sampling()], NUM_MUTANT_SAMPLES)
    values = p_values(folders, samples, sampling())
    assert min(values) < BROKEN, values


def test_seeds_repeat_with_adaptive_lengths(adaptive_engine):
    """Catches random numbers that a suspension, and with it a timing, moves."""
    seeded = [sampling(n=1, seed=seed, temperature=0.9) for seed in range(40)]
    runs = [[list(o.outputs[0].token_ids) for o in adaptive_engine.generate([PROMPT] * 40, seeded)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def not_renormalised(lattice, proposals):
    proposals.div_(proposals.amax(dim=-1, keepdim=True))


def of_the_neighbour(lattice, proposals):
    proposals.copy_(proposals.roll(1, dims=0))


def elsewhere_thrice(lattice, proposals):
    candidates = proposals.gather(2, lattice.candidate_ids)
    proposals.mul_(3).scatter_(2, lattice.candidate_ids, candidates)


@pytest.mark.parametrize("mutant", [not_renormalised, of_the_neighbour, elsewhere_thrice])
def test_a_wrong_proposal_is_noticed(folders, engine, monkeypatch, mutant):
    """Catches a test that passes whatever q is."""
    walk = proposer.sampled_walk

    def changed(lattice, proposals, *rest):
        drawn = walk(lattice, proposals, *rest)
        mutant(lattice, proposals)
        return drawn

    monkeypatch.setattr(proposer, "sampled_walk", changed)
    (samples,) = draw(engine, [sampling()], NUM_MUTANT_SAMPLES)
    values = p_values(folders, samples, sampling())
    assert min(values) < BROKEN, values


def test_plain_dflash_is_exact_too(folders):
    """Catches vLLM's CPU build reading uninitialised sampling parameters, with any drafter.

    Then the seam is undone, and the same measurement must fail.
    """
    target, _, dflash = folders
    params = sampling(temperature=0.7)
    with build(target, dflash, method="dflash", draft_sample_method="probabilistic") as engine:
        (samples,) = draw(engine, [params], NUM_SAMPLES // 2)
        values = p_values(folders, samples, params)
        assert min(values) > EXACT, values

        cured = rejection_sampler.expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = cured.__wrapped__
        try:
            (samples,) = draw(engine, [params], NUM_MUTANT_SAMPLES)
        finally:
            rejection_sampler.expand_batch_to_tokens = cured
        values = p_values(folders, samples, params)
        assert min(values) < BROKEN, values
