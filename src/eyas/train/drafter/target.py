"""A run's target: loaded as far as the run needs it, on this process or sharded over all.

A target larger than a device is sharded with FSDP2: each process holds a share of every decoder layer. The target is
frozen and runs forward only. Embedding, final norm and head stay whole in every process, since the loss and the drafter
read them outside of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.fsdp import fully_shard

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.errors import ConfigError
from eyas.hub import ModelFiles
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import keep_fingerprints
from eyas.targets.loading import load_embedding_and_head, read_config
from eyas.targets.passes import EmbeddingAndHead
from eyas.targets.quantization import quantized_by
from eyas.train.loop.distributed import ProcessGroup


def load_run_target(files: ModelFiles, dtype: str, processes: ProcessGroup, *, whole: bool) -> RunTarget:
    """Load a run's target; all of it, on this process or sharded, if any process needs the `whole` target.

    Otherwise only its embedding and head. Raises ConfigError if a quantized target would have to be sharded.
    """
    if not whole:
        return RunTarget(load_embedding_and_head(files, dtype=dtype, device=processes.device))
    if processes.mode != "fsdp":
        eager = processes.device.type == "cuda"  # CUDA graphs don't help with whole chats
        return RunTarget(load_target(files, dtype=dtype, device=processes.device, eager=eager))
    method = quantized_by(read_config(files))
    if method is not None:
        raise ConfigError(
            f"{files} is quantized by {method}, and fsdp can't shard quantized weights: set loop.parallel to "
            "ddp, where every process holds the whole target"
        )
    return RunTarget.sharded(partial(load_target, files, dtype=dtype, device="cpu", prepacked=False), processes)


class RunTarget:
    """A target and the processes that run its passes together: all of the run if it is sharded, else only this one."""

    def __init__(self, target: EmbeddingAndHead, processes: ProcessGroup | None = None) -> None:
        """`target` is a `Target` if the run needs passes. `processes` share its layers; None = it isn't sharded."""
        self.target = target
        self.is_sharded = processes is not None
        self.processes = ProcessGroup(0, 1, target.device, "none") if processes is None else processes

    @property
    def whole(self) -> Target:
        """The whole target, which every run that traces or decodes has loaded."""
        assert isinstance(self.target, Target)
        return self.target

    @classmethod
    def sharded(cls, load: Callable[[], Target], processes: ProcessGroup) -> RunTarget:
        """Shard the layers of the target that `load` returns, on the CPU and without prepacked linears.

        All processes must call this. The processes of a machine load in turn, so its memory needs room for only one
        target in addition to the shards. A layer is whole on a device only while it is being sharded.
        """
        mesh = processes.mesh
        with processes.in_turn():
            target = load()
            keep_fingerprints(target.model, target.layers)
            for layer in target.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            target.model.to(processes.device)
            # the root has no shards of its own; it holds the layers' streams and gathered weights
            fully_shard(target.model.base_model, mesh=mesh, ignored_params=set(target.model.parameters()))
            target.device = processes.device
        made = cls(target, processes)
        made._pass_over_one_token()  # now, since weights first gathered in inference mode can't be used outside of it
        return made

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let every process run as many passes in the block as it needs to. All processes must enter it.

        Every pass gathers weights from all processes. So a process announces each pass, and processes that have left
        the block join with a pass over one token, until no process begins another. The number of passes depends on a
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
        """Keep the passes of `source` in step with the other processes, which must request a batch as well."""

        def batch(number: int) -> FeatureBatch:
            with self.in_step():
                return source(number)

        return batch

    def _any_runs(self, this_one: bool) -> bool:
        """Whether any process begins a pass; `this_one`: whether this process does."""
        return self.processes.all_sum(this_one) > 0

    def _pass_over_one_token(self) -> None:
        one = torch.ones(1, dtype=torch.int64, device=self.target.device)
        self.whole.trace(one.unsqueeze(0), one, ())
