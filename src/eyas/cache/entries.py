"""Entries of the user's cache: weights as laid out, verdicts of trials, what a controller has learned.

A file's name is a hash of everything it was made from, so none outlives a change of the model's files or weights, of
eyas's sources, or of a library's version. Damaged files are rebuilt. `EYAS_KEEP=0` disables reading and writing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from eyas.runtime import versions

DISABLE = "EYAS_KEEP"
"""Environment variable that disables the cache if it is 0."""
_CHUNK = 1 << 15
"""Number of 64-bit words that are hashed together."""
_SAMPLES, _SAMPLE = 64, 4096
"""Number and size in bytes of the samples read from a file."""


def is_enabled() -> bool:
    """Whether the cache may be read and written: unless `EYAS_KEEP` is 0."""
    return os.environ.get(DISABLE) != "0"


@cache
def source_hash() -> str:
    """A hash of eyas's sources, kernels included, and of the versions of Python, torch and transformers."""
    root = Path(__file__).parents[1]
    found = sha256(repr((sys.version, sorted(versions().items()))).encode())
    for file in sorted(path for kind in ("*.py", "*.h", "*.cpp") for path in root.rglob(kind)):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def files_hash(files: Iterable[Path]) -> str:
    """A hash of files' names, sizes, modification times, and samples of their contents.

    Raises OSError for unreadable files.
    """
    found = sha256()
    for file in files:
        stat = file.stat()
        found.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
        with file.open("rb") as data:
            for number in range(_SAMPLES):
                data.seek(max(0, stat.st_size - _SAMPLE) * number // (_SAMPLES - 1))
                found.update(data.read(_SAMPLE))
    return found.hexdigest()


@cache
def _factors() -> Any:
    """Odd multipliers [_CHUNK] for the words of a chunk, the same in every process."""
    return np.random.default_rng(0).integers(1 << 63, size=_CHUNK, dtype=np.uint64) * 2 + 1


def content_hash(data: Any) -> str:
    """A hash of a byte buffer, computed at memory speed; changing one word of a chunk always changes it.

    It hashes each chunk's dot product of words and odd multipliers, modulo 2^64. It detects damage, not attacks.
    """
    flat = np.frombuffer(data, np.uint8)
    words = flat[: len(flat) // 8 * 8].view(np.uint64)
    sums = [np.dot(part, _factors()[: len(part)]) for part in np.split(words, range(_CHUNK, len(words), _CHUNK))]
    return sha256(
        np.array(sums, np.uint64).tobytes() + flat[len(words) * 8 :].tobytes() + b"%d" % len(flat)
    ).hexdigest()


def prune(folder: Path, max_bytes: int, keep: Path) -> None:
    """Remove a folder's least recently used files until the rest take at most `max_bytes`; `keep` always stays."""
    files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    taken = 0
    for stat, path in sorted(files, key=lambda each: (each[1] != keep, -each[0].st_mtime_ns)):
        taken += stat.st_size
        if taken > max_bytes and path != keep:
            with suppress(OSError):  # another process has removed it
                path.unlink()
