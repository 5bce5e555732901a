"""The cost model: seconds of a target pass, of drafting and of the drafter's observation, corrected in every round.

A pass over T tokens of R rows takes `pass(T) + row(R) + columns read * column`, plus `padding(positions)` if its rows
differ in length, because attention pads them to the longest. A draft reads the roots' states and then runs a pass over
R x width positions for each further level; observation is a drafter's pass over pairs. Curves are linear between
measured points. `CostTable` holds what start-up calibration measured; `CostModel` corrects it with every round.

Corrections are robust against noise (`Residuals`). A round's error, the logarithm of measured / predicted, has two
parts: the machine's speed at the time, which the rounds around it share, and the error of the prediction for that
kind and size. They can't be estimated one by one, since a size seen only in slow times would be blamed for them. So
both are fitted to the last rounds together: the speed at a time is the median over the rounds around it, and the error
of a size is the median of what remains, alternately until both agree. A burst of noise then changes nothing but the
speed at its time, and a rare probe of another size is compared with the rounds around it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError, model_validator
from typing_extensions import Self

from eyas.config import StrictModel
from eyas.engine.controller.records import RoundRecord
from eyas.errors import UsageError
from eyas.files import write_text

Array = npt.NDArray[np.float64]

KINDS = ("pass", "draft", "observe", "plain")
_PASS, _DRAFT, _OBSERVE, _PLAIN = range(len(KINDS))
_INSTANT = 1e-9
"""The least seconds that are ever predicted."""
_SIZES: Array = np.unique(np.rint(2.0 ** np.arange(0.0, 14.25, 0.25)))
"""Sizes (tokens) of the larger passes that a pass is compared with. They reach 16384: lookahead windows are wide."""
SETTLING = 0.02
"""Seconds after a draft, or after an answer began, in which plain rounds don't measure plain decoding: CPU caches are
full of other weights, so the first round takes up to 50% longer, and the fourth of a 135M still 10%."""
_ROUNDS = 240
"""The number of rounds that corrections are fitted to."""
_WINDOW = 9
"""The number of rounds around a time from which its speed is estimated."""
_TURNS = 3
"""Iterations in which speed and errors are fitted alternately."""
_OCTAVE = 2
"""Size bins in an octave; sizes in one bin share an error."""
_SIZE_BINS = 12 * _OCTAVE + 1
_NEAR: Array = 2.0 ** (-2.5 * np.abs(np.subtract.outer(np.arange(_SIZE_BINS), np.arange(_SIZE_BINS))))
"""The weight of a bin in its own and its neighbors' corrections. They are smooth because plans compare nearby sizes."""


class CostError(NamedTuple):
    """The prediction error of one kind of work in a round."""

    kind: int
    """The kind of work, as an index into `KINDS`."""
    size: float
    """Tokens, positions or pairs, depending on the kind."""
    error: float
    """log(measured / predicted), where the prediction is the table's, without corrections."""


