"""Reading GGUF files strictly: every count and offset is checked against the file's length before it is used.

The layout follows llama.cpp's specification, versions 2 and 3, little endian. Arrays of strings, such as a tokenizer's
tokens, are skipped when a file is opened; `Gguf.array` reads one.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import CheckpointError, UsageError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32 = 6
_TEXT = 8
_ARRAY = 9
_PLAIN = {
    0: ("F32", torch.float32),
    1: ("F16", torch.float16),
    27: ("I64", torch.int64),
    28: ("F64", torch.float64),
    30: ("BF16", torch.bfloat16),
}
"""GGML types of plain numbers -> (safetensors name, torch dtype). All other types are quantized blocks."""
PLAIN_TYPES = frozenset(name for name, _ in _PLAIN.values())
"""GGML's names of the types that aren't quantized."""
_MAX_COUNT = 2**16
"""Maximum number of keys or tensors in a file, and of numbers in an array that is kept."""


@dataclass(frozen=True)
class SkippedArray:
    """An array of strings, or a long one of numbers, that was skipped."""

    count: int
    kind: int
    """The number of its values' GGUF type."""
    start: int
    """Its first byte in the file."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry in the file, without its data."""

    shape: tuple[int, ...]
    """In PyTorch's order, the reverse of GGML's."""
    kind: int
    """The number of the GGML type."""
    offset: int
    """The first byte, from the start of the file."""
    size: int
    """Its size in the file, in bytes."""

    @property
    def type(self) -> str:
        """GGML's name of the type, such as `Q4_1`."""
        return _PLAIN[self.kind][0] if self.kind in _PLAIN else str(gguf_package().GGMLQuantizationType(self.kind).name)

    @property
    def dtype(self) -> str:
        """The dtype's safetensors name; `FQ` and the number of the GGML type if the tensor is quantized."""
        return _PLAIN[self.kind][0] if self.kind in _PLAIN else f"FQ{self.kind}"


