"""Engines that learn, with tiny random models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from eyas.data.capture.capture import captured_target
from eyas.data.capture.shard import traced_rows
from eyas.data.store.layout import ShardLayout
from eyas.data.store.reader import FeatureStore
from eyas.data.tokens.batches import padded
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.labs.learn.collect import Collector, LearnRule
from eyas.labs.learn.swap import SwapDrafter
from eyas.labs.learn.traffic import TrafficRow, TrafficStore, write_store
from eyas.options import TargetOptions
from eyas.session import Session
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.tree import parse_tree
from eyas.types import Limits, Request, SamplingParams

from ... import tiny
from ...pairs import tokenizer

FINAL = tiny.LAYERS + 1
TAPS = (1, 2, 4)
LAYOUT = ShardLayout(hidden=tiny.HIDDEN, vocab=tiny.VOCAB, taps=TAPS)


def learning_engine(
    target: Any,
    drafter: NetworkDrafter,
    collector: Collector | None = None,
    *,
    tree: str = "dynamic:3,12,40",
    rows: int = 4,
    prefix: int = 2048,
) -> tuple[Engine, SwapDrafter]:
    """An engine whose drafter can be swapped."""
    limits = Limits(max_running=rows, prefix_tokens=prefix, prefill_chunk=32)
    wrapped = SwapDrafter(0, drafter, FINAL, collector)
    engine = Engine(target, None, Speculation(wrapped, parse_tree(tree)), limits=limits)
    assert engine.speculation is not None
    assert isinstance(engine.speculation.drafter, SwapDrafter)
    return engine, engine.speculation.drafter


@pytest.fixture
def traffic(tmp_path: Path) -> TrafficStore:
    folder = tmp_path / "traffic"
    folder.mkdir()
    return TrafficStore(folder, LAYOUT, 1 << 30)


def collector_of(traffic: TrafficStore, rule: LearnRule | None = None, **settings: Any) -> Collector:
    """A collector that ends no answer early, as tiny targets have no EOS token."""
    return Collector(traffic, rule or LearnRule(), (), seed=0, **settings)


class World(NamedTuple):
    """A small target that can be learned from, and a drafter that has learned a little of it."""

    model: Path
    drafter: Path
    session: Session
    layout: ShardLayout

    def rows(self, seed: int, count: int, domain: int = 0, temperature: float = 1.0) -> list[TrafficRow]:
        """Traffic rows: the target's answers to prompts of a domain, with its states."""
        requests = self.requests(seed, count, domain, temperature)
        found = []
        for request, done in zip(requests, self.session.engine().generate(requests), strict=True):
            tokens = torch.tensor([[*request.prompt, *done.token_ids]])
            mask = np.arange(tokens.shape[1]) >= len(request.prompt)
            row = TokenRow(tokens[0].numpy(), mask)
            batch = padded([row])
            (states,) = traced_rows(self.session.target, batch, self.layout)
            found.append(TrafficRow(row, states))
        return found

    def requests(self, seed: int, count: int, domain: int = 0, temperature: float = 1.0) -> list[Request]:
        """Random prompts of domain 0 or 1, each with its own half of the vocabulary."""
        rng = random.Random(seed)
        half = self.session.target.vocab_size // 2
        first, stop = (_SPECIAL, half) if domain == 0 else (half, 2 * half)
        params = {"max_tokens": 24, "temperature": temperature, "ignore_eos": True}
        return [
            Request(
                tuple(rng.randrange(first, stop) for _ in range(6)), SamplingParams(seed=seed * 1000 + at, **params)
            )
            for at in range(count)
        ]

    def store(self, folder: Path, splits: dict[str, list[TrafficRow]]) -> FeatureStore:
        """Write a store of such rows."""
        return write_store(folder, captured_target(self.session.target, "tiny"), self.layout, splits, "traffic")


_SPECIAL = 5


def save_learnable(path: Path) -> Path:
    """Save a target whose next token mostly follows from the last one and stays in its half of the vocabulary."""
    vocab = len(tokenizer())
    model = tiny.build_model("llama", scale=1.0, vocab_size=vocab, **tiny.fitting("llama"))  # with native passes
    generator = torch.Generator().manual_seed(0)
    following = torch.arange(vocab)
    for first, stop in ((_SPECIAL, vocab // 2), (vocab // 2, 2 * (vocab // 2))):
        cycle = first + torch.randperm(stop - first, generator=generator)
        following[cycle] = cycle.roll(-1)
    embedding = torch.randn(vocab, tiny.HIDDEN, generator=generator)
    model.get_input_embeddings().weight.copy_(embedding)
    model.get_output_embeddings().weight[following] = 0.3 * embedding
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("world")
    model = save_learnable(path / "model")
    session = Session.open(TargetOptions(model, dtype="float32", device="cpu"))
    target = session.target
    layout = ShardLayout(hidden=target.hidden_size, vocab=target.vocab_size, taps=(1, 2, 3))
    made = World(model, path / "run" / "drafter", session, layout)
    rows = made.rows(0, 80)
    made.store(path / "store", {"train": rows[4:], "validation": rows[:4]})
    train_drafter(
        DrafterTrainConfig.model_validate(
            {
                "target": str(model),
                "target_dtype": "float32",
                "device": "cpu",
                "source": "offline",
                "store": path / "store",
                "output": path / "run",
                "shape": {"kind": "eagle3", "taps": [1, 2, 3], "draft_vocab_size": 300, "default_tree": "chain:3"},
                "loss": {"unroll": 3},
                "batch_tokens": 512,
                "validation": {"decode": False, "batches": 1},
                "loop": {"steps": 40, "bf16": False, "optimizer": {"lr": 0.01}},
            }
        )
    )
    return made
