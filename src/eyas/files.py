"""Short hashes of files: what results and weights remember of the data behind them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from eyas.errors import DataError


def file_hash(*paths: Path) -> str:
    """16 hex digits over the contents of the files, one after the other; read piece by piece."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as data:
                while piece := data.read(1 << 22):
                    digest.update(piece)
        except OSError as error:
            raise DataError(f"can't read {path}: {error.strerror}") from error
    return digest.hexdigest()[:16]


# Putting a drafter directory in its place: whole or not at all.


def place_folder(place: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside `place`, then put it there in place of what was there."""
    beside, old = (place.with_name(f".{place.name}.{end}") for end in ("new", "old"))
    for path in (beside, old):
        shutil.rmtree(path, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(beside)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if place.exists():
        os.replace(place, old)
    os.replace(beside, place)
    shutil.rmtree(old, ignore_errors=True)


def copy_folder(source: Path, place: Path) -> None:
    """Replace `place` by a copy of `source`."""

    def write(beside: Path) -> None:
        shutil.copytree(source, beside)

    place_folder(place, write)
