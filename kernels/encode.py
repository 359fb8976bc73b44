# SPDX-License-Identifier: Apache-2.0
"""The nodes of a lattice before the first layer, in one launch.

    x[n, k] = token_rows[id[n, k]] + hidden_rows[n] + W_down feature_rows[n, k] + b
              + slot_embedding[n mod S] + rank_embedding[k]

token_rows is the projected token table: W_tok applied to the target's whole embedding once
at load, V * H numbers (311 MB in bf16 at V 151,936 and H 1024), after which a step gathers
S * K rows of H numbers instead of multiplying S * K embeddings of D by a [H, D] matrix
(8.4 MB at D 4096). A head without token_proj (H = D) has the embedding itself as its table.
"""

import torch
import triton
import triton.language as tl

from vllm_lilicorr.kernels.linear import num_tiles, product, tiles


@triton.jit
def _encode_kernel(
    nodes_ptr,
    candidate_ids_ptr,
    token_rows_ptr,
    hidden_rows_ptr,
    feature_rows_ptr,
    weight_ptr,
    bias_ptr,
    slot_embedding_ptr,
    rank_embedding_ptr,
    token_rows_stride,
    num_nodes,
    num_slots,
    top_k,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_blocks = tl.cdiv(num_nodes, BLOCK_M)
    rows = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < num_nodes) & (cols[None, :] < WIDTH)
    token_ids = tl.load(candidate_ids_ptr + rows, mask=rows < num_nodes, other=0)
    token_rows = tl.load(token_rows_ptr + token_ids[:, None] * token_rows_stride + cols[None, :], mask=mask, other=0.0)
    out = product(
        feature_rows_ptr,
        WIDTH,
        feature_rows_ptr,
        weight_ptr,
        rows,
        num_nodes,
        cols,
        WIDTH,
        0.0,
        WIDTH,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    slot_rows = rows // top_k
    out += token_rows.to(tl.float32)
    out += tl.load(hidden_rows_ptr + slot_rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    slots = (slot_rows % num_slots)[:, None] * WIDTH + cols[None, :]
    out += tl.load(slot_embedding_ptr + slots, mask=mask, other=0.0).to(tl.float32)
    ranks = (rows % top_k)[:, None] * WIDTH + cols[None, :]
    out += tl.load(rank_embedding_ptr + ranks, mask=mask, other=0.0).to(tl.float32)
    out += tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
    places = rows[:, None] * WIDTH + cols[None, :]
    tl.store(nodes_ptr + places, out.to(nodes_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("lilicorr::encode", mutates_args=())
def encode(
    candidate_ids: torch.Tensor,
    token_rows: torch.Tensor,
    hidden_rows: torch.Tensor,
    feature_rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    slot_embedding: torch.Tensor,
    rank_embedding: torch.Tensor,
    num_slots: int,
) -> torch.Tensor:
    """The nodes of the lattices of all requests.

    Args:
        candidate_ids: [R * S, K] int64 contiguous; rows of `token_rows`.
        token_rows: [V, H], rows contiguous: the projected token table. Rows that are
            projected already are a table of R * S * K rows, with ids that count them.
        hidden_rows: [R * S, H] contiguous.
        feature_rows: [R * S * K, H] contiguous.
        weight, bias: [H, H] contiguous and [H]; bf16, fp16 or fp32, as all rows.
        slot_embedding: [at least S, H] contiguous.
        rank_embedding: [at least K, H] contiguous.
        num_slots: S.

    Returns:
        [R * S * K, H] in the weight's dtype.
    """
    num_nodes, top_k = candidate_ids.numel(), candidate_ids.shape[-1]
    width = weight.shape[0]
    nodes = feature_rows.new_empty((num_nodes, width))
    if num_nodes:
        block = tiles(num_nodes, weight.dtype)
        _encode_kernel[(num_tiles(num_nodes, width, block),)](
            nodes,
            candidate_ids,
            token_rows,
            hidden_rows,
            feature_rows,
            weight,
            bias,
            slot_embedding,
            rank_embedding,
            token_rows.stride(0),
            num_nodes,
            num_slots,
            top_k,
            WIDTH=width,
            **block,
        )
    return nodes


@encode.register_fake
def _(
    candidate_ids,
    token_rows,
    hidden_rows,
    feature_rows,
    weight,
    bias,
    slot_embedding,
    rank_embedding,
    num_slots,
):
    return feature_rows.new_empty((candidate_ids.numel(), weight.shape[0]))
