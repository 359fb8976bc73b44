# SPDX-License-Identifier: Apache-2.0
"""Attention of all nodes of a lattice to each other, with its learned bias built on the fly.

    out[q] = sum over keys of softmax(query . key / sqrt(d) + bias(q, key)) value
    bias = relative_slot_bias[a, slot(q) - slot(key) + block_size - 1]
           + same_slot_bias[a] where both nodes are in one slot

No [A, S*K, S*K] bias and no scores are written: the bias is a function of two slots, read
from a row of 2 * block_size - 1 numbers. The offset stays the trained one for fewer slots;
fewer candidates only change which nodes share a slot. One program per request, head and
block of queries; keys in blocks with a running maximum. In serving S*K is 56 or 120.
"""

import torch
import triton
import triton.language as tl

# Queries and keys of a program at a time.
BLOCK_Q = 32
BLOCK_N = 64


@triton.jit
def _attention_kernel(
    out_ptr,
    qkv_ptr,
    relative_slot_bias_ptr,
    same_slot_bias_ptr,
    num_nodes,
    top_k,
    block_size,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    request = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    qkv_ptr += request * num_nodes * 3 * WIDTH + head * HEAD_DIM
    out_ptr += request * num_nodes * WIDTH + head * HEAD_DIM
    relative_slot_bias_ptr += head * (2 * block_size - 1)
    same_slot_bias = tl.load(same_slot_bias_ptr + head).to(tl.float32)
    query_mask = (queries[:, None] < num_nodes) & (dims[None, :] < HEAD_DIM)
    query = tl.load(qkv_ptr + queries[:, None] * 3 * WIDTH + dims[None, :], mask=query_mask, other=0.0)
    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, num_nodes, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key_ptrs = qkv_ptr + keys[:, None] * 3 * WIDTH + dims[None, :]
        key_mask = (keys[:, None] < num_nodes) & (dims[None, :] < HEAD_DIM)
        key = tl.load(key_ptrs + WIDTH, mask=key_mask, other=0.0)
        value = tl.load(key_ptrs + 2 * WIDTH, mask=key_mask, other=0.0)
        distance = (queries // top_k)[:, None] - (keys // top_k)[None, :]
        is_node = (queries[:, None] < num_nodes) & (keys[None, :] < num_nodes)
        bias = tl.load(relative_slot_bias_ptr + distance + block_size - 1, mask=is_node, other=0.0).to(tl.float32)
        bias += tl.where(distance == 0, same_slot_bias, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + bias
        # Every block has a key, so every query, padding too, has a finite maximum.
        scores = tl.where(keys[None, :] < num_nodes, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(highest - higher)
        mass = mass * fade + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
        highest = higher
    out = mixed / mass[:, None]
    tl.store(out_ptr + queries[:, None] * WIDTH + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=query_mask)


@torch.library.custom_op("lilicorr::lattice_attention", mutates_args=())
def lattice_attention(
    qkv: torch.Tensor, relative_slot_bias: torch.Tensor, same_slot_bias: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Attention over the nodes of each request's lattice.

    Args:
        qkv: [R, S * K, 3, A, H / A] contiguous; bf16, fp16 or fp32.
        relative_slot_bias: [A, 2 * block_size - 1] contiguous; S < block_size.
        same_slot_bias: [A].
        top_k: K.

    Returns:
        [R, S * K, H] in qkv's dtype.
    """
    num_reqs, num_nodes, _, num_heads, head_dim = qkv.shape
    block_size = (relative_slot_bias.shape[1] + 1) // 2
    if num_nodes % top_k or num_nodes // top_k >= block_size:
        raise ValueError(
            f"{num_nodes} nodes of {top_k} candidates a slot, for a head with block_size {block_size}; use at most "
            f"{(block_size - 1) * top_k} nodes, a multiple of {top_k}."
        )
    out = qkv.new_empty((num_reqs, num_nodes, num_heads * head_dim))
    if num_reqs:
        _attention_kernel[(num_reqs * num_heads, triton.cdiv(num_nodes, BLOCK_Q))](
            out,
            qkv,
            relative_slot_bias,
            same_slot_bias,
            num_nodes,
            top_k,
            block_size,
            head_dim**-0.5,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_Q=BLOCK_Q,
            BLOCK_N=BLOCK_N,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            num_warps=4,
            num_stages=2,
        )
    return out


@lattice_attention.register_fake
def _(qkv, relative_slot_bias, same_slot_bias, top_k):
    num_reqs, num_nodes, _, num_heads, head_dim = qkv.shape
    return qkv.new_empty((num_reqs, num_nodes, num_heads * head_dim))
