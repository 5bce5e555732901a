"""Reads a finished store: its rows in the order of capture, and their features, also as batches for training.

Stored rows have no padding; they are assembled into padded batches, moved to the device encoded, and decoded there.
Legend: B chats, S positions, A taps stored, Ht target hidden, M positions filled, k candidates.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.data.features import FeatureBatch, TopTokens, taught, top_rows, trace_members
from eyas.data.store.layout import EncodedStates, ShardLayout, capture_parameters, decode_states, pack_mask
from eyas.data.store.manifest import RECAPTURE, Manifest, Shard, StoredRow, data_digest, read_manifest, rows_hash
from eyas.data.tokens.batches import ChatBatches, TokenBatch, cut_row
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError
from eyas.targets import Target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.passes import EmbeddingAndHead
from eyas.urls import fetch

OPEN_SHARDS = 256
"""Maximum number of shards that are kept open (memory-mapped)."""


class FeatureStore:
    """An open store. Rows are numbered through all splits, in the order of the shards in the manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.settings = manifest.settings
        self.layout = manifest.settings.layout
        self._first = list(accumulate((shard.rows for shard in manifest.shards), initial=0))
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, path: Path) -> FeatureStore:
        """Open the store at `path`; StoreError if it is incomplete or a shard has the wrong size.

        A store behind a URL is copied first, since shards are memory-mapped.
        """
        path = fetch(path)
        manifest = read_manifest(path)
        for shard in manifest.shards:
            try:
                found = (path / shard.file).stat().st_size
            except OSError:
                raise StoreError(f"{path / shard.file} is missing, though the manifest names it; {RECAPTURE}") from None
            if found != shard.bytes:
                raise StoreError(
                    f"{path / shard.file} has {found:,} bytes, not {shard.bytes:,}: it was cut short; {RECAPTURE}"
                )
        return cls(path, manifest)

    def __len__(self) -> int:
        return self._first[-1]

    def rows(self, split: str) -> list[TokenRow]:
        """All rows of a split, in the order of the chats; StoreError if they differ from those captured."""
        if split not in self.settings.splits:
            raise StoreError(f"{self.folder} has no split {split!r}, only {', '.join(self.settings.splits)}")
        found = [row for number in self._numbers(split) for row in self._shard(number).token_rows()]
        if rows_hash(found) != self.settings.splits[split].hash:
            raise StoreError(f"{self.folder} is damaged: the tokens of {split} differ from those captured")
        return found

    def check_target(self, target: EmbeddingAndHead) -> None:
        """Raise StoreError unless the states are this target's; a partly loaded one is compared by its parts."""
        facts = self.settings.target
        if len(target.layers) < target.num_layers:
            found = embedding_head_fingerprint(target.model, target.layers)
            wanted = facts.ends
        else:
            found = fingerprint(target.model)
            wanted = facts.fingerprint
        if (found, target.num_layers) != (wanted, facts.layers):
            raise StoreError(
                f"{self.folder} was captured from another target: {facts.name}, {facts.layers} layers, fingerprint "
                f"{wanted}; this one has {target.num_layers} layers, fingerprint {found}. Capture it again, or train "
                "for that target"
            )

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise StoreError, with advice, if a boundary in `taps` can't be read from this store."""
        served = self.served_taps
        missing = [k for k in taps if k not in served]
        if missing:
            needed = capture_parameters(taps, self.settings.target.layers)
            options = " ".join(f"`{name}={value}`" for name, value in needed.items())
            raise StoreError(
                f"{self.folder} holds taps {list(served)}, not {missing}: capture it again with {options}, or train on "
                "its taps"
            )

    @property
    def served_taps(self) -> tuple[int, ...]:
        """Boundaries that can be read, including the one after the final norm if all final states are kept."""
        extra = (self.settings.target.layers + 1,) if self.layout.final == "all" else ()
        return (*self.layout.taps, *extra)

    def find(self, row: TokenRow, longest: int) -> int | None:
        """The number of the stored row that begins with the first `longest` tokens of `row`; None if there is none.

        A row that the capture cut to fewer tokens doesn't count.
        """
        cut = self.settings.longest
        if min(len(row.tokens), longest) > cut:
            return None
        return self._index.get(_key(cut_row(row, cut)))

    def read(self, number: int) -> StoredRow:
        """The features of a row; StoreError if its checksum doesn't match."""
        shard = bisect_right(self._first, number) - 1
        return self._shard(shard).row(number - self._first[shard])

    def verify(self) -> Iterator[str]:
        """Read every byte of every shard and yield a message for each one that is damaged."""
        for shard in self.manifest.shards:
            if data_digest(self.folder / shard.file) != shard.sha256:
                yield f"{self.folder / shard.file} is damaged; {RECAPTURE}"

    @cached_property
    def _index(self) -> dict[bytes, int]:
        rows = (row for number in range(len(self.manifest.shards)) for row in self._shard(number).token_rows())
        return {_key(row): number for number, row in enumerate(rows)}

    def _numbers(self, split: str) -> list[int]:
        return [number for number, shard in enumerate(self.manifest.shards) if shard.split == split]

    def _open_shard(self, number: int) -> Shard:
        facts = self.manifest.shards[number]
        return Shard(self.folder / facts.file, self.layout, facts.size)


