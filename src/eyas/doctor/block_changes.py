"""Changes of how a block drafter's block is read: its mask token, its size, and which slots predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.doctor.reading import Change, Reading
from eyas.drafters.block.network import BlockConfig
from eyas.targets import Target

_SPECIAL = ("pad", "eos", "bos", "unk")
_SIZES = (8, 16)
"""Sizes of published blocks, which are tried besides one more and one less than the file's."""


def mask_token(reading: Reading, target: Target) -> Iterator[Change]:
    """The target's special tokens, the neighbours of the token in the file, and the ends of the vocabulary."""
    config = reading.config
    if not isinstance(config, BlockConfig):
        return
    read, last = config.mask_token_id, config.vocab_size - 1
    found: dict[int, str] = {}
    for name in _SPECIAL:
        written = getattr(target.config, f"{name}_token_id", None)
        for token in written if isinstance(written, list) else [written]:
            if isinstance(token, int):
                found.setdefault(token, f"the target's {name} token")
    neighbours = ((read + 1, "one more"), (read - 1, "one less"))
    for token, what in ((last, "the last token"), (0, "the first token"), *neighbours):
        found.setdefault(token, what)
    for token, what in found.items():
        if token != read and 0 <= token <= last:
            yield _setting("mask token", f"{token}: {what}", {"mask_token_id": token})


def anchor(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Each slot predicts the token after it, the anchor's too; or its own token, and the anchor's none."""
    config = reading.config
    if isinstance(config, BlockConfig):
        other = not config.sample_from_anchor
        what = "the token after it, the anchor's slot too" if other else "its own token, the anchor's slot none"
        yield _setting("anchor", f"a slot predicts {what}", {"sample_from_anchor": other})


def block_size(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Blocks of one slot more or less, and of published sizes if they aren't smaller than that."""
    config = reading.config
    if isinstance(config, BlockConfig):
        read = config.block_size
        for size in sorted({read - 1, read + 1, *_SIZES} - {read}):
            if size >= max(2, read - 1):
                yield _setting("block size", f"{size} slots", {"block_size": size})


def _setting(aspect: str, name: str, values: Mapping[str, Any]) -> Change:
    ((key, value),) = values.items()
    repair = f'"{key}": {str(value).lower()}'
    return Change(aspect, name, repair, lambda reading: reading.changed(values))
