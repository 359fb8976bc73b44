# SPDX-License-Identifier: Apache-2.0
"""Takes tokens outside a request's top-k and top-p out of its logits, in place.

With weights w = exp((logits - best) / temperature) in (0, 1], a row keeps w >= threshold:
the smallest threshold that at most top-k tokens reach, or the largest one above which
top-p of the mass lies. Both are found by bisection, each step one reading of the row;
neither a sorted row nor a row of weights is ever written. One program per row, and a row
whose request limits nothing costs a few scalar loads, so the launch may stand in a graph
that serves every batch.
"""

import torch
import triton
import triton.language as tl

NUM_BISECTIONS = 24


@triton.jit
def _weights(logits_ptr, token_ids, vocab_size, best, temperature):
    logits = tl.load(logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.exp((logits - best) / temperature)


@triton.jit
def _keep_probable_kernel(
    logits_ptr,
    log_partition_ptr,
    is_distribution_ptr,
    req_states_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    logits_stride,
    vocab_size,
    NUM_BISECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    offsets = tl.arange(0, BLOCK)
    tl.store(log_partition_ptr + row, float("inf"))
    req_state = tl.load(req_states_ptr + row)
    if req_state < 0:
        return
    if tl.load(is_distribution_ptr + row) == 0:
        for start in range(0, vocab_size, BLOCK):
            token_ids = start + offsets
            tl.store(logits_ptr + token_ids, tl.zeros((BLOCK,), tl.float32), mask=token_ids < vocab_size)
        return
    temperature = tl.load(temperature_ptr + req_state)
    top_k = tl.load(top_k_ptr + req_state)
    top_p = tl.load(top_p_ptr + req_state)
    if (temperature == 0.0) | ((top_k >= vocab_size) & (top_p >= 1.0)):
        return

    block_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + offsets
        logits = tl.load(logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
        block_best = tl.maximum(block_best, logits.to(tl.float32))
    best = tl.max(block_best, axis=0)
    block_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        block_mass += _weights(logits_ptr, start + offsets, vocab_size, best, temperature)
    mass = tl.sum(block_mass, axis=0)
    tl.store(log_partition_ptr + row, best / temperature + tl.log(mass))

    threshold = tl.zeros((), tl.float32)
    if top_k < vocab_size:
        low = tl.zeros((), tl.float32)
        high = low + 1.0
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            block_count = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, vocab_size, BLOCK):
                weights = _weights(logits_ptr, start + offsets, vocab_size, best, temperature)
                block_count += (weights >= middle).to(tl.int32)
            fits = tl.sum(block_count, axis=0) <= top_k
            low = tl.where(fits, low, middle)
            high = tl.where(fits, middle, high)
        threshold = high
        block_mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            weights = _weights(logits_ptr, start + offsets, vocab_size, best, temperature)
            block_mass += tl.where(weights >= threshold, weights, 0.0)
        mass = tl.sum(block_mass, axis=0)
    if top_p < 1.0:
        low = tl.zeros((), tl.float32)
        high = low + 1.0
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            reached = tl.maximum(middle, threshold)
            block_mass = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab_size, BLOCK):
                weights = _weights(logits_ptr, start + offsets, vocab_size, best, temperature)
                block_mass += tl.where(weights >= reached, weights, 0.0)
            enough = tl.sum(block_mass, axis=0) >= top_p * mass
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        threshold = tl.maximum(threshold, low)

    for start in range(0, vocab_size, BLOCK):
        token_ids = start + offsets
        weights = _weights(logits_ptr, token_ids, vocab_size, best, temperature)
        excluded = (weights < threshold) & (token_ids < vocab_size)
        tl.store(logits_ptr + token_ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=excluded)


def keep_probable_(
    logits: torch.Tensor,  # [N, V] fp32, rows contiguous; changed in place
    is_distribution: torch.Tensor,  # [N] bool
    req_states: torch.Tensor,  # [N] int64: where the request's parameters are; negative for padding
    temperature: torch.Tensor,  # [max_num_reqs] fp32
    top_k: torch.Tensor,  # [max_num_reqs] int32, V for no limit
    top_p: torch.Tensor,  # [max_num_reqs] fp32, 1 for no limit
) -> torch.Tensor:
    """Puts -inf wherever top-k or top-p of the row's request would not reach.

    A row that is no distribution becomes all zeros. Padding rows, and those of requests
    that limit nothing or take the most probable token, stay as they are.

    Returns:
        log-sum-exp of logits / temperature over each whole row, [N] fp32; inf for
        rows that were not limited, which nobody has to sum up.
    """
    num_rows, vocab_size = logits.shape
    log_partition = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(vocab_size))
    _keep_probable_kernel[(num_rows,)](
        logits,
        log_partition,
        is_distribution,
        req_states,
        temperature,
        top_k,
        top_p,
        logits.stride(0),
        vocab_size,
        NUM_BISECTIONS=NUM_BISECTIONS,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return log_partition
