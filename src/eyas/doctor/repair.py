"""Writes a corrected copy of a misread drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.doctor.reading import Change, Reading
from eyas.drafters.block.network import BlockConfig
from eyas.drafters.checkpoint import open_checkpoint, save_network
from eyas.drafters.config import FusedTapsConfig
from eyas.errors import ExportError
from eyas.files import refuse_used, writing_folder
from eyas.targets import Target


def apply_changes(reading: Reading, changes: Sequence[Change]) -> Reading:
    """The reading with all changes and ascending taps. Raises ExportError if no file can express a change."""
    for change in changes:
        if not change.written:
            raise ExportError(f"{change.aspect}: {change.name}: files of {reading.kind.name} drafters can't express it")
        reading = change.apply(reading)
    return _rising(reading)


def write_repaired(
    reading: Reading, provenance: Mapping[str, Any], path: Path, target: Target, check: Callable[[Reading], None]
) -> None:
    """Write the drafter into the new folder `path`, read it back, and call `check` with that.

    If `check` raises, nothing is left behind. Raises UsageError if `path` exists and isn't empty.
    """
    refuse_used(path)
    config = reading.config
    if not reading.kind.fixed_taps:
        config = config.model_copy(update={"taps": reading.taps})
    network = reading.kind.blank(config).fill(reading.tensors)
    with writing_folder(path) as folder:
        save_network(network, folder, provenance or None)
        check(Reading.of(open_checkpoint(folder, layers=target.num_layers), target))


def _rising(reading: Reading) -> Reading:
    """The same network with ascending taps, as all engines collect them; `fc` and norms are reordered to match."""
    order = sorted(range(len(reading.taps)), key=lambda i: reading.taps[i])
    if order == list(range(len(order))) or not isinstance(reading.config, FusedTapsConfig | BlockConfig):
        return reading
    size = reading.config.target_hidden_size
    changed: dict[str, Tensor | None] = {}
    for name, dim in (("fc.weight", 1), ("input_norm.weight", 0)):
        if name in reading.tensors:
            blocks = torch.split(reading.tensors[name], size, dim)
            changed[name] = torch.cat([blocks[i] for i in order], dim)
    norms = {f"fc_norm.{to}.weight": f"fc_norm.{i}.weight" for to, i in enumerate(order)}
    changed |= {to: reading.tensors[name] for to, name in norms.items() if name in reading.tensors}
    return replace(reading.changed(tensors=changed), taps=tuple(reading.taps[i] for i in order))
