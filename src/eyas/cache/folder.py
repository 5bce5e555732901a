"""The folder of the user's cache: where it is, what is in it, and clearing it. Imports no torch.

Everything there can be made again. Its parts are written by `gguf_target.py`, `machine.py`, the controller's
`experience.py`, and by `library.py`, `verdicts.py` and `panel_files.py` of the native passes.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from eyas.errors import UsageError

_LOG = logging.getLogger("eyas")

PARTS = {
    "gguf": "configs and tokenizers of GGUF files",
    "machine": "measurements, and what auto has learned",
    "native": "compiled kernels",
    "panels": "weights as laid out for this processor",
    "verdicts": "results of load trials",
}
"""Folder of the cache -> what it holds."""


def cache_directory() -> Path:
    """The folder for files that can be recreated: `$XDG_CACHE_HOME/eyas`, else `~/.cache/eyas`.

    A user without a home gets a temporary folder. Raises PermissionError if somebody else could have filled it.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "eyas"
    except RuntimeError:  # a user without a home
        return _temporary_folder()


def made_in_cache(part: str, make: Callable[[Path], Path]) -> Path:
    """The result of `make(folder)` in the folder `part` of the cache: a path that this process can't do without.

    If it can't be written there, it is made in a temporary folder, as for a user without a home. Raises OSError if
    that can't be written either.
    """
    try:
        return make(cache_directory() / part)
    except OSError as error:
        folder = _temporary_folder()
        _report_temporary(folder, str(error).partition(": ")[0])
        return make(folder / part)


def _temporary_folder() -> Path:
    """This user's folder among temporary files. Raises OSError."""
    return _own_folder(Path(tempfile.gettempdir()) / f"eyas-{os.getuid()}")


@cache
def _report_temporary(folder: Path, reason: str) -> None:
    """Log once per process that a temporary folder stands in for the cache."""
    _LOG.warning(
        "the cache can't be written (%s): required files go to %s, others aren't kept; set XDG_CACHE_HOME to a "
        "writable folder to keep all of them",
        reason,
        folder,
    )


def _own_folder(path: Path) -> Path:
    """A folder in a shared place, created if missing. Raises PermissionError unless only this user can write to it."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} isn't a folder that only this user can write, so nothing is loaded from it: "
            "remove it, or set XDG_CACHE_HOME"
        )
    return path


class Part(NamedTuple):
    """A folder of the cache."""

    name: str
    about: str
    entries: int
    """Files, or folders that belong to one model."""
    bytes: int
    latest: float
    """When an entry was last written or used, in seconds since the epoch; 0 = there is none."""


def contents() -> list[Part]:
    """The parts of the cache that exist, the largest first."""
    found = []
    for folder in _folders():
        entries = [(_size(entry), entry.stat().st_mtime) for entry in folder.iterdir()]
        about = PARTS.get(folder.name, "of another version of eyas")
        size = sum(size for size, _ in entries)
        found.append(Part(folder.name, about, len(entries), size, max((used for _, used in entries), default=0.0)))
    return sorted(found, key=lambda part: -part.bytes)


def clear(parts: Collection[str] = (), unused_for: float = 0.0) -> int:
    """Remove the entries of these parts (none named = of all) that haven't been used for this many seconds.

    Processes that are running keep what they have opened. Returns the bytes that were freed; raises UsageError for an
    unknown part.
    """
    known = {*PARTS, *(folder.name for folder in _folders())}
    if unknown := sorted(set(parts) - known):
        raise UsageError(f"the cache has no part {unknown[0]}: it has {', '.join(sorted(known))}")
    freed = 0
    before = time.time() - unused_for
    for folder in _folders():
        for entry in folder.iterdir() if not parts or folder.name in parts else ():
            with suppress(FileNotFoundError):  # another process has removed it
                if entry.stat().st_mtime <= before:
                    freed += _size(entry)
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return freed


def _folders() -> Iterator[Path]:
    root = cache_directory()
    return (folder for folder in sorted(root.iterdir()) if folder.is_dir()) if root.is_dir() else iter(())


def _size(entry: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]
    return sum(path.stat().st_size for path in files)
