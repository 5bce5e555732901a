"""Which optimizer moves which parameter: AdamW for all, or Muon for the matrices inside the layers."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from eyas.config import StrictModel


class OptimizerConfig(StrictModel):
    """`lr` drives AdamW; `matrix_lr` drives Muon and is read only when `kind` is `muon`."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    matrix_lr: float = Field(default=0.02, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One optimizer, or two with Muon. Vectors, embeddings and heads stay with AdamW."""
    outer = {
        id(weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.endswith("lm_head")
        for weight in module.parameters(recurse=False)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if config.kind == "muon" and p.ndim == 2 and id(p) not in outer]
    inner = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in inner]
    # Norm scales and biases are not decayed: pulling them to zero changes the function, not its size.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, foreach=True)
    ]
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, momentum=config.betas[1])
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's peak learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


# The learning rate over a run, as a factor of its peak.


class ScheduleConfig(StrictModel):
    """Linear warm-up, then cosine to `floor`, or a plateau and a linear decay to `floor` (`wsd`)."""

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    warmup: float = Field(default=0.02, ge=0, le=1)  # share of all steps
    decay: float = Field(default=0.4, ge=0, le=1)  # share of all steps; read by wsd only
    floor: float = Field(default=0.0, ge=0, le=1)


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor for zero-based `step` of `steps`."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = max(1, math.ceil(config.decay * steps))
    left = min(1.0, (steps - step) / decay)
    return config.floor + (1 - config.floor) * left
