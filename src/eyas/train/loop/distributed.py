"""The processes of one run: one, or as many as torchrun started, with DDP or FSDP2 between them.

A step's micro-batches are dealt out to the processes; the gradient is the sum over all of them divided by the
weight of all of them, so a run doesn't depend on how many processes share it (but for rounding).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from eyas.errors import ConfigError

Parallel = Literal["auto", "none", "ddp", "fsdp"]

_PATIENCE = timedelta(hours=2)
"""How long processes wait for each other: rank 0 decodes and writes while the others wait."""


class Team:
    """This process among the processes of its run. `mode` is none, ddp or fsdp."""

    def __init__(self, rank: int, world: int, device: torch.device, mode: str) -> None:
        self.rank, self.world, self.device, self.mode = rank, world, device, mode
        self._wrapped: nn.Module | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks to the console."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """What to call instead of `module`, so that gradients meet. Its parameters become shards under FSDP.

        One group of shards holds everything: a drafter is about one layer, gathered once a step.
        """
        if self.mode == "ddp":
            trains = any(p.requires_grad for p in module.parameters())
            module = DistributedDataParallel(module, broadcast_buffers=False) if trains else module
        elif self.mode == "fsdp":
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.world,)))
        self._wrapped = module
        return module

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients meet in the last one of a step."""
        if isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(last)
        elif isinstance(self._wrapped, DistributedDataParallel) and not last:
            return self._wrapped.no_sync()
        return nullcontext()

    def total(self, value: float) -> float:
        """The sum of `value` over all processes."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.item()

    def gathered(self, value: Any) -> list[Any]:
        """Every process's `value`, in order of rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


@contextmanager
def joined(parallel: Parallel, device: torch.device) -> Iterator[Team]:
    """Join the processes torchrun started, or be alone. ConfigError when `parallel` doesn't fit how we were started.

    A process group that is there already is used and left as it is.
    """
    joining = not dist.is_initialized()
    world = int(os.environ.get("WORLD_SIZE", "0")) if joining else dist.get_world_size()
    if not world:
        if parallel in ("ddp", "fsdp"):
            raise ConfigError(
                f"loop.parallel is {parallel}, but there is one process: start it with "
                "`torchrun --nproc-per-node N -m eyas train RECIPE`, or set loop.parallel to none"
            )
        yield Team(0, 1, device, "none")
        return
    if parallel == "none" and world > 1:
        raise ConfigError(f"torchrun started {world} processes, but loop.parallel is none: set it to ddp or fsdp")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if joining:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        mode = "ddp" if parallel == "auto" else parallel
        yield Team(dist.get_rank(), dist.get_world_size(), device, mode)
    finally:
        if joining:
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard (all processes must ask); other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """The full `tensor`, cut as `model` is: this process's shard where that is one."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
