"""Bytes are counted before they are written, and then are just as many."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from safetensors import safe_open

from eyas.data.store import RowTotals, ShardLayout, classic_bytes
from eyas.data.store.layout import header

from .conftest import Made

OPTIONS: list[dict[str, Any]] = [
    {}, {"final": "all"}, {"final": "top", "top": 5}, {"states": "float32"}, {"states": "bf16", "final": "all"},
    {"taps": (5,), "final": "all"}, {"taps": (2, 5), "final": "all"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_estimate_is_the_size_of_every_file(options: dict[str, Any], store: Made) -> None:
    made = store(**options)
    assert len(made.manifest.shards) > 2
    for shard in made.manifest.shards:
        path = made.folder / shard.file
        assert path.stat().st_size == made.layout.shard_bytes(shard.size) == shard.bytes
        with safe_open(path, framework="pt") as file:
            data = sum(t.numel() * t.element_size() for t in (file.get_tensor(n) for n in file.keys()))  # noqa: SIM118
            assert data == made.layout.data_bytes(shard.size)
            assert set(file.keys()) == set(made.layout.tensors(shard.size))


def test_the_recommended_layout_is_less_than_half_of_the_classic_one() -> None:
    size = RowTotals(100, 51_200, 40_000)
    for hidden in (256, 2048, 5120):
        layout = ShardLayout(hidden=hidden, vocab=32000, taps=(1, 2, 3))
        assert layout.shard_bytes(size) < 0.5 * classic_bytes(size.tokens, hidden)
        # by hand: e4m3 taps and their exponents, an id, a bit; final states where they teach; two numbers a row
        per_token = 3 * hidden + 3 + 4
        assert layout.data_bytes(size) == 51_200 * per_token + 51_200 // 8 + 40_000 * (hidden + 1) + 100 * 8


def test_ids_are_as_narrow_as_the_vocabulary_allows() -> None:
    def item(vocab: int) -> str:
        layout = ShardLayout(hidden=8, vocab=vocab, taps=(1,), final="top", top=3)
        return layout.tensors(RowTotals(1, 4, 2))["top_ids"].item

    assert (item(65536), item(65537)) == ("U16", "I32")


def test_headers_are_aligned() -> None:
    layout = ShardLayout(hidden=7, vocab=9, taps=(1,))
    for tokens in range(1, 30):
        assert len(header(layout.tensors(RowTotals(1, tokens, 1)), "x")) % 8 == 0


def test_top_needs_a_count() -> None:
    with pytest.raises(ValidationError, match="both or neither"):
        ShardLayout(hidden=7, vocab=9, taps=(1,), final="top")
    with pytest.raises(ValidationError, match="both or neither"):
        ShardLayout(hidden=7, vocab=9, taps=(1,), top=3)
