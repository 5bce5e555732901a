"""A run's target, and validation on held-out chats: teacher-forced scores, and decoding of prompts.

Decoding runs the engine with a copy of the drafter in the dtype of its checkpoint, as it will be served; the network
in training is not changed.

A target larger than a device is sharded with FSDP2: each process holds a share of every decoder layer. The target is
frozen and runs forward only. Embedding, final norm and head stay whole in every process, since the loss and the drafter
read them outside of passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch.distributed.fsdp import fully_shard

from eyas.config import StrictModel
from eyas.data.chats.folder import prompt_of, spread
from eyas.data.features import FeatureBatch, FeatureSource
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork
from eyas.engine import Engine, Speculation
from eyas.engine.default_tree import tree_for
from eyas.errors import DataError
from eyas.targets import Target
from eyas.targets.fingerprint import keep_fingerprints
from eyas.targets.passes import EmbeddingAndHead
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.log import Advance, Means, MicroBatchLoss
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats


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


class ValidationConfig(StrictModel):
    """How much is scored and decoded every `loop.validate_every` steps."""

    batches: int = Field(default=4, gt=0)  # batches scored with teacher forcing
    decode: bool = True  # if false, the target isn't loaded, and `best` is chosen by the simulated accept length
    prompts: int = Field(default=8, gt=0)
    max_tokens: int = Field(default=96, gt=0)
    batch_size: int = Field(default=8, gt=0)  # prompts decoded together
    tree: str | None = None  # None: the drafter's own default


def scored(
    score: Callable[[FeatureBatch], MicroBatchLoss],
    source: FeatureSource,
    count: int,
    processes: ProcessGroup,
    advance: Advance,
) -> dict[str, float]:
    """Mean metrics over batches 0 to count - 1, divided among the processes.

    All processes score the same number of batches, as FSDP requires. A process that has no batch left scores another
    one, which isn't counted.
    """
    means = Means()
    with torch.no_grad():
        for number in range(
            processes.rank, -(-count // processes.world_size) * processes.world_size, processes.world_size
        ):
            advance("scoring", min(number, count), count)
            part = score(source(number % count))
            if number < count:
                means.add_micro_batch(part)
    return Means.merged(processes.all_gather(dict(means.sums))).means()


class HeldOutDecoding:
    """Decodes the same held-out prompts greedily at every validation.

    The processes that share a sharded target divide the prompts.
    """

    def __init__(self, target: RunTarget, tokenizer: Any, rows: Sequence[TokenRow], config: ValidationConfig) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._config = config
        longest, processes = target.target.max_length, target.processes
        prompts = choose_prompts(rows, config.prompts, None if longest is None else longest - 1)
        params = SamplingParams(max_tokens=config.max_tokens)
        self._requests = [Request(ids, params, chat=True) for ids in prompts[processes.rank :: processes.world_size]]

    def __call__(self, network: DraftNetwork, advance: Advance) -> Stats:
        """Decode all prompts with a copy of `network`; returns the merged statistics of all processes that decode."""
        own = Stats()
        with self._target.in_step():
            if self._requests:
                own = self._decoded(network, advance)
        pooled = Stats()
        for stats in self._target.processes.all_gather(own):
            pooled.merge(stats)
        return pooled

    def _decoded(self, network: DraftNetwork, advance: Advance) -> Stats:
        """The merged statistics of this process's prompts."""
        config, target = self._config, self._target.whole
        served = copy.deepcopy(network).to(device=target.device, dtype=target.dtype).eval()
        if "shared" in (network.config.embedding, network.config.head):
            served.borrow(target)
        drafter = drafter_of(served, network.config.taps or network.config.default_taps(target.num_layers))
        tree = tree_for(drafter, None if config.tree is None else parse_tree(config.tree))
        together = min(config.batch_size, len(self._requests))
        engine = Engine(target, self._tokenizer, Speculation(drafter, tree), batch_size=together)
        pooled = Stats()
        done = 0
        most = config.max_tokens
        for chunk in engine.stream(self._requests):
            done += len(chunk.token_ids)
            if chunk.completion is not None:
                pooled.merge(chunk.completion.stats)
                done += most - len(chunk.completion.token_ids)
            advance("decoding", done, most * len(self._requests))
        return pooled


def choose_prompts(rows: Sequence[TokenRow], count: int, longest: int | None) -> list[tuple[int, ...]]:
    """The prompts (all tokens before the first answer) of up to `count` rows, evenly spaced over those that fit.

    A prompt fits if it has at most `longest` tokens. Raises DataError if none does.
    """
    prompts = map(prompt_of, rows)
    fitting = [prompt for prompt in prompts if prompt and (longest is None or len(prompt) <= longest)]
    if not fitting:
        raise DataError("no held-out chat has a prompt: hold out more chats, or set validation.decode to false")
    return spread(fitting, count)
