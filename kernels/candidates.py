# SPDX-License-Identifier: Apache-2.0
"""The best K tokens of each row of logits and the log-sum-exp over the vocabulary, in one reading.

    key(v) = (order(logits[n, v]), -v)         so that ties go to the lower id
    keys[n, p, :] = the K largest keys of part p of the vocabulary
    partitions[n, p] = log sum exp(logits[n, v]) over part p

A row is split over programs so that a single request fills the chip; `merge_parts` joins
the parts of one rank, or of all ranks of a tensor-parallel group, exactly: a key carries
the fp32 value and the token's id in the whole vocabulary. No fp32 copy of the logits, no
sorted row and no masked copy is ever written. A block of logits whose best key does not
reach the K kept so far costs one reduction; the K keys change some K * log(blocks) times.

A logit that is not a number ranks last and counts for nothing, like minus infinity.
"""

import torch
import triton
import triton.language as tl

# Below the key of every logit, minus infinity included.
NO_KEY = tl.constexpr(-(2**63))
MAX_TOP_K = 16
# Programs that a launch aims at, and logits that one of them reads at a time.
NUM_PROGRAMS = 512
BLOCK = 2048


@triton.jit
def logit_keys(logits, token_ids, is_token):
    """int64 keys in the order of (logit, lower id); NO_KEY for what is no token."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # one zero, not two
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(is_token, (order << 32) | (0x7FFFFFFF - token_ids).to(tl.int64), NO_KEY)


@triton.jit
def key_values(keys):
    """The fp32 logits in keys."""
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def key_ids(keys):
    """The int64 token ids in keys."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@triton.jit
def _partial_candidates_kernel(
    keys_ptr,
    partitions_ptr,
    logits_ptr,
    logits_stride,
    vocab_size,
    first_id,
    part_size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    logits_ptr += row * logits_stride
    offsets = tl.arange(0, BLOCK)
    ranks = tl.arange(0, TOP_K)
    # Unequal placeholders below every key: one of them is replaced at a time.
    kept = NO_KEY + 1 + ranks.to(tl.int64)
    worst = tl.min(kept, axis=0)
    best = tl.full((), float("-inf"), tl.float32)
    block_mass = tl.zeros((BLOCK,), tl.float32)
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocab_size)
    for start in range(begin, end, BLOCK):
        columns = start + offsets
        is_token = columns < end
        logits = tl.load(logits_ptr + columns, mask=is_token, other=float("-inf")).to(tl.float32)
        logits = tl.where(logits == logits, logits, float("-inf"))
        keys = logit_keys(logits, first_id + columns, is_token)
        block_key = tl.max(keys, axis=0)
        higher = tl.maximum(best, key_values(block_key))
        # Minus infinity less itself is not a number: until a finite logit is met, the reference is 0.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        block_mass = block_mass * tl.exp(best - reference) + tl.exp(logits - reference)
        best = higher
        while block_key > worst:
            kept = tl.where(kept == worst, block_key, kept)
            worst = tl.min(kept, axis=0)
            keys = tl.where(keys == block_key, NO_KEY, keys)
            block_key = tl.max(keys, axis=0)
    mass = tl.sum(block_mass, axis=0)
    reference = tl.where(best == float("-inf"), 0.0, best)
    tl.store(partitions_ptr + row * num_parts + part, reference + tl.log(mass))
    tl.store(keys_ptr + (row * num_parts + part) * TOP_K + ranks, kept)


