"""The search for the reading that the weights were trained for.

Every other reading is tried on a part of the answers, and on all of them if it may still be the best. The best winner
is adopted, and the search continues from it, so that several faults are found one after another. Changes that were
clearly worse are not tried again: one that does harm beside another fault isn't needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from eyas.doctor import config_changes, tensor_changes
from eyas.doctor.measure import Gain, Measurement, gain, measure
from eyas.doctor.reading import Aspect, Change, Reading
from eyas.doctor.transcript import Transcript
from eyas.targets import Target

PART = 4
"""Readings are tried on one in this many answers first."""
_SURE = 3.0
"""The standard errors by which a gain on that part may be off."""
MOST_FAULTS = 4
"""The most faults that are searched for, one after another."""

ASPECTS: tuple[Aspect, ...] = (
    config_changes.taps,
    config_changes.tap_order,
    config_changes.norms,
    config_changes.rope,
    config_changes.ownership,
    config_changes.rotary_pairs,
    config_changes.mask_token,
    config_changes.anchor,
    config_changes.block_size,
    tensor_changes.vocabulary,
    tensor_changes.rotary_layout,
    tensor_changes.input_order,
    tensor_changes.swapped_norms,
    tensor_changes.centred_norms,
)
"""The aspects that may have been misread, in the order in which they are tried."""

Progress = Callable[[str, int, int | None], None]
"""Called with the stage's name, the number of its steps done, and their total (None if unknown)."""


@dataclass(frozen=True)
class TriedChange:
    """A change of a reading and its gain."""

    change: Change
    gain: Gain
    accepted: tuple[float, ...]
    """Acceptance by chain position; for a change dropped early, that of the base plus the difference on the part,
    between 0 and 1."""
    wins: bool
    """Whether the gain is convincing."""


@dataclass(frozen=True)
class Adopted:
    """A change that won, and the measurement of the reading with it."""

    trial: TriedChange
    measured: Measurement


@dataclass(frozen=True)
class SearchResult:
    """The best reading and how it was found."""

    as_is: Measurement
    """Measurement of the reading that the search began with."""
    tried: tuple[TriedChange, ...]
    """All changes of that reading that were tried."""
    adopted: tuple[Adopted, ...]
    """The changes that led to the best reading, in order."""
    reading: Reading
    """The best reading, which may be the one that the search began with."""
    measured: Measurement
    """Measurement of the best reading on all answers."""


class ReadingSearch:
    """Searches the readings of one drafter on one transcript, with chains of `length` tokens."""

    def __init__(self, target: Target, transcript: Transcript, length: int, progress: Progress = lambda *_: None):
        self._target, self._length, self._progress = target, length, progress
        self._whole = transcript
        self._part = transcript.every(PART) if len(transcript.tokens) >= 2 * PART else transcript
        self._given_up: set[tuple[str, str]] = set()

    def measure(self, reading: Reading) -> Measurement:
        """Measure the reading on all answers."""
        return measure(reading, self._whole, self._target, self._length)

    def run(self, reading: Reading) -> SearchResult:
        """Search from `reading`, the one with which eyas loads the files, until no change wins."""
        as_is = here = self.measure(reading)
        adopted: list[Adopted] = []
        first: tuple[TriedChange, ...] = ()
        while len(adopted) < MOST_FAULTS:
            trials = self._try_all(reading, here, [each.trial.change.aspect for each in adopted])
            first = first or tuple(trials)
            winners = [trial for trial in trials if trial.wins]
            if not winners:
                break
            best = max(winners, key=lambda trial: trial.gain.mean)
            reading = best.change.apply(reading)
            here = self.measure(reading)
            adopted.append(Adopted(best, here))
        return SearchResult(as_is, first, tuple(adopted), reading, here)

    def _try_all(self, reading: Reading, base: Measurement, settled: list[str]) -> list[TriedChange]:
        """Try all changes of `reading` except in `settled` aspects; `base` is its measurement on all answers."""
        found = other_readings(reading, self._target, settled)
        changes = [change for change in found if (change.aspect, change.name) not in self._given_up]
        before = measure(reading, self._part, self._target, self._length)
        on_part = []
        for number, change in enumerate(changes):
            self._progress(f"readings, round {len(settled) + 1}", number, len(changes))
            other = measure(change.apply(reading), self._part, self._target, self._length)
            on_part.append((change, other, gain(other, before)))
        # measure on all answers only those that may gain more than the best of them certainly does
        least = max((gained.mean - _SURE * gained.error for _, _, gained in on_part), default=0.0)
        trials = []
        for change, other, gained in on_part:
            most = gained.mean + _SURE * gained.error
            if most < 0:
                self._given_up.add((change.aspect, change.name))
            if gained.error and most >= max(least, 0.0):
                whole = self.measure(change.apply(reading))
                final = gain(whole, base)
                trials.append(TriedChange(change, final, whole.accepted, final.convincing(len(changes))))
            else:
                shifted = estimated(base.accepted, before.accepted, other.accepted)
                trials.append(TriedChange(change, gained, shifted, wins=False))
        return trials


def estimated(base: Sequence[float], before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    """Acceptance on all answers, `base` without a change, that moved on a part of them from `before` to `after`."""
    moved = (whole + new - old for whole, old, new in zip(base, before, after, strict=True))
    return tuple(min(max(rate, 0.0), 1.0) for rate in moved)


def other_readings(reading: Reading, target: Target, settled: Collection[str] = ()) -> list[Change]:
    """All changes of a reading, except in `settled` aspects."""
    return [change for aspect in ASPECTS for change in aspect(reading, target) if change.aspect not in settled]


def needed_boundaries(reading: Reading, target: Target) -> set[int]:
    """All boundaries that are read by a reading, or by any that the search may reach from it."""
    shifted = [change.apply(reading).taps for change in config_changes.taps(reading, target)]
    return set(reading.taps).union(*shifted)
