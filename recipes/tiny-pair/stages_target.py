# SPDX-License-Identifier: Apache-2.0
"""Stage 2: language-model training of the target, first at half its depth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import sample_windows
from optim import Checkpoint, Progress, make_optimizers, save_atomic, set_lr
from settings import Settings
from target import Target


def sequence_length(step: int, settings: Settings) -> int:
    """256 tokens at half depth; then 512, and every fourth step 1024."""
    if step < settings.target_shallow_steps:
        return 256
    return 1024 if step % 4 == 3 else 512


def cross_entropy(target: Target, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of windows [B, T + 1] under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target.logits(target(windows[:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def deepen(shallow: Target, settings: Settings) -> Target:
    """Every layer becomes two that each add half of its output.

    x + f(x)/2 + f(x + f(x)/2)/2 is close to x + f(x): the deep model starts near
    the shallow one's loss, which took half the time to reach.
    """
    deep = Target(settings)
    state = {}
    for name, value in shallow.state_dict().items():
        if not name.startswith("layers."):
            state[name] = value
            continue
        _, index, rest = name.split(".", 2)
        half = value / 2 if "o_proj" in rest or "down_proj" in rest else value
        for copy in range(2):
            state[f"layers.{2 * int(index) + copy}.{rest}"] = half
    deep.load_state_dict(state)
    return deep


def train_target(folder: Path, corpus: Path, settings: Settings) -> Target:
    """Returns the trained target in fp32; folder/target.pt keeps it."""
    torch.manual_seed(settings.seed)
    half = replace(settings, num_layers=settings.num_layers // 2)
    steps, middle = settings.target_steps, settings.target_shallow_steps
    data = Windows(corpus, settings)
    shallow = Target(half)
    run_steps("shallow", shallow, 0, middle, data, folder)
    target = deepen(shallow, settings)
    run_steps("target", target, middle, steps, data, folder)
    return target


class Windows:
    """Training windows that depend on the step alone, and fixed held-out ones."""

    def __init__(self, corpus: Path, settings: Settings):
        self.settings = settings
        self.train = np.load(corpus / "train.npy")
        rng = np.random.default_rng(settings.seed)
        fixed = sample_windows(np.load(corpus / "held_out.npy"), 32, 257, rng)
        self.held_out = torch.from_numpy(fixed)

    def batch(self, step: int) -> torch.Tensor:
        """[B, T + 1] int64; the number of tokens is the same at every step."""
        s = self.settings
        length = sequence_length(step, s)
        count = s.target_tokens_per_step // length
        rng = np.random.default_rng((s.seed, 1, step))
        return torch.from_numpy(sample_windows(self.train, count, length + 1, rng))


def run_steps(name: str, target: Target, first: int, last: int, data: Windows, folder: Path) -> None:
    """Trains in place from step `first` to `last`, or restores folder/<name>.pt."""
    done = folder / f"{name}.pt"
    if done.exists():
        target.load_state_dict(torch.load(done, weights_only=True)["module"])
        return
    s = data.settings
    optimizers = make_optimizers(target, s.target_matrix_lr, s.target_other_lr)
    checkpoint = Checkpoint(folder / f"{name}.checkpoint.pt", target, optimizers)
    start = max(first, checkpoint.load())
    for layer in target.layers:
        layer.compile()
    progress = Progress(name, start, last, "tokens")
    for step in range(start, last):
        windows = data.batch(step)
        set_lr(optimizers, step, s.target_steps, first, s.target_warmup, s.target_decay)
        loss = cross_entropy(target, windows)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        target.zero_grad()
        progress.update(step + 1, windows.numel(), loss=loss.item())
        if (step + 1) % 100 == 0 or step + 1 == last:
            with torch.no_grad():
                value = cross_entropy(target, data.held_out).item()
            print(f"{name}: step {step + 1} held-out loss {value:.4f}", flush=True)
        if (step + 1) % 25 == 0:
            checkpoint.save(step + 1)
    save_atomic({"module": target.state_dict()}, done)
