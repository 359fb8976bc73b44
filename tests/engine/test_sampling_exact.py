# SPDX-License-Identifier: Apache-2.0
"""Above temperature 0, every served token follows the target's own distribution.

A random target with eight tokens, sampled 20,000 times from one prompt: tokens 2
to 5 are drafted, so accepted, recovered and bonus tokens are all among them. Each
pair of neighbouring tokens is compared with the enumerated distribution.
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

from vllm_lilicorr.engine.proposer import ProposalBuffer

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


def not_renormalised(candidate_ids, rows):
    return candidate_ids, rows / rows.amax(dim=-1, keepdim=True)


def of_the_neighbour(candidate_ids, rows):
    return candidate_ids, rows.roll(1, dims=0)


@pytest.mark.parametrize("mutant", [not_renormalised, of_the_neighbour])
def test_a_wrong_proposal_is_noticed(folders, engine, monkeypatch, mutant):
    """Catches a test that passes whatever q is."""
    fill = ProposalBuffer.fill
    monkeypatch.setattr(ProposalBuffer, "fill", lambda self, ids, rows: fill(self, *mutant(ids, rows)))
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
