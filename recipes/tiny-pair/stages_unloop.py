# SPDX-License-Identifier: Apache-2.0
"""Stage 3: unlikelihood training of the target against loops in its greedy text.

Sequence-level unlikelihood (Welleck et al., 2019): in the target's own greedy
rollouts, the last token of every n-gram that was generated before gets the loss
-log(1 - p); rows of real text in the same batch keep the language model.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import sample_windows
from optim import Checkpoint, Progress, make_optimizers, save_atomic, set_lr
from rollouts import distinct_ratio, generate, repeated, serving_copy
from settings import Settings
from target import Target
from torch import Tensor


def greedy_rows(target: Target, stream: np.ndarray, round_index: int) -> Tensor:
    """Fresh greedy rollouts [rows of a round, unloop_length] on training prompts."""
    s = target.settings
    rng = np.random.default_rng((s.seed, 5, round_index))
    rows = s.unloop_rows * s.unloop_steps_per_round
    prompts = sample_windows(stream, rows, s.unloop_prompt_tokens, rng)
    shard = generate(
        serving_copy(target),
        torch.from_numpy(prompts),
        s.unloop_length - s.unloop_prompt_tokens,
        torch.zeros(rows, dtype=torch.bool),
        torch.Generator(),
    )
    ratio = distinct_ratio(shard, 128)
    print(f"unloop: round {round_index} distinct 4-grams {ratio:.3f}", flush=True)
    return shard["tokens"].long()


def losses(target: Target, real: Tensor, own: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of real text and unlikelihood of the marked tokens, [B, T] each."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target.logits(target(torch.cat([real, own])[:, :-1])).float()
    real_logits, own_logits = logits.chunk(2)
    ce = F.cross_entropy(real_logits.flatten(0, 1), real[:, 1:].flatten())
    log_p = -F.cross_entropy(own_logits.mT, own[:, 1:], reduction="none")
    unlikely = -torch.log1p(-log_p.exp().clamp_max(1 - 1e-4))
    marks = marks[:, 1:].float()
    return ce, (unlikely * marks).sum() / marks.sum().clamp_min(1.0)


def train_unloop(folder: Path, corpus: Path, target: Target) -> None:
    """Trains `target` in place, or restores folder/unloop.pt."""
    s: Settings = target.settings
    done = folder / "unloop.pt"
    if done.exists():
        target.load_state_dict(torch.load(done, weights_only=True)["module"])
        return
    optimizers = make_optimizers(target, s.unloop_matrix_lr, s.unloop_other_lr)
    checkpoint = Checkpoint(folder / "unloop.checkpoint.pt", target, optimizers)
    start, steps = checkpoint.load(), s.unloop_steps
    for layer in target.layers:
        layer.compile()
    stream = np.load(corpus / "train.npy")
    progress = Progress("unloop", start, steps, "tokens", every=4)
    for step in range(start, steps):
        turn = step % s.unloop_steps_per_round
        if turn == 0:
            checkpoint.save(step)
            pool = greedy_rows(target, stream, step // s.unloop_steps_per_round)
            marks = repeated(pool, s.unloop_prompt_tokens, s.unloop_ngram)
        rng = np.random.default_rng((s.seed, 6, step))
        real = sample_windows(stream, s.unloop_rows, s.unloop_length, rng)
        rows = slice(turn * s.unloop_rows, (turn + 1) * s.unloop_rows)
        set_lr(optimizers, step, steps, 0, 8, 0.5)
        ce, unlikely = losses(target, torch.from_numpy(real), pool[rows], marks[rows])
        (ce + s.unloop_weight * unlikely).backward()
        for optimizer in optimizers:
            optimizer.step()
        target.zero_grad()
        progress.update(
            step + 1,
            2 * real.size,
            loss=ce.item(),
            unlikely=unlikely.item(),
            marked=marks[rows].float().mean().item(),
        )
    save_atomic({"module": target.state_dict()}, done)
