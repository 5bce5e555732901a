"""The processes of a run: a single one, or those that torchrun started, with DDP or FSDP2.

The micro-batches of a step are divided among the processes. The gradient is the sum over all micro-batches divided by
their total weight, so up to rounding a run doesn't depend on the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from eyas.errors import ConfigError, TrainingError

Parallel = Literal["auto", "none", "ddp", "fsdp"]

_PATIENCE = timedelta(hours=2)
"""How long processes wait for rank 0, which decodes and writes files during validations."""


class ProcessGroup:
    """The processes of a run as this one sees them; `mode` is none, ddp or fsdp."""

    def __init__(self, rank: int, world_size: int, device: torch.device, mode: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.mode = mode
        self._wrapped: nn.Module | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and to the console."""
        return self.rank == 0

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes in one dimension, over which parameters are sharded. All processes must access it."""
        return init_device_mesh(self.device.type, (self.world_size,))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block in one process at a time on each machine. All processes must enter it."""
        own = int(os.environ.get("LOCAL_RANK", "0"))
        turns = max(self.all_gather(own)) + 1
        for _ in range(own):
            self.all_gather(None)
        yield
        for _ in range(own, turns):
            self.all_gather(None)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap `module` so that gradients are reduced over the processes; call the result instead of `module`.

        Under FSDP its parameters become shards, all in one group, since a drafter has about one layer.
        """
        if self.mode == "ddp":
            trains = any(p.requires_grad for p in module.parameters())
            module = DistributedDataParallel(module, broadcast_buffers=False) if trains else module
        elif self.mode == "fsdp":
            fully_shard(module, mesh=self.mesh)
        self._wrapped = module
        return module

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of a micro-batch; gradients are reduced in the `last` one of a step."""
        if isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(last)
        elif isinstance(self._wrapped, DistributedDataParallel) and not last:
            return self._wrapped.no_sync()
        return nullcontext()

    def all_sum(self, value: float) -> float:
        """The sum of `value` over all processes."""
        if self.world_size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.item()

    def all_gather(self, value: Any) -> list[Any]:
        """The `value` of every process, in order of rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found


@contextmanager
def join_processes(parallel: Parallel, device: torch.device) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started; without torchrun, the group is this process alone.

    If torch.distributed is already initialized, it is used and not torn down. Raises ConfigError if `parallel` doesn't
    fit the number of processes, TrainingError if another process ends or is unreachable.
    """
    joining = not dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE", "0")) if joining else dist.get_world_size()
    if not world_size:
        if parallel in ("ddp", "fsdp"):
            raise ConfigError(
                f"loop.parallel is {parallel}, but there is one process: start it with "
                "`torchrun --nproc-per-node N -m eyas train RECIPE`, or set loop.parallel to none"
            )
        yield ProcessGroup(0, 1, device, "none")
        return
    if parallel == "none" and world_size > 1:
        raise ConfigError(f"torchrun started {world_size} processes, but loop.parallel is none: set it to ddp or fsdp")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if joining:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        mode = "ddp" if parallel == "auto" else parallel
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), device, mode)
    except RuntimeError as error:
        if not (joining and _lost(error)):
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(1) from error  # the first process of this machine reports it
        reason = str(error).strip().splitlines()[0][:200]
        raise TrainingError(
            f"another process of this run has ended or is out of reach ({reason}). The last saved state is complete: "
            "start the same command again on all machines to resume from there"
        ) from error
    finally:
        if joining:
            dist.destroy_process_group()


def _lost(error: RuntimeError) -> bool:
    """Whether an error means that another process is gone; gloo has no exception of its own."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor (all processes must call this); tensors that aren't sharded are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, model: Tensor) -> Tensor:
    """This process's shard of `tensor`, sharded in the same way as `model`; all of it if `model` isn't sharded."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
