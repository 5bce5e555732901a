"""Panels of packed weights in the user's cache, if requested: packed once, then mapped by every later process.

A mapped file takes no time to read and no memory of its own: processes share its pages, and the system may drop them.
It is written next to its final path, flushed and renamed, and never changed afterwards, so no process maps half a file.
Every byte is checked against the file's hashes before it is used. The most recently used files stay, up to 16 GiB in
all. No file takes more than half of the disk's free space.

A file holds a model's panels in the order in which they are made, an index of them, and the index's length.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.cache.entries import DISABLE, content_hash, is_enabled, prune, source_hash
from eyas.cache.folder import cache_directory
from eyas.files import remove_leftovers, writing
from eyas.runtime import LOADING
from eyas.targets.native.packed import WeightFormat

_LOG = logging.getLogger("eyas")

MAX_BYTES = 16 << 30
"""Maximum total bytes of all files."""
_PROGRESS_SECONDS = 3.0
"""Seconds between two lines about progress."""
_ALIGNMENT = 4096
_END = struct.Struct("<Q8s")
_MAGIC = b"eyaspan1"


Pack = Callable[[], tuple[WeightFormat, Tensor]]
"""Makes the kind and the panels of a weight."""


class _StoredPanels(NamedTuple):
    """Where the panels [panels, bytes] of a weight are in the file."""

    kind: int
    out: int
    panels: int
    bytes: int
    offset: int
    hash: str


class _PanelSource(Protocol):
    """A source of panels, one weight after the other."""

    def next(self, pack: Pack, out: int) -> tuple[WeightFormat, Tensor]:
        """The kind and panels of the next weight, of `out` outputs: by `pack`, or read from a file instead."""

    def close(self, complete: bool) -> None:
        """End the source after the last weight; `complete` unless loading failed."""


class _MappedPanels:
    """Panels of a file that an earlier process wrote."""

    def __init__(self, path: Path, entries: list[_StoredPanels], pages: mmap.mmap) -> None:
        self._path = path
        self._entries = entries
        self._pages = pages
        self._taken = 0

    def next(self, pack: Pack, out: int) -> tuple[WeightFormat, Tensor]:
        entry = self._entries[self._taken] if self._taken < len(self._entries) else None
        self._taken += 1
        if entry is None or entry.out != out:  # a bug, or a file from elsewhere
            self._taken = len(self._entries) + 1
            return pack()
        flat = torch.frombuffer(self._pages, dtype=torch.uint8, count=entry.panels * entry.bytes, offset=entry.offset)
        return WeightFormat(entry.kind), flat.view(entry.panels, entry.bytes)

    def close(self, complete: bool) -> None:
        if complete and self._taken != len(self._entries):
            _LOG.warning("%s doesn't hold the panels of this model: it will be written again", self._path)
            self._path.unlink(missing_ok=True)


class _WrittenPanels:
    """Panels that are packed now and written for later processes."""

    def __init__(self, path: Path, file: IO[bytes], stack: ExitStack) -> None:
        self._path = path
        self._file = file
        self._stack = stack
        self._entries: list[_StoredPanels] = []
        self._room = min(MAX_BYTES, shutil.disk_usage(path.parent).free // 2)
        self._failure: Exception | None = None
        self._said = time.monotonic()
        LOADING.info("packing the weights for this processor, kept in %s for later starts", path)

    def next(self, pack: Pack, out: int) -> tuple[WeightFormat, Tensor]:
        kind, panels = pack()
        if self._failure is None:
            try:
                self._write(kind, out, panels)
            except OSError as error:
                self._failure = error
        return kind, panels

    def _write(self, kind: WeightFormat, out: int, panels: Tensor) -> None:
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        if self._file.tell() + panels.nbytes > self._room:
            raise OSError(f"they don't fit the limit of {self._room >> 20} MiB")
        data: Any = panels.numpy()
        self._entries.append(
            _StoredPanels(kind, out, len(panels), panels.shape[1], self._file.tell(), content_hash(data))
        )
        self._file.write(data)
        if time.monotonic() - self._said > _PROGRESS_SECONDS:
            self._said = time.monotonic()
            LOADING.info("packed %.0f MB", self._file.tell() / 1e6)

    def close(self, complete: bool) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            index = json.dumps(self._entries).encode()
            self._file.write(index + _END.pack(len(index), _MAGIC))
            if complete:
                size = self._file.tell() / 1e6
                self._stack.close()
                LOADING.info("wrote %.0f MB of packed weights to %s (%s=0 keeps nothing)", size, self._path, DISABLE)
                _forget_pages(self._path)
                prune(self._path.parent, MAX_BYTES, self._path)
                return
        except OSError as error:
            _LOG.info("packed weights aren't cached: %s", error)
        _discard(self._stack)


def _forget_pages(path: Path) -> None:
    """Drop a new file's pages so that it is read from disk: the system reads larger pages than those it has written."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _discard(stack: ExitStack) -> None:
    """Leave a block of `writing` without keeping its file."""
    try:
        with stack:
            raise _DiscardedError
    except _DiscardedError:
        pass


