"""Rows of traffic on disk: shards in the store's format, one client each; the newest are kept.

A shard's name, `TIME-CLIENT-SPLIT.safetensors`, and its header say everything about it, so no index must agree with it:
whichever process is killed, every file is complete. If space runs out, the client with the most bytes loses its oldest
shard: however much one client sends, the others keep their rows.

`held` rows are never trained on: a new generation is tested on them. A row's first tokens decide its split, so that a
question that is repeated lands on the same side.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.data.capture.shard import ShardTensors
from eyas.data.store.layout import EncodedStates, RowTotals, ShardLayout, size_of
from eyas.data.store.manifest import (
    MANIFEST,
    CapturedTarget,
    CaptureSettings,
    Manifest,
    Shard,
    StoredRow,
    StoredShard,
    StoredSplit,
    rows_hash,
    shard_digest,
    write_model,
    write_shard,
)
from eyas.data.store.reader import FeatureStore
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError
from eyas.runtime import versions

Split = Literal["train", "held"]
_HELD_OUT_EVERY = 8
"""One in this many rows is held out."""
_OWNER = "learn-traffic---"
"""The 16 characters in a shard's metadata that take the place of a capture's identity."""
_SHARD = 64
"""Rows in a shard of a copied store; a shard is assembled in memory."""
_SPLIT_TOKENS = 64
"""Number of first tokens that decide a row's split."""


class TrafficRow(NamedTuple):
    """A row of traffic: tokens with the answer's mask, and the states that the rounds produced."""

    tokens: TokenRow
    states: StoredRow


class TrafficShard(NamedTuple):
    """A file of the traffic store, described by its name alone."""

    path: Path

    @property
    def client(self) -> str:
        """The digest of the client that its rows are from."""
        return self.path.name.split("-")[1]

    @property
    def split(self) -> str:
        """`train`, or `held` for rows that are never trained on."""
        return self.path.stem.split("-")[2]

    def rows(self, layout: ShardLayout) -> list[TrafficRow]:
        """Its rows, as views of the file; none if it was dropped meanwhile. Raises StoreError if it is damaged."""
        size = _size(self.path)
        if size is None:
            return []
        try:
            shard = Shard(self.path, layout, size)
        except StoreError:
            if not self.path.exists():
                return []
            raise
        return [TrafficRow(row, shard.row(i)) for i, row in enumerate(shard.token_rows())]


def split_of(row: TokenRow) -> Split:
    """Whether a row is trained on or held out."""
    digest = hashlib.blake2b(row.tokens[:_SPLIT_TOKENS].astype("<i4").tobytes(), digest_size=4).digest()
    return "train" if int.from_bytes(digest, "little") % _HELD_OUT_EVERY else "held"


class TrafficStore:
    """The folder of the traffic shards, with at most `limit` bytes."""

    def __init__(self, folder: Path, layout: ShardLayout, limit: int) -> None:
        self.folder = folder
        self.layout = layout
        self.limit = limit
        self._last = 0

    def shards(self) -> list[TrafficShard]:
        """All finished shards, oldest first."""
        return [TrafficShard(path) for path in sorted(self.folder.glob("*-*-*.safetensors"))]

    def write(self, client: str, split: Split, rows: Sequence[TrafficRow]) -> None:
        """Add rows of a client (a digest without hyphens) and make room. Raises StoreError if they can't be written."""
        self._last = max(self._last + 1, time.time_ns())
        path = self.folder / f"{self._last:020}-{client}-{split}.safetensors"
        _write(path, self.layout, rows, _OWNER)
        self.make_room()

    def make_room(self) -> None:
        """Drop shards until the rest fits, each time the oldest shard of the client with the most bytes."""
        sizes = {shard: _bytes(shard.path) for shard in self.shards()}
        total = sum(sizes.values())
        held = Counter[str]()
        for shard, size in sizes.items():
            held[shard.client] += size
        while total > self.limit and sizes:
            client = held.most_common(1)[0][0]
            oldest = next(shard for shard in sizes if shard.client == client)
            oldest.path.unlink(missing_ok=True)
            size = sizes.pop(oldest)
            total -= size
            held[client] = held[client] - size

    def newest(self, split: Split, count: int) -> list[TrafficRow]:
        """At most `count` rows of a split, newest shards first. Clients get equal shares unless some have too few rows.

        Without this, the next generation would learn from, and be tested on, only the client that sends the most.
        """
        waiting = defaultdict[str, list[TrafficShard]](list)
        taken = Counter[str]()
        for shard in self.shards():
            if shard.split == split:
                waiting[shard.client].append(shard)
        found: list[tuple[str, list[TrafficRow]]] = []
        while waiting and taken.total() < count:
            client = min(waiting, key=lambda one: taken[one])
            shard = waiting[client].pop()
            rows = shard.rows(self.layout)[: count - taken.total()]
            found.append((shard.path.name, rows))
            taken[client] += len(rows)
            if not waiting[client]:
                del waiting[client]
        return [row for _, rows in sorted(found, key=lambda one: one[0], reverse=True) for row in rows]

    def count(self, split: Split, after: str = "") -> int:
        """The number of rows of a split in shards later than `after`; only headers are read."""
        sizes = (_size(one.path) for one in self.shards() if one.split == split and one.path.name > after)
        return sum(size.rows for size in sizes if size is not None)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size(path: Path) -> RowTotals | None:
    """The totals of a shard from its header; None if the file is gone."""
    try:
        with path.open("rb") as file:
            tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except FileNotFoundError:
        return None
    finals = tensors["final"]["shape"][0] if "final" in tensors else 0
    return RowTotals(tensors["lengths"]["shape"][0], tensors["tokens"]["shape"][0], finals)