class Residuals:
    """The machine's speed over time, and prediction errors by kind and size.

    Sizes from 1 to 4096 fall into logarithmic bins. Neighboring bins are pooled; errors are constant beyond the sizes
    seen.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[CostError, ...]] = deque(maxlen=_ROUNDS)
        self._errors: Array = np.zeros((len(KINDS), _SIZE_BINS))
        self._seen: npt.NDArray[np.bool_] = np.zeros((len(KINDS), _SIZE_BINS), np.bool_)
        self._corrections: Array = np.zeros((len(KINDS), _SIZE_BINS))
        self._log_speed = 0.0
        self._settled = True

    def learn(self, parts: tuple[CostError, ...]) -> None:
        """Record the errors of a round, its pass first."""
        self._rounds.append(parts)
        self._settled = False

    def settle(self) -> None:
        """Fit speed and errors to the recorded rounds; sizes that don't occur in them keep their errors."""
        if self._settled:
            return
        self._settled = True
        rounds = list(self._rounds)
        time = np.repeat(np.arange(len(rounds)), [len(parts) for parts in rounds])
        # not np.array, which takes a hundred times as long with named tuples
        numbers = chain.from_iterable(chain.from_iterable(rounds))
        table = np.fromiter(numbers, np.float64).reshape(-1, len(CostError._fields))  # [n, 3]
        at = table[:, 0].astype(np.int64) * _SIZE_BINS + _size_bins(table[:, 1])
        raw = table[:, 2]
        first = np.flatnonzero(np.diff(time, prepend=-1))  # the first part of each round is its pass
        errors = self._errors.ravel()
        seen = self._seen.ravel()
        present, group = np.unique(at, return_inverse=True)
        counts = np.bincount(group)
        starts = counts.cumsum() - counts
        low, high = starts + (counts - 1) // 2, starts + counts // 2  # the middle of each group, once sorted
        before = errors.copy()
        known = at[first][seen[at[first]]]
        for _ in range(_TURNS):
            speed = _running_median(raw[first] - errors[at[first]])
            left = raw - speed[time]
            left = left[np.lexsort((left, group))]
            errors[present] = (left[low] + left[high]) / 2.0  # medians
            if len(known):
                # noise is skewed, so medians lie below means: without this, all sizes seen now would drift away from
                # those that aren't, and during plain rounds trees would look more and more expensive
                errors[present] -= np.mean(errors[known] - before[known])
        seen[present] = True
        # an error that all sizes share is part of the speed
        shared = float(np.average(errors[at[first]]))
        errors[seen] -= shared
        self._log_speed = float(speed[-1]) + shared
        weight = self._seen @ _NEAR
        self._corrections = (self._seen * self._errors) @ _NEAR / np.where(weight > 0.0, weight, 1.0)

    @property
    def speed(self) -> float:
        """The factor by which all work takes longer now than the table says."""
        return math.exp(self._log_speed)

    def factor(self, kind: int, size: Array) -> Array:
        """The factor by which to multiply the table's prediction for `size`."""
        at = np.log2(np.maximum(size, 1.0)) * _OCTAVE
        out: Array = np.exp(np.interp(at, np.arange(_SIZE_BINS), self._corrections[kind]) + self._log_speed)
        return out


