# SPDX-License-Identifier: Apache-2.0
"""Stages 5 to 8: plain DFlash, head on the frozen backbone, both jointly, baseline."""

from pathlib import Path

import torch
from blocks import Blocks
from drafter import Drafter
from losses import LiLiCorrDrafter, joint_losses, plain_losses
from optim import Checkpoint, Progress, make_optimizers, save_atomic, set_lr
from torch import Tensor, nn


def run_stage(
    name: str,
    stream: int,
    model: nn.Module,
    losses,  # batch -> dict of loss terms
    weights: dict[str, float],
    steps: int,
    decay: float,
    blocks: Blocks,
    folder: Path,
) -> None:
    """Trains `model` in place, or restores what folder/<name>.pt holds."""
    settings = blocks.settings
    done = folder / f"{name}.pt"
    if done.exists():
        model.load_state_dict(torch.load(done, weights_only=True)["module"])
        return
    optimizers = make_optimizers(
        model,
        settings.drafter_matrix_lr,
        settings.drafter_other_lr,
        settings.drafter_weight_decay,
    )
    checkpoint = Checkpoint(folder / f"{name}.checkpoint.pt", model, optimizers)
    start = checkpoint.load()
    progress = Progress(name, start, steps, "blocks")
    per_step = settings.rows_per_step * settings.anchors_per_row
    for step in range(start, steps):
        set_lr(optimizers, step, steps, 0, settings.drafter_warmup, decay)
        terms = losses(blocks.batch(stream, step))
        sum(weights[key] * value for key, value in terms.items()).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        progress.update(step + 1, per_step, **{k: v.item() for k, v in terms.items()})
        if (step + 1) % 100 == 0:
            checkpoint.save(step + 1)
    save_atomic({"module": model.state_dict()}, done)


def train_plain(folder: Path, blocks: Blocks, embedding: Tensor) -> Drafter:
    """Plain DFlash at a constant rate; both later paths branch from it."""
    settings = blocks.settings
    torch.manual_seed(settings.seed + 1)
    model = Drafter(settings, embedding)
    compile_layers(model)
    run_stage(
        "plain",
        0,
        model,
        lambda batch: plain_losses(model, batch, settings),
        {"ce": 1.0},
        settings.plain_steps,
        0.0,
        blocks,
        folder,
    )
    return model


def train_baseline(folder: Path, blocks: Blocks, plain: Drafter) -> Drafter:
    """Plain DFlash continued alone for the steps that head and joint take."""
    settings = blocks.settings
    model = Drafter(settings, plain.embedding)
    model.load_state_dict(plain.state_dict())
    compile_layers(model)
    run_stage(
        "baseline",
        1,
        model,
        lambda batch: plain_losses(model, batch, settings),
        {"ce": 1.0},
        settings.head_steps + settings.joint_steps,
        settings.drafter_decay,
        blocks,
        folder,
    )
    return model


def train_lilicorr(folder: Path, blocks: Blocks, plain: Drafter) -> LiLiCorrDrafter:
    """The head on the frozen plain backbone, then both jointly."""
    settings = blocks.settings
    torch.manual_seed(settings.seed + 2)
    model = LiLiCorrDrafter(settings, plain.embedding)
    model.backbone.load_state_dict(plain.state_dict())
    compile_layers(model.backbone)
    model.lilicorr.compile()
    weights = {
        "ce": 1.0,
        "transition": settings.transition_weight,
        "gap": settings.gap_weight,
    }
    for param in model.backbone.parameters():
        param.requires_grad_(False)
    run_stage(
        "head",
        1,
        model,
        lambda batch: joint_losses(model, batch, settings, frozen_backbone=True),
        {**weights, "ce": 0.0},
        settings.head_steps,
        0.0,
        blocks,
        folder,
    )
    for param in model.backbone.parameters():
        param.requires_grad_(True)
    run_stage(
        "joint",
        2,
        model,
        lambda batch: joint_losses(model, batch, settings, frozen_backbone=False),
        weights,
        settings.joint_steps,
        settings.drafter_decay,
        blocks,
        folder,
    )
    return model


def compile_layers(model: Drafter) -> None:
    """One graph per layer shape; the layers share it."""
    for layer in model.layers:
        layer.compile()