class Gguf:
    """An open GGUF file: its metadata, and where its tensors are."""

    def __init__(self, path: Path) -> None:
        """Read everything but the tensors' data. Raises CheckpointError for a file that isn't GGUF or is damaged."""
        self.path = path
        self._data = _mapped(path)
        self.metadata, self.tensors = _header(path)

    def array(self, key: str) -> list[Any] | None:
        """The values of the array under a key, also of one that was skipped; None if there is no such key.

        Raises CheckpointError if it isn't an array.
        """
        value = self.metadata.get(key)
        if isinstance(value, SkippedArray):
            reader = _Reader(self.path, self._data, value.start)
            return reader.texts(value.count) if value.kind == _TEXT else reader.numbers(value.kind, value.count)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"{self.path}: the key {key} isn't an array")
        return value

    def row_addresses(self, name: str) -> Tensor:
        """[rows] int64: where in memory each row of a tensor begins, for as long as this file is open.

        In a stack of matrices, rows are numbered across all of them.
        """
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        begins: int = np.frombuffer(self._data, np.uint8).ctypes.data + info.offset
        return begins + torch.arange(rows) * (info.size // rows)

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """[n, bytes] the blocks of a quantized tensor as they lie in the file, for as long as it is open."""
        info = self.tensors[name]
        gguf = gguf_package()
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
        return np.frombuffer(self._data, np.uint8, info.size, info.offset).reshape(-1, size)

    def drop_pages(self, name: str) -> None:
        """Return the memory of a tensor's pages, which are read from the file again if they are needed again."""
        info = self.tensors[name]
        page = mmap.PAGESIZE
        first, stop = -(-info.offset // page) * page, (info.offset + info.size) // page * page
        if stop > first and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def load(self, name: str) -> Tensor:
        """Read one tensor; quantized blocks are dequantized to float32."""
        info = self.tensors[name]
        raw = memoryview(self._data)[info.offset : info.offset + info.size]
        if info.kind in _PLAIN:
            flat = torch.frombuffer(bytearray(raw), dtype=_PLAIN[info.kind][1])
        else:
            gguf = gguf_package()
            blocks = np.frombuffer(bytes(raw), dtype=np.uint8)
            kind = gguf.GGMLQuantizationType(info.kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            flat = torch.from_numpy(gguf.dequantize(blocks.reshape(-1, info.shape[-1] // block * size), kind).copy())
        return flat.reshape(info.shape)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors exist and are the same, byte by byte."""
        if not {name, other} <= self.tensors.keys():
            return False
        one, two = self.tensors[name], self.tensors[other]
        if (one.shape, one.kind) != (two.shape, two.kind):
            return False
        raw = memoryview(self._data)
        return bool(raw[one.offset : one.offset + one.size] == raw[two.offset : two.offset + two.size])


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error


Header = tuple[Mapping[str, Any], Mapping[str, GgufTensor]]
"""The metadata and the tensors of a file."""


def _header(path: Path) -> Header:
    """A file's header, which is read again once the file has changed.

    Loading a model opens its file six times, and skipping its tokenizer's strings takes a tenth of a second. A file of
    this very second may change once more without a new time.
    """
    stat = path.stat()
    settled = time.time_ns() - stat.st_mtime_ns > 10**9
    return _kept_header(path, stat.st_mtime_ns, stat.st_size) if settled else _read_header(path)


@lru_cache(maxsize=8)
def _kept_header(path: Path, *_: int) -> Header:
    return _read_header(path)


def _read_header(path: Path) -> Header:
    reader = _Reader(path, _mapped(path))
    if reader.take(4) != b"GGUF":
        raise CheckpointError(f"{path} isn't a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path} is GGUF version {version}: eyas reads versions 2 and 3, little endian")
    tensors = reader.count("Q", 24)
    metadata = reader.metadata(reader.count("Q", 13))
    return MappingProxyType(metadata), MappingProxyType(reader.tensors(tensors, metadata.get("general.alignment", 32)))


class _Reader:
    """Reads a file's values from a position on."""

    def __init__(self, path: Path, data: mmap.mmap, at: int = 0) -> None:
        self._path = path
        self._data = data
        self._at = at

    def metadata(self, keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in found:
                raise self._bad(f"the key {key} appears twice")
            found[key] = self._value(self.number("I"))
        return found

    def tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._text()
            dimensions = self.number("I")
            if name in found or not 1 <= dimensions <= 4:
                raise self._bad(f"the tensor {name} appears twice, or has {dimensions} dimensions")
            shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            found[name] = (shape, self.number("I"), self.number("Q"))
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise self._bad(f"an invalid alignment of {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (shape, kind, offset) in found.items():
            size = self._size(name, shape, kind)
            if offset % alignment or start + offset + size > len(self._data):
                raise self._bad(f"the tensor {name} {list(shape)} lies outside the file: is it complete?")
            tensors[name] = GgufTensor(shape, kind, start + offset, size)
        return tensors

    def _size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """The size of a tensor in bytes."""
        if kind in _PLAIN:
            return int(prod(shape) * _PLAIN[kind][1].itemsize)
        gguf = gguf_package()
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self._bad(f"the tensor {name} is of the unknown type {kind}") from None
        if shape[-1] % block:
            raise self._bad(f"the tensor {name} {list(shape)} is not made of whole blocks of {block}")
        return int(prod(shape) // block * size)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return _shortest(self.number(_SCALARS[kind])) if kind == _FLOAT32 else self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._bad(f"a value of the unknown type {kind}")
        inner = self.number("I")
        if inner == _TEXT:
            return self._skipped_texts(self.count("Q", 8, max_count=2**32))
        if inner not in _SCALARS:
            raise self._bad("an array of arrays")
        size = struct.calcsize("<" + _SCALARS[inner])
        count = self.count("Q", size, max_count=2**32)
        if count <= _MAX_COUNT:
            return self.numbers(inner, count)
        skipped = SkippedArray(count, inner, self._at)
        self.take(count * size)
        return skipped

    def numbers(self, kind: int, count: int) -> list[Any]:
        format_ = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(format_, self.take(struct.calcsize(format_))))

    def texts(self, count: int) -> list[str]:
        length = struct.Struct("<Q").unpack_from
        data = self._data
        at = self._at
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                texts.append(data[start:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            self._at = start
            raise self._bad(f"text that is not UTF-8: {error}") from error
        return texts

    def _skipped_texts(self, count: int) -> SkippedArray:
        """Skip `count` strings without decoding them: a tokenizer has a hundred thousand."""
        start = at = self._at
        length = struct.Struct("<Q").unpack_from
        data = self._data
        last = len(data) - 8
        for _ in range(count):
            if at > last:
                self._at = at
                raise self._bad("it ends in the middle: is it complete?")
            at += 8 + length(data, at)[0]
        self._at = at
        self.take(0)  # the last string must end inside the file, too
        return SkippedArray(count, _TEXT, start)

    def _text(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"text that is not UTF-8: {error}") from error

    def count(self, format_: str, min_bytes: int, max_count: int = _MAX_COUNT) -> int:
        """Read a count of entries, each of which takes at least `min_bytes`."""
        count: int = self.number(format_)
        if count > max_count or count * min_bytes > len(self._data) - self._at:
            raise self._bad(f"{count} entries where the file has no room for them: is it complete?")
        return count

    def number(self, format_: str) -> Any:
        return struct.unpack("<" + format_, self.take(struct.calcsize("<" + format_)))[0]

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise self._bad("it ends in the middle: is it complete?")
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged at byte {self._at}: {what}")


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747e-06 was written as 1e-05."""
    stored = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if struct.pack("<f", number) == stored), value)


def gguf_package() -> Any:
    """llama.cpp's own Python package, which dequantizes its types and writes files.

    Raises UsageError if it isn't installed.
    """
    try:
        import gguf
    except ImportError:
        raise UsageError("this needs the gguf package: pip install 'eyas[gguf]'") from None
    return gguf
