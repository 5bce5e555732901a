"""Where a trained drafter came from, written into its config.json."""

from __future__ import annotations

from eyas.data.digest import file_hash
from eyas.runtime import versions
from eyas.target.fingerprint import fingerprint

__all__ = ["file_hash", "fingerprint", "versions"]
