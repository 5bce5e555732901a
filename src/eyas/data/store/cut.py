"""Which rows go into which shard: a pure function of the rows and the layout, so any process can tell any shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eyas.data.store.layout import Layout, Size, size_of
from eyas.data.tokenize import TokenRow


class ShardPlan(NamedTuple):
    """Consecutive rows [first, stop) of a split."""

    file: str
    split: str
    first: int
    stop: int
    size: Size


def cut_shards(splits: dict[str, list[TokenRow]], layout: Layout, most_bytes: int) -> list[ShardPlan]:
    """Shards of at most `most_bytes` of data each (a row that is bigger goes alone), split by split."""
    return [plan for split, rows in splits.items() for plan in _cut(split, rows, layout, most_bytes)]


def _cut(split: str, rows: Sequence[TokenRow], layout: Layout, most_bytes: int) -> Iterator[ShardPlan]:
    first, total = 0, Size(0, 0, 0)
    number = 0
    for i, row in enumerate(rows):
        grown = Size(*(a + b for a, b in zip(total, size_of([row]), strict=True)))
        if i > first and layout.data_bytes(grown) > most_bytes:
            yield ShardPlan(_name(split, number), split, first, i, total)
            number, first, grown = number + 1, i, size_of([row])
        total = grown
    if first < len(rows):
        yield ShardPlan(_name(split, number), split, first, len(rows), total)


def _name(split: str, number: int) -> str:
    return f"{split}-{number:05}.safetensors"