@triton.jit
def merge_row(
    keys_ptr,
    partitions_ptr,
    row,
    num_parts,
    impossible,
    BLOCK_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Joins the parts of one row: its best token ids [TOP_K] int64 and their log-probabilities [TOP_K] fp32."""
    parts = tl.arange(0, BLOCK_PARTS)
    partitions = tl.load(partitions_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    best = tl.max(partitions, axis=0)
    reference = tl.where(best == float("-inf"), 0.0, best)
    log_partition = reference + tl.log(tl.sum(tl.exp(partitions - reference), axis=0))
    entries = tl.arange(0, BLOCK_PARTS * TOP_K)
    keys = tl.load(keys_ptr + row * num_parts * TOP_K + entries, mask=entries < num_parts * TOP_K, other=NO_KEY)
    ranks = tl.arange(0, TOP_K)
    chosen = tl.full((TOP_K,), NO_KEY, tl.int64)
    for rank in range(TOP_K):
        key = tl.max(keys, axis=0)
        chosen = tl.where(ranks == rank, key, chosen)
        keys = tl.where(keys == key, NO_KEY, keys)
    log_probs = key_values(chosen) - log_partition
    # False for what is not a number too.
    log_probs = tl.where(log_probs >= impossible, log_probs, impossible)
    return key_ids(chosen), log_probs


@triton.jit
def _merge_parts_kernel(
    candidate_ids_ptr,
    log_probs_ptr,
    keys_ptr,
    partitions_ptr,
    num_parts,
    impossible,
    BLOCK_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, TOP_K)
    ids, log_probs = merge_row(keys_ptr, partitions_ptr, row, num_parts, impossible, BLOCK_PARTS, TOP_K)
    tl.store(candidate_ids_ptr + row * TOP_K + ranks, ids)
    tl.store(log_probs_ptr + row * TOP_K + ranks, log_probs)


def parts_of(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Into how many parts a row is split, and the logits in each; from shapes alone."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    wanted = min(blocks, 64, max(1, NUM_PROGRAMS // max(num_rows, 1)))
    part_size = triton.cdiv(blocks, wanted) * BLOCK
    return triton.cdiv(vocab_size, part_size), part_size


@torch.library.custom_op("lilicorr::partial_candidates", mutates_args=())
def partial_candidates(logits: torch.Tensor, top_k: int, num_padding: int, first_id: int) -> list[torch.Tensor]:
    """The best entries of one rank's logits, ready to merge with its other parts and other ranks'.

    Args:
        logits: [N, V] bf16, fp16 or fp32, rows contiguous; only read.
        top_k: K, a power of two up to 16.
        num_padding: this many last columns count for nothing.
        first_id: token id of column 0.

    Returns:
        keys [N, parts, K] int64 in no order, and the log-sum-exp of each part [N, parts] fp32.
        Ranks' results are joined along the parts.
    """
    num_rows, width = logits.shape
    vocab_size = width - num_padding
    _check_top_k(top_k, vocab_size)
    num_parts, part_size = parts_of(num_rows, vocab_size)
    keys = logits.new_empty((num_rows, num_parts, top_k), dtype=torch.int64)
    partitions = logits.new_empty((num_rows, num_parts), dtype=torch.float32)
    if num_rows:
        _partial_candidates_kernel[(num_rows, num_parts)](
            keys,
            partitions,
            logits,
            logits.stride(0),
            vocab_size,
            first_id,
            part_size,
            TOP_K=top_k,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return [keys, partitions]


@partial_candidates.register_fake
def _(logits: torch.Tensor, top_k: int, num_padding: int, first_id: int) -> list[torch.Tensor]:
    num_rows, width = logits.shape
    num_parts, _ = parts_of(num_rows, width - num_padding)
    return [
        logits.new_empty((num_rows, num_parts, top_k), dtype=torch.int64),
        logits.new_empty((num_rows, num_parts), dtype=torch.float32),
    ]


@torch.library.custom_op("lilicorr::merge_parts", mutates_args=())
def merge_parts(keys: torch.Tensor, partitions: torch.Tensor, impossible: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins the parts of each row.

    Args:
        keys: [N, parts, K] int64 of `partial_candidates`, from one rank or from all.
        partitions: [N, parts] fp32.
        impossible: finite log-probability of a candidate that has none.

    Returns:
        Ids [N, K] int64, best first, and their log-probabilities [N, K] fp32 over the whole vocabulary.
    """
    num_rows, num_parts, top_k = keys.shape
    ids = torch.empty_like(keys[:, 0], memory_format=torch.contiguous_format)
    log_probs = partitions.new_empty((num_rows, top_k))
    if num_rows:
        _merge_parts_kernel[(num_rows,)](
            ids,
            log_probs,
            keys.contiguous(),
            partitions.contiguous(),
            num_parts,
            impossible,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            TOP_K=top_k,
            num_warps=4,
        )
    return ids, log_probs


@merge_parts.register_fake
def _(keys: torch.Tensor, partitions: torch.Tensor, impossible: float) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, _, top_k = keys.shape
    return keys.new_empty((num_rows, top_k)), partitions.new_empty((num_rows, top_k))


def _check_top_k(top_k: int, vocab_size: int) -> None:
    if not (1 <= top_k <= min(MAX_TOP_K, vocab_size) and top_k & (top_k - 1) == 0):
        raise ValueError(
            f"top_k={top_k} of {vocab_size} tokens: it must be a power of two from 1 to {MAX_TOP_K} and no more than "
            "there are tokens; use 8, what published drafters are trained with."
        )
