# SPDX-License-Identifier: Apache-2.0
"""Optimizer (Muon for matrices, Adam for the rest), schedule, checkpoints, progress."""

import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn


def orthogonalize(updates: Tensor) -> Tensor:  # [n, rows, cols] -> same
    """Five Newton-Schulz iterations in bf16: singular values go to about one."""
    x = updates.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    if not wide:
        x = x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, equal shapes in one batch.

    The update is scaled to the root mean square of an Adam step (0.2 times the
    square root of the longer side), so that learning rates compare with Adam's.
    """

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float):
        groups: dict[torch.Size, list[Tensor]] = {}
        for param in params:
            groups.setdefault(param.shape, []).append(param)
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__([{"params": g} for g in groups.values()], defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = group["params"]
            moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
            grads = [p.grad for p in params]
            torch._foreach_lerp_(moments, grads, 0.05)
            torch._foreach_lerp_(grads, moments, 0.95)
            update = orthogonalize(torch.stack(grads)).float()
            scale = group["lr"] * 0.2 * math.sqrt(max(params[0].shape))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind(0)), alpha=-scale)


def make_optimizers(
    module: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float = 0.1
) -> list[torch.optim.Optimizer]:
    """Muon for 2-D weights, Adam for embeddings, norms, biases and small matrices."""
    matrices, others = [], []
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        is_matrix = param.ndim == 2 and min(param.shape) >= 64 and "embed" not in name
        (matrices if is_matrix else others).append(param)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, matrix_lr, weight_decay)]
    optimizers.append(torch.optim.Adam(others, lr=other_lr, betas=(0.9, 0.95)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_lr(
    optimizers: list[torch.optim.Optimizer],
    step: int,
    steps: int,
    first: int,
    warmup: int,
    decay: float,
) -> None:
    """Linear warm-up after `first`, constant, linear to zero over the last share."""
    factor = min(1.0, (step + 1 - first) / warmup)
    if decay > 0:
        factor = min(factor, (steps - step) / (decay * steps))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def save_atomic(state: dict, path: Path) -> None:
    """torch.save through a rename: a reader sees the old file or the new one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class Checkpoint:
    """Module, optimizers and step of a running stage, on disk every few minutes."""

    def __init__(self, path: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]):
        self.path, self.module, self.optimizers = path, module, optimizers

    def load(self) -> int:
        """Restores the last saved state and returns the step to continue from."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"]

    def save(self, step: int) -> None:
        save_atomic(
            {
                "module": self.module.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "step": step,
            },
            self.path,
        )


class Progress:
    """One line every `every` steps: stage, step, losses, rate, time left."""

    def __init__(self, stage: str, start: int, steps: int, unit: str, every: int = 20):
        self.stage, self.steps, self.unit, self.every = stage, steps, unit, every
        self.last_step, self.last_time = start, time.monotonic()
        self.sums: dict[str, float] = {}
        self.amount = 0

    def update(self, step: int, amount: int, **values: float) -> None:
        """Accounts for one finished step (`step` counts from 1)."""
        self.amount += amount
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        if step % self.every and step != self.steps:
            return
        now = time.monotonic()
        count, seconds = step - self.last_step, now - self.last_time
        means = " ".join(f"{n} {v / count:.4f}" for n, v in self.sums.items())
        left = (self.steps - step) * seconds / count / 60
        print(
            f"{self.stage}: step {step}/{self.steps} {means} "
            f"{self.amount / seconds:.0f} {self.unit}/s {left:.1f} min left",
            flush=True,
        )
        self.last_step, self.last_time, self.sums, self.amount = step, now, {}, 0
