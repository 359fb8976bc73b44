# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch operations on a lattice: what the CPU runs, and what fast kernels are held against.

Every operation of the head computes in the dtype of its arguments: given float64, it is exact
enough to judge a kernel by.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

# Log-probability of a candidate that the drafter calls impossible: far below any real
# one, and finite, because the head's features are sums and differences of it.
IMPOSSIBLE = -1e4


def partial_candidates(
    logits: torch.Tensor,  # [N, V] bf16, fp16 or fp32; its padding columns are overwritten
    top_k: int,
    num_padding: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best entries of one shard of the vocabulary, ready to merge with other shards.

    Returns:
        values [N, K] fp32, best first; ids [N, K] int64 within the shard; the
        log of the sum of exponentials over the shard, [N, 1] fp32. The last
        `num_padding` columns count for nothing.
    """
    if num_padding:
        logits[..., -num_padding:] = -torch.inf
    values, ids = logits.topk(top_k, dim=-1)
    return values.float(), ids, torch.logsumexp(logits.float(), dim=-1, keepdim=True)


def merge_candidates(
    values: torch.Tensor,  # [N, shards * K] fp32
    ids: torch.Tensor,  # [N, shards * K] int64, in the whole vocabulary
    partitions: torch.Tensor,  # [N, shards] fp32
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N, K] int64, best first, and log-probabilities [N, K] fp32 over all shards."""
    values, chosen = values.topk(top_k, dim=-1)
    return ids.gather(-1, chosen), values - torch.logsumexp(partitions, dim=-1, keepdim=True)


def store_candidates(
    rows: torch.Tensor,  # [max_num_reqs, S, V] fp32; changed in place
    candidate_ids: torch.Tensor,  # [R * S, K] int64, distinct in each row
    scores: torch.Tensor,  # [R * S, K] fp32
    req_states: torch.Tensor,  # [R * S] int64; negative for padding
) -> None:
    """Writes K scores into the vocabulary row of each request and slot."""
    for index, req_state in enumerate(req_states.tolist()):
        if req_state >= 0:
            rows[req_state, index % rows.shape[1]].scatter_(0, candidate_ids[index], scores[index])


def linear(
    x: torch.Tensor,  # [M, I]
    weight: torch.Tensor,  # [O, I]
    bias: torch.Tensor,  # [O]
    norm: torch.Tensor | None,  # [I]
    eps: float,
    silu: bool,
    residual: torch.Tensor | None,  # [M, O]
) -> torch.Tensor:
    """residual + act(norm(x) weight^T + bias), [M, O]."""
    out = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight, bias)
    out = F.silu(out) if silu else out
    return out if residual is None else residual + out


def feature_rows(
    log_probs: torch.Tensor,  # [N, K]
    weight: torch.Tensor,  # [5, H], with LayerNorm's weight folded in
    bias: torch.Tensor,  # [H], likewise
    trained_top_k: int,
) -> torch.Tensor:
    """The feature MLP's inner rows [N * K, H]."""
    rank = torch.arange(log_probs.shape[1], device=log_probs.device).to(log_probs.dtype).expand_as(log_probs)
    below = log_probs - log_probs.amax(dim=1, keepdim=True)
    place, first = rank / max(trained_top_k - 1, 1), (rank == 0).to(log_probs.dtype)
    features = torch.stack((log_probs, log_probs.exp(), below, place, first), dim=-1).flatten(0, 1)
    return F.silu(F.layer_norm(features, (5,)) @ weight + bias)


