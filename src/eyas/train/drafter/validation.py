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
from eyas.engine.default_tree import tree_for
from eyas.errors import DataError
from eyas.train.drafter.target import RunTarget
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.log import Advance, Means, MicroBatchLoss
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats


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
