"""Start-up calibration: measures the seconds of passes, draft levels and observations with this target and drafter.

Everything runs through the target's and the drafter's own methods, in temporary slots. The sizes are measured in turn.
The lower quartile of a size's runs counts: the first run may prepare kernels for a new shape, and where others share
the cores, some sizes would be measured in slow moments and some in fast ones. What all of them slow down, the cost
model learns later. The runs before a size is recorded as a CUDA graph aren't counted. Two facts bound the remaining
noise: less work never takes longer than more, and no work takes longer than doing it in pieces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import torch

from eyas.drafters.base import Drafter
from eyas.engine.controller.controller import Controller
from eyas.engine.controller.costs import SETTLING, CostModel, CostTable, Curve
from eyas.engine.controller.experience import Experience
from eyas.engine.controller.trees import DEPTH, WIDTHS, TreeArm
from eyas.engine.controller.window import WindowArm
from eyas.errors import UsageError
from eyas.machine import measured_once
from eyas.targets import Target
from eyas.targets.backend import kernels_in_use
from eyas.targets.fingerprint import fingerprint, weight_shapes
from eyas.targets.parameters import parameter_count, weight_formats
from eyas.targets.slots import COLUMNS
from eyas.targets.transformers_names import config_value
from eyas.tree import DraftTree, parse_tree
from eyas.tree.dynamic import DynamicTree
from eyas.tree.lookahead import LookaheadTree
from eyas.tree.shared import SharedTree
from eyas.types import NO_OWNER
from eyas.verify import Coupling, Sampler, SeededWalk

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192)
_PAIRS = (1, 4, 16, 64, 256)
_WIDTHS = (1, 2, 4, 8)
_LEVELS = 3
"""Levels that are timed together, if the drafter guesses that far; each one's time is an equal share."""
_SHORT, _LONG = 32, 544
"""Cache columns in two measurements whose difference gives a pass's time by column."""
_MIDDLE = 256
"""Cache columns of the passes that compare rows of unequal length with equal ones."""
_EQUAL = 3
_UNEQUAL = (1, 3)
"""Nodes of each row in an equal batch; in unequal ones, half of the rows have 1 or 3 more, the others as many fewer."""
_MAX_SLOWDOWN = 5.0
"""A pass that takes this many times as long as one over a single token is the largest that is measured."""
_FEWEST, _MOST = 3, 8
"""The fewest and the most runs of a size. With one run of a pass over four tokens of a 1.5B, on a machine that others
share, its time by a single token's lay between 1.4 and 2.1 (nine of ten times), with three between 1.4 and 1.9."""
_SHARE = 1 / 10
"""The share of the time after which a size isn't run more often than the fewest times. If its first run alone took
that, it isn't repeated where passes are native, because they have nothing to warm up: a small language model reads 256
pairs in a second. With half or twice this share, measuring Qwen's 0.5B for its 1.5B takes a second less or more."""

Size = tuple[str, int]
"""What is measured: a curve, and a size on it."""
Work = dict[Size, Callable[[], float]]
"""For every size to time, a function that returns the seconds of one run."""
Runs = dict[Size, list[float]]
"""Seconds of each run."""


def calibrate(target: Target, drafter: Drafter, batch_size: int, widest: int = 16, seconds: float = 4.0) -> CostTable:
    """Measure for about `seconds`, for batches of up to `batch_size` rows, in slots of its own.

    `widest` is the largest number of children that the drafter can offer.
    """
    bench = _Bench(target, drafter.fresh(), batch_size, widest)
    with target.backend.running():  # the engine runs its steps under it, too
        runs = bench.measure(seconds)
    return bench.table(runs)


_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "layer_types")
"""Config entries about attention that don't follow from the shapes of weights."""


