"""Everything that may have been misread, in the order in which it is tried."""

from __future__ import annotations

from collections.abc import Collection

from eyas.doctor import config_changes, tensor_changes
from eyas.doctor.change import Aspect, Change
from eyas.doctor.reading import Reading
from eyas.target import Target

ASPECTS: tuple[Aspect, ...] = (
    config_changes.taps,
    config_changes.tap_order,
    config_changes.norms,
    config_changes.rope,
    config_changes.ownership,
    config_changes.rotary_pairs,
    tensor_changes.vocabulary,
    tensor_changes.rotary_layout,
    tensor_changes.input_order,
    tensor_changes.swapped_norms,
    tensor_changes.centred_norms,
)


def other_readings(reading: Reading, target: Target, settled: Collection[str] = ()) -> list[Change]:
    """Every change of `reading` in an aspect that isn't settled yet."""
    return [change for aspect in ASPECTS for change in aspect(reading, target) if change.aspect not in settled]


def boundaries(reading: Reading, target: Target) -> set[int]:
    """All boundaries that any of its readings, changed in one aspect or more, reads."""
    shifted = [change.apply(reading).taps for change in config_changes.taps(reading, target)]
    return set(reading.taps).union(*shifted)
