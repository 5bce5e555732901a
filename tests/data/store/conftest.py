"""Rows of many lengths for the tiny target, and stores of them, captured once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.data.capture.capture import Capture, CaptureConfig
from eyas.data.capture.shard import CaptureRows
from eyas.data.store import FeatureStore
from eyas.data.tokens.batches import cut_row
from eyas.data.tokens.tokenize import TokenRow

from ... import tiny

Made = Callable[..., FeatureStore]


def token_row(length: int, seed: int) -> TokenRow:
    """Random tokens; the second half is the answer, with a gap, as in a chat of two turns."""
    draw = np.random.default_rng(seed)
    mask = np.arange(length) >= length // 2
    mask[length * 3 // 4] = False
    return TokenRow(draw.integers(3, tiny.VOCAB, length), mask, f"r{seed}")


def rows(longest: int = 100) -> CaptureRows:
    train = [cut_row(token_row(6 + (i * 7) % 23, i), longest) for i in range(24)]
    return CaptureRows({"train": train, "validation": [token_row(9 + i, 100 + i) for i in range(5)]},
                       {"train": 1, "validation": 0}, longest=longest)  # fmt: skip


def prepare(folder: Path, rank: int = 0, world: int = 1, longest: int = 100, **options: Any) -> Capture:
    """A capture of `rows()` in about five small shards."""
    config = CaptureConfig(**{"taps": (1, 2, 4), "shard_bytes": 14_000, "batch_tokens": 60, **options})
    return Capture(tiny.target(), rows(longest), config, folder, name="tiny", chats="rows", rank=rank, world=world)


def captured(folder: Path, **options: Any) -> FeatureStore:
    prepared = prepare(folder, **options)
    with prepared.begun():
        assert prepared.run() is not None
    return FeatureStore.open(folder)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`store(**options)`: a store with these options, captured once."""
    made: dict[str, FeatureStore] = {}

    def get(**options: Any) -> FeatureStore:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = captured(tmp_path_factory.mktemp("store"), **options)
        return made[key]

    return get