def _write(path: Path, layout: ShardLayout, rows: Sequence[TrafficRow], identity: str) -> RowTotals:
    tokens = [row.tokens for row in rows]
    tensors = ShardTensors(tokens, layout)
    for index, row in enumerate(rows):
        tensors.put(index, row.states)
    size = size_of(tokens)
    write_shard(path, layout, size, tensors.finish(), identity)
    return size


def write_store(
    folder: Path, target: CapturedTarget, layout: ShardLayout, splits: dict[str, list[TrafficRow]], name: str
) -> FeatureStore:
    """Write a store with copies of these rows, so that their source may be deleted; `name` names the source.

    Splits without rows are left out. Raises StoreError if the disk can't take it.
    """
    splits = {split: rows for split, rows in splits.items() if rows}
    described = {}
    for split, rows in splits.items():
        tokens = [row.tokens for row in rows]
        described[split] = StoredSplit(**size_of(tokens)._asdict(), dropped=0, hash=rows_hash(tokens))
    settings = CaptureSettings(
        target=target,
        taps=layout.taps,
        layout=layout,
        chats=name,
        longest=max(len(row.tokens.tokens) for rows in splits.values() for row in rows),
        batch_tokens=1,
        shard_bytes=1,
        splits=described,
    )
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    parts = [
        (split, at, rows[at : at + _SHARD]) for split, rows in splits.items() for at in range(0, len(rows), _SHARD)
    ]
    for split, at, rows in parts:
        path = folder / f"{split}-{at // _SHARD:05}.safetensors"
        size = _write(path, layout, rows, settings.identity)
        digest = shard_digest(path, layout.shard_bytes(size), settings.identity)
        assert digest is not None
        shards.append(
            StoredShard(file=path.name, split=split, bytes=path.stat().st_size, sha256=digest, **size._asdict())
        )
    write_model(folder / MANIFEST, Manifest(settings=settings, shards=tuple(shards), versions=versions()))
    return FeatureStore.open(folder)


def stored_rows(
    store: FeatureStore, split: str, layout: ShardLayout, count: int, seed: int = 0
) -> Iterator[TrafficRow]:
    """At most `count` rows of a captured store, drawn at random, in the `layout` of traffic rows.

    Raises StoreError if the store lacks states that the layout has, or encodes them differently.
    """
    if store.layout.states != layout.states or store.layout.final not in ("answers", "all"):
        raise StoreError(
            f"{store.folder} can't be mixed with traffic: it needs `states={layout.states}` and `final=` answers or "
            "all; capture it again"
        )
    store.check_taps([*layout.taps, *((store.settings.target.layers + 1,) if layout.final == "all" else ())])
    rows = store.rows(split)
    numbers = _numbers(store, split)
    columns = [store.layout.taps.index(tap) for tap in layout.taps]
    for index in np.random.default_rng(seed).permutation(len(rows))[:count].tolist():
        row = rows[index]
        found = store.read(numbers[index])
        assert found.final is not None
        final = found.final
        if store.layout.final == "all" and layout.final == "answers":
            final = _picked(final, np.flatnonzero(row.loss_mask[1:]).tolist())
        taps = None if found.taps is None or not columns else _columns(found.taps, columns)
        yield TrafficRow(row, StoredRow(found.tokens, taps, final, None))


def _numbers(store: FeatureStore, split: str) -> list[int]:
    """The numbers of a split's rows; rows are numbered across all splits."""
    found: list[int] = []
    first = 0
    for shard in store.manifest.shards:
        if shard.split == split:
            found += range(first, first + shard.rows)
        first += shard.rows
    return found


def _picked(states: EncodedStates, at: list[int]) -> EncodedStates:
    return EncodedStates(_bits(states.values)[at].view(states.values.dtype), _of(states.exponents, at))


def _columns(states: EncodedStates, columns: list[int]) -> EncodedStates:
    """Stored taps [T, A, Ht] of some boundaries."""
    values = _bits(states.values)[:, columns].view(states.values.dtype)
    return EncodedStates(values, _of(states.exponents, (slice(None), columns)))


def _bits(values: Tensor) -> Tensor:
    """View values as bytes, because 8-bit types don't support indexing."""
    return values.view(torch.uint8)


def _of(exponents: Tensor | None, at: Any) -> Tensor | None:
    return None if exponents is None else exponents[at]
