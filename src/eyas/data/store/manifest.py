"""The files of a store: shards, and the manifest that says what was captured and which shards hold it.

The manifest is written last; a folder without one is an unfinished store and is refused. Shard files are written
atomically and read by memory map, with a checksum for every row. Rows are stored end to end, without padding. Legend as
in layout.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.config import StrictModel, differences
from eyas.data.store.layout import (
    METADATA_KEY,
    EncodedStates,
    RowTotals,
    ShardLayout,
    header,
    in_file_order,
    pack_mask,
    unpack_mask,
)
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import LockedError, StoreError
from eyas.files import FileLock, write_text, writing
from eyas.urls import AnyPath

RECAPTURE = "delete the file and capture again, which makes only what is missing"


class StoredRow(NamedTuple):
    """The stored features of one row, as views of the memory-mapped file: T tokens, F final positions."""

    tokens: Tensor  # [T] int32
    taps: EncodedStates | None  # [T, A, Ht]
    final: EncodedStates | None  # [F, Ht]
    top: tuple[Tensor, Tensor, Tensor] | None  # ids [F, k], logprobs [F, k] float16, tail [F] float32

    def after(self, tokens: int, finals: int) -> StoredRow:
        """The row without its first `tokens` tokens and its first `finals` final positions."""
        ids, logprobs, tail = self.top or (None, None, None)
        top = (
            None
            if ids is None or logprobs is None or tail is None
            else (ids[finals:], logprobs[finals:], tail[finals:])
        )
        taps, final = (
            part and part.part(slice(first, None)) for part, first in ((self.taps, tokens), (self.final, finals))
        )
        return StoredRow(self.tokens[tokens:], taps, final, top)


def write_shard(
    path: AnyPath, layout: ShardLayout, size: RowTotals, tensors: Mapping[str, Tensor], identity: str
) -> None:
    """Write the tensors of a shard. Raises StoreError if that fails, and leaves no file behind."""
    specs = layout.tensors(size)
    names = in_file_order(specs)
    data = [_bytes(tensors[name]) for name in names]
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    try:
        with writing(path, "wb") as out:
            out.write(header(specs, f"{identity}:{digest.hexdigest()}"))
            for part in data:
                out.write(part)
    except OSError as error:
        raise StoreError(
            f"can't write {path} ({layout.shard_bytes(size):,} bytes): {error.strerror}. Earlier shards are "
            "complete; free some space and run the same command again to resume"
        ) from error


def shard_digest(path: AnyPath, size_in_bytes: int, identity: str) -> str | None:
    """The SHA-256 that a finished shard declares for its data; None if the file isn't a shard of this capture."""
    try:
        if path.stat().st_size != size_in_bytes:
            return None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(min(length, size_in_bytes)))
        owner, _, digest = described["__metadata__"][METADATA_KEY].partition(":")
    except (OSError, ValueError, KeyError):
        return None
    return digest if owner == identity else None


