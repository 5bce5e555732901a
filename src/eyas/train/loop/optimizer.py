"""Optimizers and learning-rate schedules: AdamW for all parameters, or Muon for the matrices inside the layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eyas.config import StrictModel
from eyas.machine import cpu_trains_in

Rate = Annotated[float, Field(gt=0)]

_LR = 0.6
_LOWEST_LR = 1e-4
_HIGHEST_LR = 1e-3
_MATRIX_LR, _HIGHEST_MATRIX_LR = 23.0, 0.08
"""`auto` rates times the width. Measured at 256 (0.08 for matrices) and at 576 (0.04, and 1e-3 for the rest); at 4,096
wide that gives 0.0056, between speculators' 0.001 and Keller Jordan's 0.02, and 1.5e-4, near the published 1e-4."""


class OptimizerConfig(StrictModel):
    """Settings of the optimizer: `lr` is AdamW's learning rate, `matrix_lr` is Muon's with `kind: muon`."""

    kind: Literal["adamw", "muon", "auto"] = "adamw"  # auto: Muon, but AdamW under fsdp, which shards matrices
    lr: Rate | Literal["auto"] = 1e-3  # auto, here and below: decreases with the target's width
    matrix_lr: Rate | Literal["auto"] = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)

    def resolved(self, width: int, sharded: bool) -> ResolvedOptimizer:
        """Resolve `auto` settings for a model of hidden size `width`, whose matrices are `sharded` or whole."""
        kind = self.kind if self.kind != "auto" else "adamw" if sharded else "muon"
        highest = _LOWEST_LR if kind == "adamw" else _HIGHEST_LR  # AdamW's published rate is for matrices too
        lr = min(max(_LR / width, _LOWEST_LR), highest)
        matrix_lr = min(_MATRIX_LR / width, _HIGHEST_MATRIX_LR)
        found = {"lr": lr, "matrix_lr": matrix_lr}
        rates = {name: float(f"{rate:.2g}") for name, rate in found.items() if getattr(self, name) == "auto"}
        return ResolvedOptimizer.model_validate(self.model_dump() | {"kind": kind} | rates)


class ResolvedOptimizer(OptimizerConfig):
    """The settings of the optimizer with `auto` values resolved."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Rate = 1e-3
    matrix_lr: Rate = 0.02


def build_optimizers(model: nn.Module, config: ResolvedOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a model: AdamW for all parameters, or Muon for matrices other than embeddings and heads."""
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
    # norm scales and biases are not decayed
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, foreach=True)
    ]
    if matrices:
        optimizers.append(
            Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, momentum=config.betas[1])
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set the learning rate of every group to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


class Muon(torch.optim.Muon):
    """torch's Muon, with orthogonalization in float32 on devices without bfloat16 kernels, and batched small matrices.

    torch always uses bfloat16, which on a CPU without kernels for it is about 40 times slower than float32. The update
    rule, its defaults and the state are torch's (https://kellerjordan.github.io/posts/muon/), so the two can load each
    other's states.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in _batches([p for p in group["params"] if p.grad is not None]):
                self._update(weights, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update weights that all have the shape [m, n]."""
        momentum, lr = group["momentum"], group["lr"]
        updates = []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight.grad, memory_format=torch.preserve_format)
            average = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
            updates.append(weight.grad.lerp(average, momentum) if group["nesterov"] else average)
        rows, columns = weights[0].shape
        directions = orthogonalized(
            torch.stack(updates) if len(updates) > 1 else updates[0],
            group["ns_coefficients"], group["ns_steps"], group["eps"],
            torch.bfloat16 if computes_in_bf16(weights[0].device) else torch.float32,
        ).view(-1, rows, columns)  # fmt: skip
        ratio = math.sqrt(max(1.0, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        for weight, direction in zip(weights, directions, strict=True):
            weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr * ratio)


_BATCHED = 2**18
"""Elements up to which a CPU orthogonalizes matrices of one shape as a batch; a larger one uses all cores by itself."""


def _batches(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group small weights by shape, dtype and device; large weights are groups of their own."""
    small = defaultdict(list)
    for weight in weights:
        if weight.device.type == "cpu" and weight.numel() > _BATCHED:
            yield [weight]
        else:
            small[weight.shape, weight.dtype, weight.device].append(weight)
    yield from small.values()


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Bring the singular values of matrices [..., m, n] near 1 with the quintic Newton-Schulz iteration in `dtype`.

    See Keller Jordan et al. 2024. The coefficients are meant to leave singular values between about 0.5 and 1.5.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    # contiguous, and not a batch of one: bfloat16 products of other layouts copy their inputs each time
    x: Tensor = (matrices.mT if tall else matrices).to(dtype).contiguous()  # [..., small, large]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # no singular value exceeds 1
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def computes_in_bf16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices at least as fast as float32 ones; measured on CPUs."""
    return device.type != "cpu" or cpu_trains_in(torch.bfloat16)


class ScheduleConfig(StrictModel):
    """The learning rate over time, as a factor of its peak.

    After a linear warm-up: a cosine to `floor`, or a plateau and a linear decay to `floor` (`wsd`), or constant.
    """

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    warmup: float = Field(default=0.02, ge=0, le=1)  # share of all steps
    decay: float = Field(default=0.4, ge=0, le=1)  # share of all steps; only for wsd
    floor: float = Field(default=0.0, ge=0, le=1)


def schedule_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor of the learning rate in step `step` of `steps`, counted from 0."""
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
