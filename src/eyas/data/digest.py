"""Short hashes of files: what results and weights remember of the data behind them."""

from __future__ import annotations

import hashlib
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
