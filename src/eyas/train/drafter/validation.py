"""Validation on held-out chats: teacher-forced scores, and decoding of prompts.

Decoding runs the engine with a copy of the drafter in the dtype of its checkpoint, as it will be served; the network
in training is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field

from eyas.config import StrictModel
from eyas.data.chats.folder import prompt_of, spread
from eyas.data.features import FeatureBatch, FeatureSource
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork
from eyas.engine import Engine, Speculation
from eyas.engine.load import tree_for
from eyas.errors import DataError
from eyas.train.drafter.target import RunTarget
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.metrics import Means, MicroBatchLoss
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats


class ValidationConfig(StrictModel):
    """How much is scored and decoded every `loop.validate_every` steps."""

    batches: int = Field(default=4, gt=0)  # batches scored with teacher forcing
    decode: bool = True  # if false, the target isn't loaded, and `best` is chosen by the simulated accept length
    prompts: int = Field(default=8, gt=0)
    max_tokens: int = Field(default=96, gt=0)
    batch_size: int = Field(default=8, gt=0)  # prompts decoded at once
    tree: str | None = None  # None: the drafter's own default


def scored(
    score: Callable[[FeatureBatch], MicroBatchLoss], source: FeatureSource, count: int, processes: ProcessGroup
) -> dict[str, float]:
    """Mean metrics over batches 0 to count - 1, divided among the processes.

    All processes score the same number of batches, as FSDP needs; one that has none left scores another uncounted.
    """
    means = Means()
    with torch.no_grad():
        for number in range(
            processes.rank, -(-count // processes.world_size) * processes.world_size, processes.world_size
        ):
            part = score(source(number % count))
            if number < count:
                means.add_micro_batch(part)
    return Means.merged(processes.all_gather(dict(means.sums))).means()


class HeldOutDecoding:
    """Decodes the same held-out prompts greedily at every validation.

    The processes that share a sharded target divide the prompts.
    """

    def __init__(self, target: RunTarget, tokenizer: Any, rows: Sequence[TokenRow], config: ValidationConfig) -> None:
        self._target, self._tokenizer, self._config = target, tokenizer, config
        longest, processes = target.target.max_length, target.processes
        prompts = choose_prompts(rows, config.prompts, None if longest is None else longest - 1)
        params = SamplingParams(max_tokens=config.max_tokens)
        self._requests = [Request(ids, params, chat=True) for ids in prompts[processes.rank :: processes.world_size]]

    def __call__(self, network: DraftNetwork) -> Stats:
        """Decode all prompts with a copy of `network`; returns the merged statistics of all processes that decode."""
        own = Stats()
        with self._target.in_step():
            if self._requests:
                own = self._decoded(network)
        pooled = Stats()
        for stats in self._target.processes.all_gather(own):
            pooled.merge(stats)
        return pooled

    def _decoded(self, network: DraftNetwork) -> Stats:
        """The merged statistics of this process's prompts."""
        config, target = self._config, self._target.target
        served = copy.deepcopy(network).to(device=target.device, dtype=target.dtype).eval()
        if "shared" in (network.config.embedding, network.config.head):
            served.borrow(target)
        drafter = drafter_of(served, network.config.taps or network.config.default_taps(target.num_layers))
        tree = tree_for(drafter, None if config.tree is None else parse_tree(config.tree))
        together = min(config.batch_size, len(self._requests))
        engine = Engine(target, self._tokenizer, Speculation(drafter, tree), batch_size=together)
        pooled = Stats()
        for completion in engine.generate(self._requests):
            pooled.merge(completion.stats)
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