def describe(target: Target, drafter: Drafter) -> str:
    """What costs depend on, as a sentence: model, precision, drafter, taps, device, threads and torch's version.

    A model is identified by its weights' names and shapes and by its attention, because a parameter count isn't unique.
    """
    shapes = weight_shapes(target.model)
    attention = [config_value(target.config, name) for name in _ATTENTION]
    built = hashlib.sha256(repr((sorted(shapes.items()), attention)).encode()).hexdigest()[:8]
    network = drafter.module
    drafts = type(drafter if network is None else network).__name__
    if network is not None:
        drafts += f" of {parameter_count(network)} parameters"
        drafts += f" in {weight_formats(network) or network.dtype}"
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
    return (
        f"{target.config.model_type} ({built}) of {sum(map(math.prod, shapes.values()))} parameters in "
        f"{weight_formats(target.model) or 'floats'} and {str(target.dtype).removeprefix('torch.')}"
        f"{', its cache in int8' * target.kv_in_codes}, "
        f"drafted for by {drafts}, taps {list(drafter.taps)}, on {device} with {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}{', recorded' * target.backend.records}"
    )


class _Bench:
    """Temporary slots, and the passes, drafts and observations that are timed in them."""

    def __init__(self, target: Target, drafter: Drafter, batch_size: int, widest: int) -> None:
        self._target = target
        self._cache = target.allocate(0)
        self._drafter = drafter
        self._window = _window_of(drafter)
        self._width = min(16, widest)
        levels = _LEVELS if drafter.max_depth is None else min(_LEVELS, drafter.max_depth - 1)
        self._levels = levels if self._window is None else 0
        self._largest = max(64, 3 * batch_size, 0 if self._window is None else 1 + self._window.max_nodes)
        self._rows = _up_to(batch_size)
        self._together = max(rows for rows in (1, 2, 4, 8) if rows <= batch_size)
        self._draw = torch.Generator().manual_seed(0)
        self._longest = 2 * _LONG if target.max_length is None else max(1, target.max_length - 64)
        self._long = min(_LONG, self._longest)
        self._sampler = Sampler(batch_size, target.vocab_size, target.device)

    def measure(self, seconds: float) -> Runs:
        """Time every size, with many rows of short context and few of long context: many long rows would take GiB."""
        self._resize(self._together, self._long)
        runs = self._turns(dict(self._of_few_rows()), seconds / 2)
        self._resize(self._rows[-1], min(_SHORT, self._long))
        return runs | self._turns(dict(self._of_all_rows()), seconds / 2)

    def _resize(self, slots: int, columns: int) -> None:
        """Allocate slots of at least `columns` columns; each holds one drafter pair."""
        self._cache = self._target.allocate(0)  # free the old cache before the new one is allocated
        self._cache = self._target.allocate(slots, max(COLUMNS, columns + 64))
        self._drafter.pairs.attach(self._cache)
        self._drafter.pairs.resize(0)
        self._drafter.pairs.resize(slots)
        for slot in range(slots):
            self._drafter.pairs.begin(slot, [0], NO_OWNER)
        self._read(range(slots), 1)
        # drafters such as a small LM read what they observe when they draft
        self._stores = self._drafter.pairs.unread(0) > 0
        empty = DraftTree.empty(slots, self._target.device)
        self._pass(slots, empty, columns)  # warm-up: the system provides memory only on first use

    def _turns(self, work: Work, seconds: float) -> Runs:
        """Time every size several times, in turn; slow ones fewer times."""
        runs: Runs = {}
        end = time.perf_counter() + seconds
        unrecorded = self._target.backend.warmup
        for lap in range(_MOST):
            for name, timed in list(work.items()):
                if lap == 0 and self._pays_never(name, runs):
                    del work[name]
                    continue
                taken = runs.setdefault(name, [])
                late = time.perf_counter() > end
                if lap == 1 and self._target.backend.name == "native" and taken[0] > seconds * _SHARE:
                    del work[name]
                    continue
                if lap >= _FEWEST and (late or sum(taken) > seconds * _SHARE):
                    continue
                for _ in range(unrecorded if lap == 0 else 0):
                    timed()
                self._come_as_in_service(name, work, runs)
                taken.append(timed())
        return runs

    def _come_as_in_service(self, name: Size, work: Work, runs: Runs) -> None:
        """Fill caches with what precedes a size in service.

        A draft comes after a pass, a pass over a tree after an observation and a draft, and a plain pass after several
        like it.
        """
        kind, _ = name
        plain = ("tokens", 1) if ("tokens", 1) in work else ("rows", 1)
        short = plain in work and (runs.get(plain) or [0.0])[-1] < SETTLING
        if not short or self._target.backend.name != "native":
            return
        if name == ("tokens", 1) or kind in ("rows", "long"):
            for _ in range(int(SETTLING / runs[name][-1]) if runs[name] else 0):
                work[name]()
        elif kind == "tokens":
            self._read(range(1), 2)
            self._draft(1, 1, 1 + self._levels)
        elif kind == "first" or kind.startswith("level"):
            work[plain]()

    def _pays_never(self, name: Size, runs: Runs) -> bool:
        """Whether a smaller pass already took so long that a draft can't pay in this one."""
        kind, tokens = name
        if kind != "tokens" or tokens <= 2 * self._rows[-1]:
            return False
        smaller = [taken[0] for (kind, size), taken in runs.items() if kind == "tokens" and size > 1]
        return bool(smaller) and smaller[-1] > _MAX_SLOWDOWN * runs["tokens", 1][0]

    def table(self, runs: Runs) -> CostTable:
        """The cost table with curves through the lower quartile of each size's runs."""
        found = {name: _lower_quartile(taken) for name, taken in runs.items()}

        def points(kind: str) -> dict[int, float]:
            return {size: seconds for (name, size), seconds in found.items() if name == kind}

        passes = _curve(sensible(points("tokens")))
        by_rows = {rows: max(0.0, s - float(passes.at(float(rows)))) for rows, s in points("rows").items()}
        by_rows[1] = 0.0  # one row is what they are compared with: both times are of the same pass
        firsts = sensible(points("first"))
        levels = {}
        for (name, size), total in found.items():
            if name.startswith("level"):
                levels[size] = max(0.0, total - firsts[int(name.removeprefix("level"))]) / max(1, self._levels)
        rows = self._together
        further = found["long", rows] - found["rows", rows]
        return CostTable(
            measured_on=describe(self._target, self._drafter),
            pass_by_tokens=passes,
            pass_by_rows=_curve(by_rows),
            padding_by_places=self._padding(found),
            column_seconds=max(0.0, further) / (rows * max(1, self._long - _SHORT)),
            draft_by_rows=_curve(firsts),
            level_by_positions=_curve(sensible(levels)),
            observe_by_pairs=_curve(sensible(points("pairs"))),
            read_by_pairs=self._reading(points("read"), firsts),
        )

    def _reading(self, found: dict[int, float], firsts: dict[int, float]) -> Curve | None:
        """What reading stored pairs adds to a row's first level, which reads the last one anyway."""
        return _curve({pairs: max(0.0, s - firsts[1]) for pairs, s in sensible(found).items()}) if found else None

    def _padding(self, found: dict[Size, float]) -> Curve:
        """The additional seconds of unequal rows, compared with equal ones, by padding."""
        rows = self._together
        points = {rows * more: max(0.0, found["unequal", more] - found["unequal", 0]) for more in _UNEQUAL if rows > 1}
        return _curve(sensible(points) or {1: 0.0})

    def _of_few_rows(self) -> Iterable[tuple[Size, Callable[[], float]]]:
        """What is timed with few rows: passes over more tokens, longer contexts, unequal rows, and more pairs."""
        for tokens in _TOKENS:
            if tokens <= self._largest:
                tree = self._tree(tokens - 1)
                yield ("tokens", 1 + tree.size), lambda tree=tree: self._pass(1, tree, _SHORT)  # type: ignore[misc]
        empty = DraftTree.empty(self._together, self._target.device)
        yield ("long", self._together), lambda: self._pass(self._together, empty, self._long)
        for more in (0, *_UNEQUAL) if self._together > 1 else ():
            tree = _unequal(self._together, _EQUAL, more, self._target)
            yield ("unequal", more), lambda tree=tree: self._pass(self._together, tree, _MIDDLE)  # type: ignore[misc]
        for pairs in _PAIRS:
            yield ("pairs", pairs), lambda pairs=pairs: self._read(range(1), pairs)  # type: ignore[misc]
            if self._stores and pairs <= self._longest:
                yield ("read", pairs), lambda pairs=pairs: self._read_late(pairs)  # type: ignore[misc]

    def _of_all_rows(self) -> Iterable[tuple[Size, Callable[[], float]]]:
        """What is timed for each batch size: passes over one token per row, and drafts."""
        most = self._rows[-1]
        for rows in self._rows:
            empty = DraftTree.empty(rows, self._target.device)
            yield ("rows", rows), lambda rows=rows, tree=empty: self._pass(rows, tree, _SHORT)  # type: ignore[misc]
            yield ("first", rows), lambda rows=rows: self._draft(rows, 1, 1)  # type: ignore[misc]
        for rows in dict.fromkeys((1, self._rows[len(self._rows) // 2], most)):
            for width in _WIDTHS:
                if width <= (self._width if self._window is None else 1):
                    draft = lambda rows=rows, width=width: self._draft(rows, width, 1 + self._levels)  # noqa: E731
                    yield (f"level{rows}", rows * width), draft

    def _tree(self, nodes: int) -> DraftTree:
        """A tree of one row with `nodes` nodes, with a full beam on each level."""
        if not nodes:
            return DraftTree.empty(1, self._target.device)
        steps = torch.arange(nodes, device=self._target.device).unsqueeze(0)
        parents = (steps - self._width).clamp(min=-1)
        tokens = steps % self._target.vocab_size
        levels = -(-nodes // self._width)
        return DraftTree(
            tokens, parents, -steps.float(), torch.ones_like(parents, dtype=torch.bool), levels, counted=nodes
        )

    def _pass(self, rows: int, tree: DraftTree, columns: int) -> float:
        """Seconds of verifying a tree and walking it, without committing anything."""
        target = self._target
        where = range(rows)
        self._cache.lengths[:rows] = [min(columns, self._long)] * rows
        roots = torch.randint(target.vocab_size, (rows,), generator=self._draw).to(target.device)
        fresh = dataclasses.replace(tree)  # drop what the last pass cached in the tree
        with self._timed() as watch:
            verified = target.verify(self._cache, where, roots, fresh, self._drafter.taps)
            walk = SeededWalk()(verified.logits, fresh, self._sampler, where)
            if walk.fetched is None:
                walk.table.tolist()
        return watch.seconds

    def _draft(self, rows: int, width: int, depth: int) -> float:
        recorded = self._target.backend.records
        tree = self._window or (DynamicTree(depth, width, depth) if recorded else SharedTree(depth, width, rows))
        with self._timed() as watch:
            self._drafter.draft(range(rows), tree, self._coupling(rows))
        return watch.seconds

    def _read(self, rows: range, pairs: int) -> float:
        """Seconds of observing `pairs` pairs in each row; all but one are removed afterwards."""
        seconds = self._observe(rows, pairs)
        for slot in rows:
            self._drafter.pairs.truncate(slot, 1)
        return seconds

    def _observe(self, rows: range, pairs: int) -> float:
        target = self._target
        shape = (len(rows), pairs, len(self._drafter.taps), target.hidden_size)
        taps = torch.randn(shape, generator=self._draw).to(target.device, target.dtype)
        tokens = torch.randint(target.vocab_size, shape[:2], generator=self._draw).to(target.device)
        with self._timed() as watch:
            self._drafter.observe(rows, tokens, taps, [pairs] * len(rows))
        return watch.seconds

    def _read_late(self, pairs: int) -> float:
        """Seconds of a draft of one level whose row has stored `pairs` pairs since the last one."""
        self._observe(range(1), pairs)
        seconds = self._draft(1, 1, 1)
        self._drafter.pairs.truncate(0, 1)
        return seconds

    def _coupling(self, rows: int) -> Coupling:
        return self._sampler.coupling(range(rows), True)

    def _timed(self) -> _Watch:
        return _Watch(self._target.device)


class _Watch:
    """Measures the seconds of a `with` block, including the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> _Watch:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _unequal(rows: int, nodes: int, more: int, target: Target) -> DraftTree:
    """A batch of chains whose lengths alternate between `nodes + more` and `nodes - more`."""
    counts = torch.tensor([nodes + more, nodes - more] * (rows // 2), device=target.device)
    steps = torch.arange(nodes + more, device=target.device)
    valid = steps < counts.unsqueeze(1)
    parents = (steps - 1).masked_fill(~valid, -1)
    tokens = (steps % target.vocab_size).expand_as(parents)
    return DraftTree(tokens, parents, valid.float(), valid, nodes + more, counted=rows * nodes)


def _window_of(drafter: Drafter) -> LookaheadTree | None:
    """The lookahead window that a drafter runs as a whole; None = its trees can have any size."""
    own = parse_tree(drafter.fixed_tree)
    return cast(LookaheadTree, own) if own.method == "lookahead" else None


def _up_to(batch_size: int) -> Sequence[int]:
    """The powers of two below the batch size, and the batch size itself."""
    return [2**i for i in range(batch_size.bit_length()) if 2**i < batch_size] + [batch_size]


def sensible(points: dict[int, float]) -> dict[int, float]:
    """Seconds by size, lowered where a larger size, or smaller ones that add up to it, took less."""
    sizes = sorted(points)
    least: dict[int, float] = {}
    for size in reversed(sizes):
        least[size] = min([points[size], *list(least.values())[-1:]])
    out: dict[int, float] = {}
    for size in sizes:
        out[size] = min([least[size], *(-(-size // part) * seconds for part, seconds in out.items())])
    return out


def _curve(points: dict[int, float]) -> Curve:
    sizes = sorted(points)
    return Curve(sizes=tuple(map(float, sizes)), seconds=tuple(points[size] for size in sizes))


def make_controller(
    target: Target,
    drafter: Drafter,
    text: str,
    batch_size: int,
    costs: Path | CostTable | None = None,
    *,
    experienced: bool = True,
) -> Controller:
    """The controller for `text` (`auto` or `auto:chain`) and batches of up to `batch_size`.

    `costs` is a table, or a file that is read if it exists and otherwise written after measuring for some seconds,
    during which all slots must be empty; None = a file in the cache directory. `experienced`: whether it starts from
    what earlier controllers of this pair have learned, and saves what it learns. It is off for lossy
    rules, because they accept other tokens. Raises UsageError for a file that can't be used, and for `auto:chain` if
    the drafter has no chains.
    """
    window = _window_of(drafter)
    if window is not None and text != "auto":
        raise UsageError(
            f"`tree={text}` drafts chains, but lookahead has a window: write `tree=auto`, which runs it where it pays, "
            f"or give one with `tree=lookahead:W,N,G`"
        )
    widths = [width for width in WIDTHS if width <= drafter.max_fanout] if text == "auto" else [1]
    if not isinstance(costs, CostTable):
        costs = costs_for(target, drafter, batch_size, costs)
    if window is not None:
        return Controller(CostModel(costs), WindowArm(window))
    depth = min(DEPTH, drafter.max_depth or DEPTH)
    arm = TreeArm(
        widths,
        depth,
        counts_freely=target.device.type == "cpu",
        computes=drafter.computes,
        looks_up=drafter.looks_up,
    )
    arm.gain.prepare()
    if drafter.module is not None and experienced:
        form = (widths, depth, drafter.looks_up)
        experience = Experience.of(fingerprint(target.model), drafter.module, form)
        if experience is not None:
            arm.gain.resume(experience)
    return Controller(CostModel(costs), arm, max_length=target.max_length)


def costs_for(target: Target, drafter: Drafter, batch_size: int, saved: Path | None = None) -> CostTable:
    """The costs in the file `saved`; if it doesn't exist, they are measured and written there.

    None = a file in the cache directory for this pair and batch size. A hybrid's costs are those of its network.
    """
    drafter = drafter.priced or drafter
    measured_on = describe(target, drafter)
    if saved is None:
        what = (measured_on, batch_size, kernels_in_use(), sorted(CostTable.model_fields))
        name = f"costs-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
        kept = measured_once(name, lambda: calibrate(target, drafter, batch_size, drafter.max_fanout).model_dump_json())
        return CostTable.model_validate_json(kept)
    if saved.exists():
        return CostTable.read(saved, measured_on)
    table = calibrate(target, drafter, batch_size, drafter.max_fanout)
    table.save(saved)
    return table


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]