def _key(row: TokenRow) -> bytes:
    digest = hashlib.blake2b(row.tokens.astype("<i4").tobytes(), digest_size=16)
    digest.update(pack_mask(row.loss_mask).data)
    return digest.digest()


class StoreSource:
    """Reads every batch from a store; states are in the dtype of the target that computed them."""

    def __init__(
        self, store: FeatureStore, batches: ChatBatches, taps: Sequence[int], device: torch.device | None = None
    ) -> None:
        self._rows = _StoredRows(store, batches, taps)
        missing = self._rows.missing()
        if missing:
            raise StoreError(
                f"{store.folder} lacks {len(missing)} of the rows to train on, row {missing[0]} first: it holds "
                f"{len(store)}, cut to {store.settings.longest} tokens. Train on the store's own rows, capture these "
                "chats, or use the hybrid source"
            )
        self._device = device or torch.device("cpu")
        self._dtype: torch.dtype = getattr(torch, store.settings.target.dtype)

    def __call__(self, number: int) -> FeatureBatch:
        return self._rows.read(self._rows.batches.members(number), self._dtype, self._device)


class HybridSource:
    """Reads the rows that the store holds and computes the others with the target."""

    def __init__(self, store: FeatureStore, target: Target, batches: ChatBatches, taps: Sequence[int]) -> None:
        store.check_target(target)
        target.check_taps(taps)
        self._rows = _StoredRows(store, batches, taps)
        self._target = target
        self._taps = tuple(taps)
        self._layout = store.layout

    def __call__(self, number: int) -> FeatureBatch:
        members = self._rows.batches.members(number)
        lost = [b for b, i in enumerate(members) if self._rows.number(i) is None]
        if not lost:
            return self._rows.read(members, self._target.dtype, self._target.device)
        made = self._computed([members[b] for b in lost])
        if len(lost) == len(members):
            return made
        batch = self._rows.read(members, self._target.dtype, self._target.device)
        for stored, computed in (
            (batch.taps, made.taps),
            (batch.final, made.final),
            *zip(batch.top or (), made.top or (), strict=True),
        ):
            if stored is not None and computed is not None:
                stored[lost, : computed.shape[1]] = computed
        return batch

    def _computed(self, members: Sequence[int]) -> FeatureBatch:
        made = trace_members(self._target, self._rows.batches, members, self._taps)
        if self._layout.top is None or made.final is None:
            return made
        where = taught(made.loss_mask)
        rows = top_rows(self._target.head, made.final[where], self._layout.vocab, self._layout.top)
        ids, logprobs, tail = (scattered(part, where) for part in rows)
        return made._replace(final=None, top=TopTokens(ids, logprobs, tail))