def encode(
    candidate_ids: torch.Tensor,  # [R * S, K] int64
    token_rows: torch.Tensor,  # [V, H]
    hidden_rows: torch.Tensor,  # [R * S, H]
    features: torch.Tensor,  # [R * S * K, H], of `feature_rows`
    weight: torch.Tensor,  # [H, H]
    bias: torch.Tensor,  # [H]
    slot_embedding: torch.Tensor,  # [at least S, H]
    rank_embedding: torch.Tensor,  # [at least K, H]
    num_slots: int,
) -> torch.Tensor:
    """The lattice's nodes before the first layer, [R * S * K, H]."""
    num_rows, top_k = candidate_ids.shape
    nodes = token_rows[candidate_ids] + hidden_rows[:, None] + rank_embedding[:top_k]
    slots = slot_embedding[torch.arange(num_rows, device=nodes.device) % num_slots]
    return (nodes + slots[:, None]).flatten(0, 1) + F.linear(features, weight, bias)


def lattice_attention(
    qkv: torch.Tensor,  # [R, S * K, 3, A, H / A]
    relative_slot_bias: torch.Tensor,  # [A, 2 * block_size - 1]
    same_slot_bias: torch.Tensor,  # [A]
    top_k: int,
) -> torch.Tensor:
    """Attention over all nodes of each request, [R, S * K, H]."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    slots = torch.arange(qkv.shape[1], device=qkv.device) // top_k
    distance = slots[:, None] - slots[None, :]
    bias = relative_slot_bias[:, distance + relative_slot_bias.shape[1] // 2]
    bias = bias + (distance == 0) * same_slot_bias[:, None, None]
    scores = query @ key.transpose(-1, -2) * qkv.shape[-1] ** -0.5 + bias
    return (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)


def factors(
    nodes: torch.Tensor,  # [R * S * K, H]
    norm: torch.Tensor,  # [H]
    anchor_rows: torch.Tensor,  # [R, H] before their norm
    anchor_norm: torch.Tensor,  # [H]
    anchor_part: torch.Tensor,  # [R, H] W_anchor alpha + b
    weight: torch.Tensor,  # [H, 3 * H]
    eps: float,
) -> torch.Tensor:
    """SiLU(W_self y + W_cross (y * alpha) + anchor_part), [R * S * K, H]."""
    width = nodes.shape[1]
    y = F.rms_norm(nodes, norm.shape, norm, eps).unflatten(0, (len(anchor_rows), -1))
    alpha = F.rms_norm(anchor_rows, norm.shape, anchor_norm, eps)[:, None]
    own, cross = F.linear(y, weight[:, :width]), F.linear(y * alpha, weight[:, 2 * width :])
    return F.silu(own + cross + anchor_part[:, None]).flatten(0, 1)


def edge_logits(
    vectors: torch.Tensor,  # [R * S * K, 2 * F] outgoing, then incoming
    start: torch.Tensor,  # [R, F]
    log_probs: torch.Tensor,  # [R * S, K]
    num_slots: int,
    logit_scale: float,
    vector_eps: float,
    impossible: float,
) -> torch.Tensor:
    """Scores of all transitions, [R, S, K, K]; minus infinity for candidates that no walk may take."""
    top_k = log_probs.shape[1]
    outgoing, incoming = vectors.view(-1, num_slots, top_k, 2, start.shape[1]).unbind(3)
    sources = torch.cat((start[:, None, None].expand_as(outgoing[:, :1]), outgoing[:, :-1]), dim=1)
    sources, incoming = (F.normalize(part, dim=-1, eps=vector_eps) for part in (sources, incoming))
    scores = logit_scale * (sources @ incoming.transpose(-1, -2))
    banned = (log_probs <= impossible).view(-1, num_slots, 1, top_k) & (torch.arange(top_k, device=scores.device) > 0)
    return scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).masked_fill(banned, -torch.inf)


def walk(
    scores: torch.Tensor,  # [R, S, K, K]
    candidate_ids: torch.Tensor,  # [R, S, K] int64
    expected_length: bool,
) -> torch.Tensor:
    """Draft tokens [R, S]; ties go to the lower rank."""
    num_reqs, num_slots, top_k = candidate_ids.shape
    beyond = scores.new_zeros(num_reqs, 1, top_k)
    choices = []
    for slot in reversed(range(num_slots)):
        worth = scores[:, slot]
        if expected_length:
            worth = torch.softmax(worth, dim=-1) * (1 + beyond)
            beyond = worth.amax(dim=-1)[:, None]
        choices.append(worth.argmax(dim=-1))
    rank, tokens = choices[-1][:, :1], []
    for slot in range(num_slots):
        if slot:
            rank = choices[-1 - slot].gather(1, rank)
        tokens.append(candidate_ids[:, slot].gather(1, rank))
    return torch.cat(tokens, dim=1)


def head(
    w: Mapping[str, torch.Tensor],  # the head's parameters by the names of method/head.py
    token_rows: torch.Tensor,  # [V, H]
    candidate_ids: torch.Tensor,  # [R * S, K] int64
    log_probs: torch.Tensor,  # [R * S, K]
    hidden_states: torch.Tensor,  # [R * S, D]
    anchor_hidden: torch.Tensor,  # [R, D]
    anchor_valid: torch.Tensor,  # [R] bool
    num_heads: int,
    trained_top_k: int,
    eps: float,
    logit_scale: float,
    vector_eps: float,
) -> torch.Tensor:
    """Edge logits [R, S, K, K] of the whole head; see the operations above."""
    dtype, width = hidden_states.dtype, w["output_norm.weight"].shape[0]
    num_reqs, top_k = len(anchor_hidden), candidate_ids.shape[1]
    num_slots = len(candidate_ids) // num_reqs

    def layer(name: str, x: torch.Tensor, norm: str | None = None, silu: bool = False, residual=None) -> torch.Tensor:
        weight = None if norm is None else w[f"{norm}.weight"]
        return linear(x, w[f"{name}.weight"], w[f"{name}.bias"], weight, eps, silu, residual)

    up, feature_norm = w["feature_mlp.up_proj.weight"], w["feature_norm.weight"]
    bias = w["feature_mlp.up_proj.bias"] + up @ w["feature_norm.bias"]
    features = feature_rows(log_probs.to(dtype), (up * feature_norm).T, bias, trained_top_k)
    nodes = encode(
        candidate_ids,
        token_rows,
        layer("pass_hidden_proj", hidden_states),
        features,
        w["feature_mlp.down_proj.weight"],
        w["feature_mlp.down_proj.bias"],
        w["slot_embedding"].view(-1, width),
        w["rank_embedding"].view(-1, width),
        num_slots,
    )
    for index in range(1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))):
        prefix = f"layers.{index}"
        normed = F.rms_norm(nodes, (width,), w[f"{prefix}.attn_norm.weight"], eps)
        qkv = F.linear(normed, w[f"{prefix}.attn.in_proj_weight"], w[f"{prefix}.attn.in_proj_bias"])
        qkv = qkv.view(num_reqs, num_slots * top_k, 3, num_heads, -1)
        mixed = lattice_attention(qkv, w["relative_slot_bias"], w["same_slot_bias"], top_k).flatten(0, 1)
        nodes = layer(f"{prefix}.attn.out_proj", mixed, residual=nodes)
        inner = layer(f"{prefix}.mlp.up_proj", nodes, norm=f"{prefix}.mlp_norm", silu=True)
        nodes = layer(f"{prefix}.mlp.down_proj", inner, residual=nodes)
    anchor_rows = layer("context_proj", anchor_hidden) * anchor_valid[:, None]
    alpha = F.rms_norm(anchor_rows, (width,), w["anchor_norm.weight"], eps)
    anchor_block = w["factor_input_proj.weight"][:, width : 2 * width]
    node_factors = factors(
        nodes,
        w["output_norm.weight"],
        anchor_rows,
        w["anchor_norm.weight"],
        F.linear(alpha, anchor_block, w["factor_input_proj.bias"]),
        w["factor_input_proj.weight"],
        eps,
    )
    vectors = torch.cat((layer("out_head", node_factors), layer("in_head", node_factors)), dim=1)
    start = layer("anchor_out_head", alpha)
    return edge_logits(vectors, start, log_probs, num_slots, logit_scale, vector_eps, IMPOSSIBLE).float()
