"""A run's target, and FSDP2 for one that is larger than a device: each process holds a share of every decoder layer.

The target is frozen and runs forward only. Embedding, final norm and head stay whole in every process, since the loss
and the drafter read them outside of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import fully_shard

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.targets import Target
from eyas.targets.fingerprint import keep_fingerprints
from eyas.train.loop.distributed import ProcessGroup


class RunTarget:
    """A target and the processes that run its passes together: all of the run if it is sharded, else this one alone."""

    def __init__(self, target: Target, processes: ProcessGroup | None = None) -> None:
        """`processes` share the layers of a sharded `target`; None: it is not sharded."""
        self.target, self.is_sharded = target, processes is not None
        self.processes = ProcessGroup(0, 1, target.device, "none") if processes is None else processes

    @classmethod
    def sharded(cls, load: Callable[[], Target], processes: ProcessGroup) -> RunTarget:
        """Shard the layers of the target that `load` gives, on the CPU and without prepacked linears.

        All processes must call this. Those of a machine load one after the other, so that its memory needs room for one
        target besides the shards; a layer is whole on a device only while it is cut.
        """
        mesh = processes.mesh
        with processes.in_turn():
            target = load()
            keep_fingerprints(target.model, target.layers)
            for layer in target.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            target.model.to(processes.device)
            # the root has no shards of its own: it is what the layers' streams and gathered weights are kept in
            fully_shard(target.model.base_model, mesh=mesh, ignored_params=set(target.model.parameters()))
            target.device = processes.device
        made = cls(target, processes)
        made._pass_over_one_token()  # here, since weights gathered first in inference mode can't be used outside of it
        return made

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let every process run as many passes in the block as it needs to. All processes must enter it.

        Every pass gathers weights from all processes. So each one says that it begins a pass, and those that have left
        the block join it with a pass over one token, until none begins another. How many passes there are depends on a
        process's data: chats in chunks or segments, rows that a store lacks, prompts to decode.
        """
        if not self.is_sharded:
            yield
            return

        def begins(*_: object) -> None:
            self._any_runs(True)

        handle = self.target.model.base_model.register_forward_pre_hook(begins)
        try:
            yield
        finally:
            handle.remove()
        while self._any_runs(False):
            self._pass_over_one_token()

    def in_step_with(self, source: FeatureSource) -> FeatureSource:
        """`source` with its passes in step with those of the other processes, which must ask for a batch as well."""

        def batch(number: int) -> FeatureBatch:
            with self.in_step():
                return source(number)

        return batch

    def _any_runs(self, this_one: bool) -> bool:
        """Whether any process begins a pass; `this_one` says whether this one does."""
        return self.processes.all_sum(this_one) > 0

    def _pass_over_one_token(self) -> None:
        one = torch.ones(1, dtype=torch.int64, device=self.target.device)
        self.target.trace(one.unsqueeze(0), one, ())
