"""Reader of a finished store: its rows in the order of capture, and the features of each row."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

from eyas.data.store.encoding import pack_mask
from eyas.data.store.manifest import Manifest, read_manifest, rows_hash
from eyas.data.store.shard import RECAPTURE, Shard, StoredRow, data_digest
from eyas.data.tokens.batches import cut_row
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError
from eyas.targets import Target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.loading import EmbeddingAndHead
from eyas.urls import fetch

OPEN_SHARDS = 256
"""The most shards that are kept open (memory-mapped) at once."""


class FeatureStore:
    """An open store. Rows are numbered through all splits, in the order of the shards in the manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.settings = manifest.settings
        self.layout = manifest.settings.layout
        self._first = list(accumulate((shard.rows for shard in manifest.shards), initial=0))
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, path: Path) -> FeatureStore:
        """Open the store at `path`; StoreError if it is incomplete or a shard has the wrong size.

        One behind a URL is copied first, since shards are memory-mapped.
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

    def check_target(self, target: Target) -> None:
        """Raise StoreError unless the states are this target's; if only parts of it are loaded, these are compared."""
        facts = self.settings.target
        if isinstance(target, EmbeddingAndHead):
            found, wanted = embedding_head_fingerprint(target.model, target.layers), facts.ends
        else:
            found, wanted = fingerprint(target.model), facts.fingerprint
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
            after = self.settings.target.layers + 1
            hint = " with --final all" if after in missing else ""
            raise StoreError(
                f"{self.folder} holds taps {list(served)}, not {missing}: "
                f"capture it again{hint} with --taps {','.join(map(str, taps))}, or train on its taps"
            )

    @property
    def served_taps(self) -> tuple[int, ...]:
        """Boundaries that can be read, including the one after the final norm if all final states are kept."""
        extra = (self.settings.target.layers + 1,) if self.layout.final == "all" else ()
        return (*self.layout.taps, *extra)

    def find(self, row: TokenRow, longest: int) -> int | None:
        """The number of the stored row that begins with the first `longest` tokens of `row`; None if there is none.

        A row that the capture cut to fewer tokens than that doesn't count.
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
