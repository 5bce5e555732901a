"""The manifest of a store: what was captured, with which settings, and which shards hold it.

It is written last; a folder without a manifest is an unfinished store and is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from eyas.config import StrictModel, differences
from eyas.data.store.layout import RowTotals, ShardLayout
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import LockedError, StoreError
from eyas.files import FileLock, write_text
from eyas.urls import AnyPath

MANIFEST = "manifest.json"
SETTINGS = "capture.json"
"""The file with the settings alone, written first; it identifies an unfinished capture."""
StateEngine = Literal["eyas", "vllm"]


class CapturedTarget(StrictModel):
    """The model that computed the states, and its fingerprints."""

    name: str
    fingerprint: str
    ends: str
    """Fingerprint of embedding, head and first layer, which are all that training from a store loads."""
    dtype: str
    layers: int


class StoredSplit(StrictModel):
    """Totals and hash of the rows of one split."""

    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    taught: int = Field(ge=0)
    """Positions whose next token is an answer token."""
    dropped: int = Field(ge=0)
    """Chats that could not be tokenized, or have no answer to learn from within the first `longest` tokens."""
    hash: str
    """Hash of all tokens and masks, in order; see `rows_hash`."""

    @property
    def size(self) -> RowTotals:
        """The totals from which a layout computes bytes."""
        return RowTotals(self.rows, self.tokens, self.taught)


class CaptureSettings(StrictModel):
    """Everything that decides the bytes of the shards."""

    format: Literal["eyas-store"] = "eyas-store"
    version: Literal[1] = 1
    target: CapturedTarget
    engine: StateEngine = "eyas"
    """Who ran the target: eyas itself, or vLLM, whose hidden-states connector wrote the states."""
    taps: tuple[int, ...]
    """The boundaries requested; `layout.taps` are those stored as taps, without the one after the final norm."""
    layout: ShardLayout
    chats: str
    """The path or name of the chats, as the user gave it."""
    longest: int
    """Tokens to which rows were cut."""
    batch_tokens: int
    shard_bytes: int
    splits: dict[str, StoredSplit]

    @model_serializer(mode="wrap")
    def _unnamed_eyas(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave eyas out, as it was before there were other engines: stores of that time keep their identity."""
        found: dict[str, Any] = handler(self)
        if self.engine == "eyas":
            found.pop("engine", None)
        return found

    @property
    def identity(self) -> str:
        """A hash of the settings, 16 hexadecimal digits, that every shard carries in its metadata."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class StoredShard(StrictModel):
    """A finished shard, which holds consecutive rows of one split."""

    file: str
    split: str
    rows: int
    tokens: int
    taught: int
    bytes: int
    sha256: str
    """SHA-256 of its data, without the header."""

    @property
    def size(self) -> RowTotals:
        """The totals from which a layout computes bytes."""
        return RowTotals(self.rows, self.tokens, self.taught)


class Manifest(StrictModel):
    """The contents of `manifest.json`: a finished store."""

    settings: CaptureSettings
    shards: tuple[StoredShard, ...]
    versions: dict[str, str]
    """Versions of eyas and the libraries that wrote the store, and of another engine if that ran the target."""


def read_manifest(folder: AnyPath) -> Manifest:
    """The manifest of a store; StoreError if there is none or it can't be read."""
    if not (folder / MANIFEST).is_file():
        begun = (folder / SETTINGS).is_file()
        what = "its capture never finished; run it again to resume it" if begun else "it is not a feature store"
        raise StoreError(f"{folder} has no {MANIFEST}: {what}")
    return _read(folder / MANIFEST, Manifest)


def read_settings(folder: AnyPath) -> CaptureSettings | None:
    """The settings of a capture begun in this folder; None if there is none."""
    return _read(folder / SETTINGS, CaptureSettings) if (folder / SETTINGS).is_file() else None


def write_model(path: AnyPath, model: BaseModel) -> None:
    """Replace a JSON file of the store, which several processes may do at once. StoreError if it can't be written."""
    try:
        write_text(path, model.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise StoreError(f"can't write {path}: {error.strerror}") from error


def lock_store(folder: Path, *, alone: bool) -> FileLock:
    """Lock a store's folder, exclusively or shared among a capture's processes. StoreError if another capture runs."""
    try:
        return FileLock(folder, shared=not alone)
    except LockedError:
        raise StoreError(f"another process is capturing into {folder}: wait for it, or choose another folder") from None


def changed_settings(before: CaptureSettings, now: CaptureSettings) -> list[str]:
    """The settings that differ, each with the option of `eyas data capture` that sets it."""
    old, new = ({"engine": "eyas"} | each.model_dump(mode="json", exclude={"splits"}) for each in (before, now))
    return differences(old, new, _option) or ["the chats or their tokens are others (--chats)"]


def _option(key: str) -> str | None:
    part = next((part for part in _OPTIONS if key.startswith(part)), None)
    return None if part is None else _OPTIONS[part]


_OPTIONS = {
    "target.dtype": "--dtype", "target": "--model", "engine": "--engine", "taps": "--taps", "layout.taps": "--taps",
    "layout.states": "--states", "layout.final": "--final", "layout.top": "--final", "chats": "--chats",
    "longest": "--max-length", "batch_tokens": "--batch-tokens", "shard_bytes": "--shard-mib",
}  # fmt: skip
"""How the name of a setting begins -> the option that sets it."""


def rows_hash(rows: Sequence[TokenRow]) -> str:
    """A hash of all tokens and masks in order, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row.tokens.astype("<i4").tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()[:16]


ModelT = TypeVar("ModelT", bound=BaseModel)


def _read(path: AnyPath, model: type[ModelT]) -> ModelT:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StoreError(f"can't read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StoreError(
            f"{path} can't be read by this version of eyas ({where}: {first['msg']}); capture the store again"
        ) from error
