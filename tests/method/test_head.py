# SPDX-License-Identifier: Apache-2.0
"""The head against a second writing of its equations, in float64 and one request at a time."""

import math

import pytest
import torch
from pairs import drafter_config, random_tensors

from vllm_lilicorr.checkpoint.layout import HEAD_PREFIX, expected_tensors
from vllm_lilicorr.method.geometry import DrafterGeometry
from vllm_lilicorr.method.head import LiLiCorrHead

# Relative to the logit scale; fp32 rounding through two layers.
TOLERANCE = 2e-6


def make_head(seed: int = 3, **dflash_config) -> tuple[DrafterGeometry, dict[str, torch.Tensor], LiLiCorrHead]:
    block_size = dflash_config.pop("block_size", 8)
    config = drafter_config(dflash_config=dflash_config, block_size=block_size)
    geometry = DrafterGeometry.from_config(config)
    shapes = {
        name.removeprefix(HEAD_PREFIX): shape
        for name, shape in expected_tensors(geometry).items()
        if name.startswith(HEAD_PREFIX)
    }
    weights = random_tensors(shapes, seed, torch.float32)
    head = LiLiCorrHead(geometry)
    head.load_state_dict(weights)
    head.prepare()
    return geometry, weights, head


def make_inputs(geometry: DrafterGeometry, num_reqs: int, num_slots: int, top_k: int, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    log_probs = -normal(num_reqs, num_slots, top_k).abs().sort(dim=-1).values * 3
    width = geometry.hidden_size
    valid = torch.ones(num_reqs, dtype=torch.bool)
    valid[1::2] = False
    return (
        normal(num_reqs, num_slots, top_k, width),
        log_probs,
        normal(num_reqs, num_slots, width),
        normal(num_reqs, width),
        valid,
    )


def reference(geometry, weights, embeddings, log_probs, hidden, anchor, valid) -> torch.Tensor:
    """Edge logits [S, K, K] of one request, node by node, in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    embeddings, log_probs, hidden, anchor = (t.double() for t in (embeddings, log_probs, hidden, anchor))
    num_slots, top_k = log_probs.shape
    width = geometry.head_width

    def linear(name, x):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def silu(x):
        return x / (1 + torch.exp(-x))

    def rms_norm(name, x):
        return x / torch.sqrt((x * x).mean() + geometry.rms_norm_eps) * w[f"{name}.weight"]

    relative, same = w["relative_slot_bias"].tolist(), w["same_slot_bias"].tolist()

    def bias_of(head, offset):
        return relative[head][offset + geometry.block_size - 1] + (same[head] if offset == 0 else 0.0)

    nodes = []
    for s in range(num_slots):
        for k in range(top_k):
            value = log_probs[s, k]
            fraction = k / (geometry.top_k - 1) if geometry.top_k > 1 else 0.0
            f = torch.tensor([value, value.exp(), value - log_probs[s].max(), fraction, k == 0], dtype=torch.float64)
            f = (f - f.mean()) / torch.sqrt(f.var(unbiased=False) + 1e-5)
            f = f * w["feature_norm.weight"] + w["feature_norm.bias"]
            x = linear("token_proj", embeddings[s, k]) if "token_proj.weight" in w else embeddings[s, k]
            x = x + linear("pass_hidden_proj", hidden[s])
            x = x + linear("feature_mlp.down_proj", silu(linear("feature_mlp.up_proj", f)))
            nodes.append(x + w["slot_embedding"][0, 0, s, 0] + w["rank_embedding"][0, 0, 0, k])
    slots = [s for s in range(num_slots) for _ in range(top_k)]
    dim = width // geometry.num_heads
    for layer in range(geometry.num_layers):
        prefix = f"layers.{layer}"
        qkv = torch.stack(
            [
                w[f"{prefix}.attn.in_proj_weight"] @ rms_norm(f"{prefix}.attn_norm", x)
                + w[f"{prefix}.attn.in_proj_bias"]
                for x in nodes
            ]
        )
        mixed = []
        for i, query in enumerate(qkv):
            heads = []
            for a in range(geometry.num_heads):
                part = slice(a * dim, (a + 1) * dim)
                keys, values = qkv[:, width : 2 * width][:, part], qkv[:, 2 * width :][:, part]
                bias = torch.tensor([bias_of(a, slots[i] - slot) for slot in slots], dtype=torch.float64)
                heads.append(torch.softmax(keys @ query[part] / math.sqrt(dim) + bias, dim=0) @ values)
            mixed.append(linear(f"{prefix}.attn.out_proj", torch.cat(heads)))
        nodes = [x + m for x, m in zip(nodes, mixed, strict=True)]
        nodes = [
            x
            + linear(
                f"{prefix}.mlp.down_proj", silu(linear(f"{prefix}.mlp.up_proj", rms_norm(f"{prefix}.mlp_norm", x)))
            )
            for x in nodes
        ]
    alpha = rms_norm("anchor_norm", linear("context_proj", anchor) if valid else torch.zeros(width).double())

    def unit(v):
        return v / max(v.norm().item(), geometry.vector_eps)

    outgoing, incoming = [], []
    for x in nodes:
        y = rms_norm("output_norm", x)
        phi = silu(linear("factor_input_proj", torch.cat((y, alpha, y * alpha))))
        outgoing.append(unit(linear("out_head", phi)))
        incoming.append(unit(linear("in_head", phi)))
    start = unit(linear("anchor_out_head", alpha))
    logits = torch.zeros(num_slots, top_k, top_k, dtype=torch.float64)
    for s in range(num_slots):
        for i in range(top_k):
            source = start if s == 0 else outgoing[(s - 1) * top_k + i]
            for j in range(top_k):
                logits[s, i, j] = geometry.logit_scale * (source @ incoming[s * top_k + j])
    return logits


@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
@pytest.mark.parametrize("width", [32, 64], ids=["token_proj", "no_token_proj"])
def test_equals_reference_at_every_draft_length(top_k: int, width: int) -> None:
    """Would catch a wrong bias offset, feature, slot prefix or anchor mask at any S from 1 to block_size - 1."""
    geometry, weights, head = make_head(lilicorr_candidate_topk=top_k, lilicorr_hidden_size=width)
    for num_slots in range(1, geometry.num_slots + 1):
        inputs = make_inputs(geometry, 2, num_slots, top_k)
        with torch.inference_mode():
            found = head(*inputs)
        for row in range(2):
            wanted = reference(geometry, weights, *(tensor[row] for tensor in inputs))
            error = (found[row].double() - wanted).abs().max().item()
            assert error <= TOLERANCE * geometry.logit_scale, (num_slots, row)


def test_fewer_candidates_than_trained() -> None:
    """Would catch rank features or biases computed from the run-time K instead of the trained one."""
    geometry, weights, head = make_head()
    inputs = make_inputs(geometry, 1, 5, 3)
    with torch.inference_mode():
        found = head(*inputs)
    wanted = reference(geometry, weights, *(tensor[0] for tensor in inputs))
    assert (found[0].double() - wanted).abs().max().item() <= TOLERANCE * geometry.logit_scale


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Would catch a batch dimension that leaks into attention, anchors or normalisation."""
    geometry, _, head = make_head()
    inputs = make_inputs(geometry, 5, 7, 8)
    with torch.inference_mode():
        together = head(*inputs)
        alone = torch.cat([head(*(tensor[row : row + 1] for tensor in inputs)) for row in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_reloaded_weights_are_prepared_again() -> None:
    """Would catch buffers of the old weights after a reload."""
    geometry, _, head = make_head(seed=3)
    _, weights, fresh = make_head(seed=4)
    head.load_state_dict(weights)
    head.prepare()
    inputs = make_inputs(geometry, 1, 7, 8)
    assert torch.equal(head(*inputs), fresh(*inputs))


def test_prepared_buffers_stay_where_they_are() -> None:
    """Would catch a forward that rebuilds its buffers: CUDA graphs replay fixed addresses."""
    geometry, _, head = make_head()

    def addresses() -> list[int]:
        return [value.data_ptr() for value in vars(head).values() if isinstance(value, torch.Tensor)]

    before = addresses()
    assert before
    for num_reqs, num_slots in ((1, 7), (4, 3), (2, 7)):
        head(*make_inputs(geometry, num_reqs, num_slots, 8))
    head.prepare()
    assert addresses() == before