class _DiscardedError(Exception):
    """Raised to discard the file that is being written."""


class _CachedPanels:
    """The panels of a model; their file is looked for when the first panels are needed."""

    def __init__(self, made_of: Callable[[], str]) -> None:
        self._made_of = made_of
        self._shelf: _PanelSource | None = None
        self._failed = False

    def next(self, pack: Pack, out: int) -> tuple[WeightFormat, Tensor]:
        if self._shelf is None and not self._failed:
            try:
                self._shelf = _open(self._made_of())
            except OSError as error:
                _LOG.info("packed weights aren't cached: %s", error)
                self._failed = True
        return pack() if self._shelf is None else self._shelf.next(pack, out)

    def close(self, complete: bool) -> None:
        if self._shelf is not None:
            self._shelf.close(complete)


def _open(made_of: str) -> _PanelSource:
    """Open the panels of the model that `made_of` describes; one process writes them, others wait. Raises OSError."""
    name = sha256(f"{source_hash()} {made_of}".encode()).hexdigest()[:24]
    path = cache_directory() / "panels" / f"{name}.panels"
    found = _mapped(path)
    if found is not None:
        return found
    stack = ExitStack()
    file: Any = stack.enter_context(writing(path, "wb"))
    remove_leftovers(path.parent)
    found = _mapped(path)  # another process may have written it meanwhile
    if found is not None:
        _discard(stack)
        return found
    return _WrittenPanels(path, file, stack)


def _mapped(path: Path) -> _MappedPanels | None:
    """Map the panels of a file; None if there is none or it is damaged (with a warning)."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pages = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except FileNotFoundError:
        return None
    except ValueError:  # it is empty
        entries = None
    else:
        entries = _entries(pages)
    if entries is None:
        _LOG.warning("%s is damaged: its weights are packed again", path)
        path.unlink(missing_ok=True)
        return None
    os.utime(path)  # mark it as used
    return _MappedPanels(path, entries, pages)


def _entries(pages: mmap.mmap) -> list[_StoredPanels] | None:
    """The index of a file; None unless all of its parts have the hashes in the index."""
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the file is read in pages of 2 MiB, which MADV_WILLNEED would prevent
        pages.madvise(mmap.MADV_HUGEPAGE)
    try:
        size, magic = _END.unpack(pages[-_END.size :])
        index = pages[len(pages) - _END.size - size : len(pages) - _END.size]
        entries = [_StoredPanels(*entry) for entry in json.loads(index)]
        whole = magic == _MAGIC and all(
            content_hash(memoryview(pages)[entry.offset : entry.offset + entry.panels * entry.bytes]) == entry.hash
            for entry in entries
        )
    except (struct.error, ValueError, TypeError):
        return None
    return entries if whole else None


_KEPT: ContextVar[_PanelSource | None] = ContextVar("the panels of the model that is being loaded", default=None)


@contextmanager
def cached_panels(keep: bool, made_of: Callable[[], str]) -> Iterator[None]:
    """If asked to `keep` them, cache the panels of the model that is loaded in this context.

    `made_of` says what they depend on, when needed.
    """
    if not (keep and is_enabled()):
        yield
        return
    shelf = _CachedPanels(made_of)
    token = _KEPT.set(shelf)
    complete = False
    try:
        yield
        complete = True
    finally:
        _KEPT.reset(token)
        shelf.close(complete)


def cached_layout(pack: Pack, out: int) -> tuple[WeightFormat, Tensor]:
    """The kind and panels of a weight of `out` outputs: what `pack` makes, or made before within `cached_panels`."""
    shelf = _KEPT.get()
    return pack() if shelf is None else shelf.next(pack, out)