def _size_bins(sizes: Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = np.rint(np.log2(np.maximum(sizes, 1.0)) * _OCTAVE).astype(np.int64)
    return np.minimum(found, _SIZE_BINS - 1)


def _running_median(series: Array) -> Array:
    """The median of the `_WINDOW` entries around each entry of `series`, which is reflected at both ends.

    It follows a jump at once, where a mean would attribute half of it to the sizes seen just before and after.
    """
    around = np.lib.stride_tricks.sliding_window_view(np.pad(series, _WINDOW // 2, mode="symmetric"), _WINDOW)
    out: Array = np.median(around, axis=1)
    return out


class Curve(StrictModel):
    """Seconds by size: linear between points, constant before the first, extrapolated beyond the last two."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising or min(self.seconds) < 0:
            raise ValueError("a curve needs as many sizes as seconds, ascending sizes, and no negative seconds")
        return self

    def of(self, size: float) -> float:
        """The seconds for one `size`, as `at` gives them, but without arrays."""
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0]
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        slope = (self.seconds[right] - self.seconds[right - 1]) / (high - low)
        if size > high:
            return self.seconds[right] + (size - high) * max(slope, 0.0)
        return self.seconds[right - 1] + (size - low) * slope

    def at(self, size: Array | float) -> Array:
        """The seconds for `size`, which may be an array."""
        x = np.asarray(size, dtype=np.float64)
        inside = np.interp(x, self.sizes, self.seconds)
        if len(self.sizes) == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        out: Array = inside + np.maximum(x - self.sizes[-1], 0.0) * max(slope, 0.0)
        return out


class CostTable(StrictModel):
    """Costs as calibration measured them on one machine, for one target and drafter; saved as JSON."""

    measured_on: str
    """Machine, models and precision as a sentence; a table with another one is refused."""
    pass_by_tokens: Curve
    """A pass of one row over T tokens."""
    pass_by_rows: Curve
    """The additional time of a pass over R rows, compared with one row of as many tokens."""
    column_seconds: float
    """The time that each cache column of each row adds to a pass."""
    padding_by_places: Curve
    """The additional time of a pass whose rows differ in length, by padded positions."""
    draft_by_rows: Curve
    """The first level of a draft, computed from the roots' states."""
    level_by_positions: Curve
    """A further level of a draft, by its R x width positions."""
    observe_by_pairs: Curve
    """The drafter's pass over the pairs of a round."""
    read_by_pairs: Curve | None = None
    """Reading the pairs before a draft, where observing only stores them; None = observing reads them."""

    @staticmethod
    def read(path: Path, measured_on: str) -> CostTable:
        """The table saved at `path`; UsageError if the file isn't one, or was measured on something else."""
        try:
            table = CostTable.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"can't read the costs in {path}: {error.strerror}") from error
        except (ValidationError, ValueError) as error:
            raise UsageError(f"{path} is not a file of costs: {error}; delete it to measure again") from error
        if table.measured_on != measured_on:
            raise UsageError(
                f"the costs in {path} were measured on {table.measured_on!r}, but this is {measured_on!r}: "
                "delete the file to measure again, or choose another"
            )
        return table

    def save(self, path: Path) -> None:
        """Write the table to `path` as JSON; UsageError if that fails."""
        if not path.parent.is_dir():
            raise UsageError(f"can't write the costs to {path}: there is no folder {path.parent}")
        try:
            write_text(path, self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"can't write the costs to {path}: {error.strerror}") from error


class Work(NamedTuple):
    """The sizes of a round's work, whose rows held `lengths` tokens, and its seconds; a size of 0 wasn't measured."""

    rows: int
    lengths: Sequence[int]
    tokens: int
    pass_seconds: float
    plain: bool = False
    """Whether it was a plain round."""
    padded: int = 0
    """Padded positions of the pass."""
    width: int = 0
    levels: int = 0
    draft_seconds: float = 0.0
    pairs: int = 0
    observe_seconds: float = 0.0


class CostModel:
    """A cost table with running corrections. Sizes may be arrays.

    Only batches of similar size share corrections: the same number of tokens in fewer rows means longer trees, whose
    errors would otherwise distort the cost of the first nodes in batches of many rows.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.overhead = 0.0
        """Additional host seconds of a round with drafts, compared with a plain one; its passes aren't included."""
        self._residuals: defaultdict[int, Residuals] = defaultdict(Residuals)
        self._waiting: list[Work] = []
        """Rounds since the costs were fitted."""
        self._readings: dict[tuple[int, int], float] = {}

    def pass_seconds(self, tokens: Array | float, rows: int, lengths: Sequence[int]) -> Array:
        """Seconds of a target pass over `tokens` tokens of `rows` rows whose caches hold `lengths` tokens.

        Never more than those of a larger pass: a size that was seen only once, in a slow moment, might otherwise look
        so expensive that it would never be tried again.
        """
        size = np.asarray(tokens, dtype=np.float64)
        larger = self._corrected_pass(_SIZES, rows, lengths)
        least = np.minimum.accumulate(larger[::-1])[::-1]
        bound = least[np.minimum(np.searchsorted(_SIZES, size), len(_SIZES) - 1)]
        return np.minimum(self._corrected_pass(size, rows, lengths), bound)

    def plain_seconds(self, rows: int, lengths: Sequence[int]) -> float:
        """Seconds of a plain round: a pass over the rows' last tokens alone, corrected by errors of its own kind.

        Other work in rounds with trees must not make plain rounds look expensive, because few of them are seen.
        """
        tokens = np.asarray(float(rows))
        return float(self._bare_pass(tokens, rows, lengths) * self._corrections(rows).factor(_PLAIN, tokens))

    def padding_seconds(self, padding: Array | float, rows: int) -> Array:
        """Seconds that `padding` padded positions, in a batch of `rows` rows of unequal length, add to a pass."""
        size = np.asarray(padding, dtype=np.float64)
        bare = np.where(size > 0.0, self.table.padding_by_places.at(size), 0.0)
        return bare * self._corrections(rows).factor(_PASS, np.asarray(float(rows)))

    def draft_seconds(self, rows: int, width: Array | float, levels: Array | float) -> Array:
        """Seconds of drafting `levels` levels with a beam of `width` in `rows` rows."""
        positions = rows * np.asarray(width, dtype=np.float64)
        bare = self._bare_draft(rows, positions, np.asarray(levels, dtype=np.float64))
        return bare * self._corrections(rows).factor(_DRAFT, positions)

    def observe_seconds(self, pairs: Array | float, rows: int) -> Array:
        """Seconds of observing `pairs` committed pairs of `rows` rows."""
        size = np.asarray(pairs, dtype=np.float64)
        return self.table.observe_by_pairs.at(size) * self._corrections(rows).factor(_OBSERVE, size)

    def reading_seconds(self, pairs: int, rows: int) -> float:
        """Seconds of reading deferred pairs, their number rounded up to one of four per octave; cached until `settle`.

        The cache matters because every round needs them, and each plain round defers one more pair.
        """
        step = 1 << max(0, pairs.bit_length() - 3)
        size = -(-pairs // step) * step
        if (size, rows) not in self._readings:
            read = self.table.read_by_pairs
            seconds = (
                self.observe_seconds(size, rows) if read is None else read.of(size) * self._corrections(rows).speed
            )
            self._readings[size, rows] = float(seconds)
        return self._readings[size, rows]

    def learn(self, work: Work) -> None:
        """Record the measured seconds of a round; times of 0 are ignored.

        The comparison with the table waits for `settle`, because Python is slow right after a pass, whose weights fill
        the CPU caches.
        """
        if work.pass_seconds > 0.0:
            self._waiting.append(work)

    def learn_round(self, record: RoundRecord, *, cold: bool, fresh: bool, counted: bool) -> None:
        """Record a round.

        A `cold` one, if plain, isn't representative. `fresh`: whether drafting began with reading deferred pairs, or
        prompts; `counted`: whether the host knows the tree's nodes and the time of drafting.
        """
        tree = None if record.draft is None else record.draft.tree
        in_vain = tree is not None and tree.lookup.alone and not tree.size  # nothing found: a plain pass
        padded = record.padded if counted else 0
        if tree is None or in_vain or record.spec is None:
            if (record.spec is None or in_vain) and not cold:
                seconds = record.pass_seconds if in_vain else record.whole
                self.learn(Work(record.rows, record.lengths, record.tokens, seconds, plain=True))
        elif tree.lookup.alone:  # no network drafted, and the pairs are deferred
            self.learn(Work(record.rows, record.lengths, record.tokens, record.pass_seconds, padded=padded))
        else:
            passing = record.pass_seconds
            levels = 0 if fresh else tree.network.levels
            if not counted:  # the host's clock can't separate drafting from verifying on a device
                drafting = self.draft_seconds(record.rows, record.spec.max_fanout, record.spec.depth)
                passing = record.draft_seconds + passing - float(drafting)
                levels = 0
            self.learn(
                Work(
                    record.rows,
                    record.lengths,
                    record.tokens,
                    passing,
                    padded=padded,
                    width=record.spec.max_fanout,
                    levels=levels,
                    draft_seconds=record.draft_seconds - record.lookup_seconds,
                    pairs=record.emitted if record.seconds is not None else 0,
                    observe_seconds=record.whole - record.draft_seconds - record.pass_seconds,
                )
            )

    def _errors(self, work: Work) -> tuple[CostError, ...]:
        """The errors of the table's predictions of a round, its pass first."""
        table = self.table
        bare = max(table.pass_by_tokens.of(work.tokens) + self._rest(work.rows, work.lengths), _INSTANT)
        bare += table.padding_by_places.of(work.padded) if work.padded else 0.0
        parts = [CostError(_PLAIN if work.plain else _PASS, work.tokens, math.log(work.pass_seconds / bare))]
        if work.levels and work.draft_seconds > 0.0:
            positions = work.rows * work.width
            bare = table.draft_by_rows.of(work.rows) + (work.levels - 1) * table.level_by_positions.of(positions)
            parts.append(CostError(_DRAFT, positions, math.log(work.draft_seconds / max(bare, _INSTANT))))
        if work.pairs and work.observe_seconds > 0.0:
            bare = max(table.observe_by_pairs.of(work.pairs), _INSTANT)
            parts.append(CostError(_OBSERVE, work.pairs, math.log(work.observe_seconds / bare)))
        return tuple(parts)

    def settle(self) -> None:
        """Update all corrections from the recorded rounds."""
        self._readings.clear()
        for work in self._waiting:
            self._corrections(work.rows).learn(self._errors(work))
        self._waiting.clear()
        for corrections in self._residuals.values():
            corrections.settle()

    def _corrected_pass(self, tokens: Array, rows: int, lengths: Sequence[int]) -> Array:
        return self._bare_pass(tokens, rows, lengths) * self._corrections(rows).factor(_PASS, tokens)

    def _corrections(self, rows: int) -> Residuals:
        """The corrections for batches of this size; sizes between two powers of two share theirs."""
        return self._residuals[rows.bit_length()]

    def _bare_pass(self, tokens: Array, rows: int, lengths: Sequence[int]) -> Array:
        return np.maximum(self.table.pass_by_tokens.at(tokens) + self._rest(rows, lengths), _INSTANT)

    def _rest(self, rows: int, lengths: Sequence[int]) -> float:
        """What rows and columns add to a pass."""
        return self.table.pass_by_rows.of(rows) + rows * max(lengths, default=0) * self.table.column_seconds

    def _bare_draft(self, rows: int, positions: Array, levels: Array) -> Array:
        further = np.maximum(levels - 1.0, 0.0) * self.table.level_by_positions.at(positions)
        return np.maximum(self.table.draft_by_rows.at(rows) + further, _INSTANT)
