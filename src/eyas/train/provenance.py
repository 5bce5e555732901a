"""Where a trained drafter came from, written into its config.json."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eyas.runtime import versions
from eyas.target.fingerprint import fingerprint

__all__ = ["file_hash", "fingerprint", "versions"]


def file_hash(path: Path) -> str:
    """A short hash of a data file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
