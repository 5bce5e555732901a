"""What a controller has learned about a target and drafter, kept in the user's cache for the next engine.

It describes acceptance, not time, so it is valid on any machine, and the drafter that eyas ships comes with one. If it
is missing or damaged, a controller begins with default values. `EYAS_KEEP=0` reads and writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from eyas.cache.entries import is_enabled
from eyas.cache.folder import cache_directory
from eyas.files import write_bytes
from eyas.targets.fingerprint import fingerprint
from eyas.tree.acceptance import Array

_LOG = logging.getLogger("eyas")
_SHIPPED = Path(__file__).parents[2] / "assets" / "experience"


class Experience:
    """A file of arrays by name, which controllers of the same pair and form read and write."""

    def __init__(self, name: str) -> None:
        self._name = f"experience-{name}.safetensors"

    @classmethod
    def of(cls, target: str, network: nn.Module, form: Sequence[object]) -> Experience | None:
        """The experience for a target's fingerprint, a drafter and a controller's `form`; None if nothing is kept.

        It is shared by all formats in which eyas itself can quantize a drafter (`keep_fingerprint`), but not by files
        that hold a drafter in different precision.
        """
        if not is_enabled():
            return None
        pair = (target, fingerprint(network), type(network).__name__, tuple(form))
        return cls(sha256(repr(pair).encode()).hexdigest()[:16])

    @property
    def path(self) -> Path:
        return cache_directory() / "machine" / self._name

    def read(self) -> Mapping[str, Array]:
        """What was learned, here or before the drafter was shipped; empty if nothing is known."""
        for folder in (self.path.parent, _SHIPPED):
            try:
                arrays: dict[str, Array] = load((folder / self._name).read_bytes())
                return arrays
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError) as error:
                _LOG.info("%s can't be read: %s", folder / self._name, error)
        return {}

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Replace the file's contents by `arrays`; if it can't be written, nothing is kept, and the log says so."""
        try:
            write_bytes(self.path, save(dict(arrays)))
        except OSError as error:
            _LOG.info("what was learned about the drafter isn't kept: %s", error)
