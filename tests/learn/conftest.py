"""Engines that learn, over tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.data.store.layout import ShardLayout
from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.learn.collect import Collector, LearnRule
from eyas.learn.live import LiveStore
from eyas.learn.swap import SwapDrafter
from eyas.tree import parse_tree
from eyas.types import Limits

from .. import tiny

FINAL = tiny.LAYERS + 1
TAPS = (1, 2, 4)
LAYOUT = ShardLayout(hidden=tiny.HIDDEN, vocab=tiny.VOCAB, taps=TAPS)


def learning_engine(
    target: Any, drafter: NetworkDrafter, collector: Collector | None = None, *, tree: str = "dynamic:3,12,40",
    rows: int = 4, prefix: int = 2048,
) -> tuple[Engine, SwapDrafter]:  # fmt: skip
    """An engine whose drafter can be swapped."""
    limits = Limits(max_running=rows, prefix_tokens=prefix, prefill_chunk=32)
    wrapped = SwapDrafter(0, drafter, FINAL, collector)
    engine = Engine(target, None, Speculation(wrapped, parse_tree(tree)), limits=limits)
    assert engine.speculation is not None
    assert isinstance(engine.speculation.drafter, SwapDrafter)
    return engine, engine.speculation.drafter


@pytest.fixture
def live(tmp_path: Path) -> LiveStore:
    folder = tmp_path / "live"
    folder.mkdir()
    return LiveStore(folder, LAYOUT, 1 << 30)


def collector_of(live: LiveStore, rule: LearnRule | None = None, **settings: Any) -> Collector:
    """One that ends no answer early, as tiny targets have no end token."""
    return Collector(live, rule or LearnRule(), (), seed=0, **settings)
