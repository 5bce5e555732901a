"""What one start leaves in the user's cache for the next: laid-out weights, and verdicts of trials.

A file is named by a hash of everything that it was made of, so none outlives a change: of the model's files or weights,
of eyas's sources, of a library's version. What is damaged is made anew. `EYAS_KEEP=0` reads and writes nothing.
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
"""The environment variable that keeps nothing, if it is 0."""
_CHUNK = 1 << 15
"""Words of 64 bits that are hashed together."""
_SAMPLES, _SAMPLE = 64, 4096
"""How many pieces of a file are looked at, and their size."""


def keeps() -> bool:
    """Whether starts may read and write what is kept: unless `EYAS_KEEP` is 0."""
    return os.environ.get(DISABLE) != "0"


@cache
def code() -> str:
    """A hash of eyas's sources, kernels included, and of the versions of Python, torch and transformers."""
    root = Path(__file__).parent
    found = sha256(repr((sys.version, sorted(versions().items()))).encode())
    for file in sorted(path for kind in ("*.py", "*.h", "*.cpp") for path in root.rglob(kind)):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def identity(files: Iterable[Path]) -> str:
    """A hash that tells files apart: by their names, sizes, times of change and pieces of their contents.

    OSError for unreadable ones.
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
    """The odd numbers [_CHUNK] that a chunk's words are multiplied by, the same in every process."""
    return np.random.default_rng(0).integers(1 << 63, size=_CHUNK, dtype=np.uint64) * 2 + 1


def content_hash(data: Any) -> str:
    """A hash of a buffer of bytes, at the speed of memory: each changed word of a chunk changes it.

    It is of the chunks' sums of words times odd numbers, modulo 2^64. It finds damage; it doesn't resist an attack.
    """
    flat = np.frombuffer(data, np.uint8)
    words = flat[: len(flat) // 8 * 8].view(np.uint64)
    sums = [np.dot(part, _factors()[: len(part)]) for part in np.split(words, range(_CHUNK, len(words), _CHUNK))]
    return sha256(
        np.array(sums, np.uint64).tobytes() + flat[len(words) * 8 :].tobytes() + b"%d" % len(flat)
    ).hexdigest()


def prune(folder: Path, most: int, keep: Path) -> None:
    """Remove the files of a folder that were used longest ago until they take at most `most` bytes, but for `keep`."""
    files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    taken = 0
    for stat, path in sorted(files, key=lambda each: (each[1] != keep, -each[0].st_mtime_ns)):
        taken += stat.st_size
        if taken > most and path != keep:
            with suppress(OSError):  # another process has removed it
                path.unlink()