def data_digest(path: Path) -> str:
    """The SHA-256 computed from the data of a shard file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


class Shard:
    """An open, memory-mapped shard; features are read only when `row` is called."""

    def __init__(self, path: Path, layout: ShardLayout, size: RowTotals) -> None:
        expected = layout.shard_bytes(size)
        try:
            found = path.stat().st_size
            if found != expected:
                raise StoreError(f"{path} has {found:,} bytes, not {expected:,}: it is truncated; {RECAPTURE}")
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
        except FileNotFoundError:
            raise StoreError(f"{path} is missing, though the manifest names it; {RECAPTURE}") from None
        except (OSError, SafetensorError) as error:
            raise StoreError(f"can't read {path}: {error}; {RECAPTURE}") from error
        wanted = {name: spec.shape for name, spec in layout.tensors(size).items()}
        if {name: tuple(t.shape) for name, t in tensors.items()} != wanted:
            raise StoreError(f"the tensors in {path} differ from those in the manifest; {RECAPTURE}")
        self.path = path
        self._tensors = tensors
        self._layout = layout
        lengths = tensors["lengths"].numpy()
        if int(lengths.sum()) != size.tokens:
            raise StoreError(f"{path} is damaged: its lengths don't add up to {size.tokens:,} tokens; {RECAPTURE}")
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._mask = unpack_mask(tensors["loss_mask"].numpy(), size.tokens)
        self._final_starts = self._starts if layout.final == "all" else _taught_before(self._mask, self._starts)

    def token_rows(self) -> list[TokenRow]:
        """The tokens and the loss mask of every row, without ids."""
        tokens = self._tensors["tokens"].numpy()
        spans = zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)
        return [TokenRow(tokens[a:b].astype(np.int64), self._mask[a:b]) for a, b in spans]

    def row(self, index: int) -> StoredRow:
        """The features of the row at `index` in this shard. Raises StoreError if its checksum doesn't match."""
        start, stop = self._starts[index : index + 2].tolist()
        first, last = self._final_starts[index : index + 2].tolist()
        found = self._tensors

        def states(name: str, a: int, b: int) -> EncodedStates | None:
            if name not in found:
                return None
            return EncodedStates(found[name], found.get(f"{name}_exponents")).part(slice(a, b))

        top = None
        if self._layout.final == "top":
            top = (found["top_ids"][first:last], found["top_logprobs"][first:last], found["tail"][first:last])
        row = StoredRow(found["tokens"][start:stop], states("taps", start, stop), states("final", first, last), top)
        if row_checksum(row, self._mask[start:stop]) != int(found["checksums"][index]):
            raise StoreError(f"{self.path} is damaged: the checksum of row {index} doesn't match; {RECAPTURE}")
        return row


def row_checksum(row: StoredRow, mask: NDArray[np.bool_]) -> int:
    """CRC-32 over the tokens, the mask and all features of a row."""
    total = zlib.crc32(_bytes(row.tokens), zlib.crc32(pack_mask(mask).data))
    for part in (row.taps, row.final, row.top):
        for tensor in part or ():
            if tensor is not None:
                total = zlib.crc32(_bytes(tensor), total)
    return total


def _taught_before(mask: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N + 1] number of teaching positions before each row: those whose next token in the row is an answer token."""
    taught = np.append(mask[1:], False)
    taught[starts[1:] - 1] = False
    return np.concatenate([[0], np.cumsum(taught)])[starts]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


MANIFEST = "manifest.json"
SETTINGS = "capture.json"
"""The file with the settings alone, written first; it identifies an unfinished capture."""
StateEngine = Literal["eyas", "vllm"]


class CapturedTarget(StrictModel):
    """The model that computed the states, and its fingerprints."""

    name: str
    fingerprint: str
    ends: str
    """Fingerprint of embedding, head and first layer, the only parts that training from a store loads."""
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
    """What ran the target: eyas itself, or vLLM, whose hidden-states connector wrote the states."""
    taps: tuple[int, ...]
    """The boundaries requested; `layout.taps` are those stored as taps, without the one after the final norm."""
    layout: ShardLayout
    chats: str
    """The path or name of the chats, as the user gave it."""
    longest: int
    """Maximum tokens of a row, to which chats were cut."""
    batch_tokens: int
    shard_bytes: int
    splits: dict[str, StoredSplit]

    @model_serializer(mode="wrap")
    def _unnamed_eyas(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the engine `eyas`, so that stores from before other engines were supported keep their identity."""
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
    """A finished shard with consecutive rows of one split."""

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
    """Versions of eyas and the libraries that wrote the store, and of the other engine, if one ran the target."""


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
    """Replace a JSON file of the store; safe for concurrent processes. StoreError if it can't be written."""
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
    """The settings that differ, each with the parameter of a capture that sets it."""
    old, new = ({"engine": "eyas"} | each.model_dump(mode="json", exclude={"splits"}) for each in (before, now))
    return differences(old, new, _parameter) or ["the chats or their tokens differ (`chats=`)"]


def _parameter(key: str) -> str | None:
    part = next((part for part in _PARAMETERS if key.startswith(part)), None)
    return None if part is None else _PARAMETERS[part]


_PARAMETERS = {
    "target.dtype": "dtype", "target": "model", "engine": "engine", "taps": "taps", "layout.taps": "taps",
    "layout.states": "states", "layout.final": "final", "layout.top": "final", "chats": "chats",
    "longest": "max_length", "batch_tokens": "batch_tokens", "shard_bytes": "shard_mib",
}  # fmt: skip
"""Prefix of a setting's name -> the parameter that sets it."""


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