class _StoredRows:
    """Finds and reads the rows of `batches` in a store."""

    def __init__(self, store: FeatureStore, batches: ChatBatches, taps: Sequence[int]) -> None:
        store.check_taps(taps)
        self.batches = batches
        self._store = store
        self.row_numbers = [store.find(row, batches.longest) for row in batches.rows]
        """Each chat's number in the store; None if the store lacks it."""
        columns = [store.served_taps.index(k) for k in taps]
        self._columns = None if columns == list(range(len(store.served_taps))) else columns

    def number(self, member: int) -> int | None:
        """The row number, in the store, of the chat that a segment belongs to; None if the store lacks it."""
        return self.row_numbers[self.batches.segments[member].chat]

    def missing(self) -> list[int]:
        """Indices of chats that the batches use and the store lacks."""
        return [i for i in self.batches.used if self.row_numbers[i] is None]

    def read(self, members: Sequence[int], dtype: torch.dtype, device: torch.device) -> FeatureBatch:
        """The features of these segments; zeros where the store lacks the chat."""
        rows = [self._stored(member) for member in members]
        batch = assembled(rows, self.batches.of(members), self._store.layout, dtype, device)
        if self._columns is None:
            return batch
        taps: Tensor = batch.taps[:, :, self._columns]
        return batch._replace(taps=taps)

    def _stored(self, member: int) -> StoredRow | None:
        """The stored features of a segment and of the rest of its chat."""
        number = self.number(member)
        if number is None:
            return None
        chat, start, _, counted = self.batches.segments[member]
        whole = self._store.layout.final == "all"
        earlier = start if whole else np.count_nonzero(self.batches.rows[chat].loss_mask[1:counted])
        return self._store.read(number).after(start, int(earlier))


def assembled(
    rows: Sequence[StoredRow | None], batch: TokenBatch, layout: ShardLayout, dtype: torch.dtype, device: torch.device
) -> FeatureBatch:
    """Assemble the features of a batch from stored rows, which may be longer; None leaves a row's features at zero.

    Taps are those stored, followed by the final states if the layout keeps them at every position.
    """
    there = torch.tensor([row is not None for row in rows]).unsqueeze(1)  # [B, 1]
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths.unsqueeze(1)) & there  # [B, S]
    teaching = taught(batch.loss_mask) & there  # [B, S]
    found = [row for row in rows if row is not None]
    counts = real.sum(1)[there.squeeze(1)].tolist()
    taught_counts = teaching.sum(1)[there.squeeze(1)].tolist()

    taps = _states([row.taps for row in found], counts, real, (len(layout.taps), layout.hidden), dtype, device)
    final: Tensor | None = None
    top: TopTokens | None = None
    if layout.final == "all":
        final = _states([row.final for row in found], counts, real, (layout.hidden,), dtype, device)
        taps = torch.cat([taps, final.unsqueeze(2)], dim=2)
        final.masked_fill_(~teaching.to(device).unsqueeze(2), 0)
    elif layout.final == "answers":
        final = _states([row.final for row in found], taught_counts, teaching, (layout.hidden,), dtype, device)
    else:
        kept = [[part[:n] for part in row.top or ()] for row, n in zip(found, taught_counts, strict=True)]
        ids, logprobs, tail = (torch.cat(parts) for parts in zip(*kept, strict=True))
        where = teaching.to(device)
        top = TopTokens(
            scattered(ids.to(torch.int64).to(device), where),
            scattered(logprobs.float().to(device), where),
            scattered(tail.to(device), where),
        )
    starts = batch.starts.to(device) if batch.starts.any() else None
    return FeatureBatch(batch.tokens.to(device), batch.loss_mask.to(device), taps, final, top, starts)


def scattered(values: Tensor, where: Tensor) -> Tensor:
    """[B, S, ...]: values [M, ...] at the M true positions of where [B, S], zeros elsewhere."""
    out = torch.zeros(*where.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    out[where] = values
    return out


def _states(
    parts: Sequence[EncodedStates | None],
    counts: Sequence[int],
    where: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[B, S, *shape]: the first `counts` states of each part, decoded and scattered to `where`."""
    kept = [(part, n) for part, n in zip(parts, counts, strict=True) if part is not None]
    if not kept:
        return torch.zeros(*where.shape, *shape, dtype=dtype, device=device)
    values = torch.cat([part.values[:n].view(torch.uint8) for part, n in kept]).view(kept[0][0].values.dtype)
    exponents = [part.exponents[:n] for part, n in kept if part.exponents is not None]
    encoded = EncodedStates(values.to(device), torch.cat(exponents).to(device) if exponents else None)
    return scattered(decode_states(encoded, dtype), where.to(device))
