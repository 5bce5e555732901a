"""The manifest: what was captured, how, and which shards hold it. Written last; a reader trusts nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from eyas.config import StrictModel
from eyas.data.store.layout import RowTotals, ShardLayout
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import LockedError, StoreError
from eyas.files import FileLock, write_text

MANIFEST = "manifest.json"
SETTINGS = "capture.json"
"""The settings alone, written first: what an unfinished capture is of."""


class CapturedTarget(StrictModel):
    """The model whose states these are."""

    name: str
    fingerprint: str
    ends: str
    """Fingerprint of embedding, head and first layer: what training from the store loads."""
    dtype: str
    layers: int


class StoredSplit(StrictModel):
    """The rows of a split."""

    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    taught: int = Field(ge=0)
    """Positions whose next token is an answer token."""
    dropped: int = Field(ge=0)
    """Chats without an answer to learn from within the first `longest` tokens, or that couldn't be tokenized."""
    hash: str
    """Of all tokens and masks, in order."""

    @property
    def size(self) -> RowTotals:
        """The size the byte count asks for."""
        return RowTotals(self.rows, self.tokens, self.taught)


class CaptureSettings(StrictModel):
    """All that decides what the bytes of the shards are."""

    format: Literal["eyas-store"] = "eyas-store"
    version: Literal[1] = 1
    target: CapturedTarget
    taps: tuple[int, ...]
    """As asked for; `layout.taps` are those stored as taps."""
    layout: ShardLayout
    chats: str
    longest: int
    batch_tokens: int
    shard_bytes: int
    splits: dict[str, StoredSplit]

    @property
    def identity(self) -> str:
        """A short hash that every shard carries."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class StoredShard(StrictModel):
    """A shard: consecutive rows of one split."""

    file: str
    split: str
    rows: int
    tokens: int
    taught: int
    bytes: int
    sha256: str
    """Of its data, without the header."""

    @property
    def size(self) -> RowTotals:
        """The size the byte count asks for."""
        return RowTotals(self.rows, self.tokens, self.taught)


class Manifest(StrictModel):
    """A whole store."""

    settings: CaptureSettings
    shards: tuple[StoredShard, ...]
    versions: dict[str, str]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store; StoreError if there is none or it can't be read."""
    if not (folder / MANIFEST).is_file():
        begun = (folder / SETTINGS).is_file()
        what = "its capture never finished; run it again, it goes on" if begun else "it is no feature store"
        raise StoreError(f"{folder} has no {MANIFEST}: {what}")
    return _read(folder / MANIFEST, Manifest)


def read_settings(folder: Path) -> CaptureSettings | None:
    """What a capture begun in this folder is of; None if there is none."""
    return _read(folder / SETTINGS, CaptureSettings) if (folder / SETTINGS).is_file() else None


def write_model(path: Path, model: BaseModel) -> None:
    """Replace a JSON file of the store; several processes may write the same one. StoreError if it can't be written."""
    try:
        write_text(path, model.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise StoreError(f"can't write {path}: {error.strerror}") from error


def lock_store(folder: Path, *, alone: bool) -> FileLock:
    """Lock a store's folder for a capture, alone or shared among its processes; StoreError if another capture runs."""
    try:
        return FileLock(folder, shared=not alone)
    except LockedError:
        raise StoreError(f"another process is capturing into {folder}: wait for it, or choose another folder") from None


def differences(before: CaptureSettings, now: CaptureSettings) -> list[str]:
    """What differs, as `name: before, now`, one a setting."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return [f"{key}: {old.get(key)}, now {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)]


def rows_hash(rows: Sequence[TokenRow]) -> str:
    """A short hash of tokens and masks, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row.tokens.astype("<i4").tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()[:16]


ModelT = TypeVar("ModelT", bound=BaseModel)


def _read(path: Path, model: type[ModelT]) -> ModelT:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StoreError(f"can't read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StoreError(
            f"{path} is no manifest this version of eyas reads ({where}: {first['msg']}); capture the store again"
        ) from error


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
