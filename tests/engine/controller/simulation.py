"""A machine with known costs and a text with known acceptance, in exact simulated time.

Drafts are grown by the real `SharedTree`; only the networks are simulated. A row has a difficulty: how concentrated its
drafter's distribution is, and how often the target follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from eyas.engine.controller import Controller, CostModel, CostTable, Curve, RoundRecord, TreeArm
from eyas.engine.round import VerifiedDraft
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.shared import SharedTree

CPU = torch.device("cpu")
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Machine:
    """Costs in seconds. The default has the ratios of the project's bf16 CPU: 1 / 1.07 / 1.2 / 1.3 / 1.6 / 1.9."""

    points: tuple[tuple[int, float], ...] = (
        (1, 1.0),
        (4, 1.07),
        (8, 1.2),
        (16, 1.3),
        (24, 1.6),
        (32, 1.9),
        (64, 3.3),
        (128, 6.2),
        (256, 12.0),
    )
    unit: float = 0.03
    first: float = 0.01
    level: float = 0.025
    position: float = 0.0008
    column: float = 2e-6
    unequal: float = 0.0
    """The additional time of a pass whose rows differ in length, and (`padding_unit`) of each padded position."""
    padding_unit: float = 0.0
    row: float = 0.0
    """The additional time of a pass per row beyond the fourth."""

    def pass_seconds(self, tokens: float, rows: int, lengths: Sequence[int]) -> float:
        sizes, seconds = zip(*self.points, strict=True)
        base = float(np.interp(tokens, sizes, seconds)) + max(0.0, tokens - 256) * 0.046
        return self.unit * (base + rows * max(lengths) * self.column + max(0, rows - 4) * self.row)

    def padding_seconds(self, padding: int) -> float:
        return self.unit * (self.unequal + padding * self.padding_unit) if padding else 0.0

    def draft_seconds(self, rows: int, width: int, levels: int) -> float:
        first = self.first + rows * 0.0005
        return self.unit * (first + (levels - 1) * (self.level + rows * width * self.position))

    def observe_seconds(self, pairs: int) -> float:
        return self.unit * (self.level + pairs * self.position)

    def table(self) -> CostTable:
        """The costs that a perfect calibration measures."""

        def curve(seconds: Callable[[int], float]) -> Curve:
            return Curve(sizes=GRID, seconds=tuple(seconds(size) for size in GRID))

        return CostTable(
            measured_on="simulation",
            pass_by_tokens=curve(lambda t: self.pass_seconds(t, 1, [0])),
            pass_by_rows=curve(lambda r: self.unit * max(0, r - 4) * self.row),
            column_seconds=self.unit * self.column,
            draft_by_rows=curve(lambda r: self.draft_seconds(r, 1, 1)),
            level_by_positions=curve(lambda p: self.draft_seconds(1, p, 2) - self.draft_seconds(1, p, 1)),
            observe_by_pairs=curve(self.observe_seconds),
            padding_by_places=curve(self.padding_seconds),
        )


HEAVY = Machine(
    points=((1, 36), (2, 37.5), (4, 39), (6, 41), (8, 43), (12, 47), (16, 50), (20, 53), (24, 56), (32, 64), (48, 77),
            (64, 90), (128, 160), (256, 300)),
    unit=1e-3, first=1.2, level=0.8, position=0.02, column=2.8e-3, row=0.58, unequal=1.0,
    padding_unit=0.18,
)  # fmt: skip
"""The 289M pair in bf16 on two quiet cores, in milliseconds."""


@dataclass
class Text:
    """Rows of known difficulty."""

    sharpness: Sequence[float]
    """Per row: the spread of its drafter's logits."""
    followed: Sequence[float]
    """Per row: the target takes a child with this factor times the drafter's probability."""
    seed: int = 0
    _draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng(self.seed)

    def draft(self, spec: TreeSpec) -> tuple[DraftTree, int]:
        """A tree and the number of levels that it took."""
        rows = len(self.sharpness)
        growth = spec.start(rows, CPU)
        width = 1
        levels = 0
        spread = np.array(self.sharpness)[:, None, None]
        while True:
            logits = self._draw.standard_normal((rows, width, 24)) * spread
            logits -= np.log(np.exp(logits).sum(2, keepdims=True))
            best = torch.tensor(logits, dtype=torch.float32).topk(growth.fanout, dim=2)
            levels += 1
            frontier = growth.expand(best.values, best.indices)
            if frontier is None:
                return growth.tree(), levels
            width = frontier.tokens.shape[1]

    def walk(self, tree: DraftTree) -> list[list[int]]:
        """The path that the target takes in each row."""
        parents = tree.parents.tolist()
        scores = tree.logprob.double().exp().tolist()
        valid = tree.valid.tolist()
        paths = []
        for row, followed in enumerate(self.followed):
            at = -1
            mass = 1.0
            path = [0]
            while True:
                draw = float(self._draw.random()) * mass / followed
                for node in range(at + 1, tree.size):
                    if valid[row][node] and parents[row][node] == at:
                        draw -= scores[row][node]
                        if draw < 0.0:
                            break
                else:
                    break
                at = node
                mass = scores[row][node]
                path.append(node + 1)
            paths.append(path)
        return paths


PROMPT, ANSWER = 200, 150
_TEXTS = count()
"""Numbers for answers, each used once in a process."""


@dataclass
class Simulation:
    """Consecutive rounds; `seconds` and `tokens` accumulate."""

    machine: Machine
    text: Text
    noise: Callable[[int], float] = lambda _: 1.0
    """Round -> the factor by which the clock distorts its true seconds."""
    lengths: list[int] = field(default_factory=list)
    """The committed tokens of each row; an answer begins at `PROMPT` and is replaced after `ANSWER` tokens."""
    texts: list[int] = field(default_factory=list)
    """The answers that are being written, numbered in the order in which they began."""
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    deferred: int = 0
    nodes: np.ndarray | None = None

    def current_lengths(self) -> list[int]:
        """The rows' lengths before the next round."""
        rows = len(self.text.sharpness)
        if len(self.lengths) != rows:
            self.lengths = [PROMPT] * rows
            self.texts = [next(_TEXTS) for _ in range(rows)]
        return self.lengths

    def advance(self, paths: list[list[int]]) -> None:
        """Commit the paths; answers that are long enough are replaced by new ones."""
        grown = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.lengths = [length if length < PROMPT + ANSWER else PROMPT for length in grown]
        self.texts = [
            next(_TEXTS) if after < before else text
            for text, before, after in zip(self.texts, grown, self.lengths, strict=True)
        ]

    def round(self, spec: TreeSpec | None) -> RoundRecord:
        rows = len(self.text.sharpness)
        lengths = self.current_lengths()
        texts = self.texts
        draft = None
        drafting = 0.0
        observing = 0.0
        tree = DraftTree.empty(rows, CPU)
        paths = [[0]] * rows
        if spec is not None:
            tree, levels = self.text.draft(spec)
            paths = self.text.walk(tree)
            draft = VerifiedDraft(tree, paths)
            width = spec.max_fanout
            drafting = self.machine.draft_seconds(rows, width, levels)
            if self.deferred:
                drafting += self.machine.observe_seconds(rows * min(self.deferred, PROMPT))
        emitted = sum(map(len, paths))
        tokens = rows + int(tree.valid.sum())
        counts = tree.valid.sum(1).numpy() if tree.size else np.zeros(rows)
        passing = self.machine.pass_seconds(tokens, rows, lengths)
        passing += self.machine.padding_seconds(int(rows * counts.max() - counts.sum()))
        if spec is not None:
            observing = self.machine.observe_seconds(emitted)
        self.deferred = 0 if spec is not None else self.deferred + 1
        self.advance(paths)
        shown = self.noise(self.rounds)
        seconds = drafting + passing + observing
        self.seconds += seconds
        self.tokens += emitted
        self.rounds += 1
        self.nodes = counts if self.nodes is None or len(self.nodes) != rows else self.nodes + counts
        return RoundRecord(
            texts, lengths, spec, draft, drafting * shown, passing * shown, tokens, emitted, seconds * shown
        )

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.tokens / self.seconds

    def run(self, planner: Controller | TreeSpec | None, rounds: int) -> float:
        """Tokens per second of `rounds` rounds under a controller or a fixed shape."""
        before = self.seconds, self.tokens
        for _ in range(rounds):
            if isinstance(planner, Controller):
                lengths = self.current_lengths()
                planner.learn(self.round(planner.plan(self.texts, lengths)))
            else:
                self.round(planner)
        return (self.tokens - before[1]) / (self.seconds - before[0])


def controller(
    machine: Machine,
    *,
    max_length: int | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> Controller:
    """A controller that knows the machine and plans in no time; `options` are its arm's."""
    return Controller(CostModel(machine.table()), TreeArm(**options), max_length=max_length, clock=clock)


def mixed(rows: int, seed: int = 0) -> Text:
    """Easy and hard rows in equal parts; a single row is in between."""
    sharpness = [3.6 if row % 2 else 1.8 for row in range(rows)] if rows > 1 else [3.0]
    return Text(sharpness, [0.95 if sharp > 2.5 else 0.8 for sharp in sharpness], seed)


def fixed_shapes(rows: int) -> list[SharedTree]:
    """Shapes that someone tuning by hand would try."""
    shapes = [
        SharedTree(depth, 1, max(1, round(share * depth * rows))) for depth in (1, 2, 3, 5) for share in (0.5, 1.0)
    ]
    for depth, width, nodes in ((2, 3, 4), (3, 3, 6), (4, 3, 8), (5, 4, 10), (5, 4, 15), (7, 6, 24)):
        shapes.append(SharedTree(depth, width, nodes * rows))
    return shapes


def best_fixed(machine: Machine, rows: int, rounds: int) -> tuple[SharedTree, float]:
    """The fastest of `fixed_shapes` and its tokens per second over `rounds` rounds.

    Successive halving: all shapes run a fifth of the rounds, the six fastest half of them, the three fastest all. (The
    overall fastest is among the first five after a fifth and the first two after a half, for every machine and number
    of rows here.)
    """
    runs = [(Simulation(machine, mixed(rows, 1)), shape) for shape in fixed_shapes(rows)]
    for share, stay in ((0.2, 6), (0.5, 3), (1.0, 1)):
        for simulation, shape in runs:
            simulation.run(shape, max(1, round(share * rounds)) - simulation.rounds)
        runs = sorted(runs, key=lambda run: -run[0].rate)[:stay]
    simulation, shape = runs[0]
    return shape, simulation.rate


def clock_noise(seed: int) -> Callable[[int], float]:
    """Noise of 4%, and one round in fifty takes half as long again."""
    draw = np.random.default_rng(seed)
    return lambda _: float(np.exp(0.04 * draw.standard_normal()) * (1.5 if draw.random() < 0.02 else 1.0))


class Contest(NamedTuple):
    """Tokens per second on the same texts; controllers are measured after 75 and after 300 rounds."""

    plain: float
    """Plain decoding, in 75 rounds."""
    best: SharedTree
    """The fastest of `fixed_shapes` on another text."""
    fixed: float
    """The rate of `best` in 300 rounds: longer texts take longer, so a shorter run would look faster."""
    trees: tuple[float, float]
    chains: tuple[float, float]


def contest(rows: int) -> Contest:
    """The controller on the heavy machine with noise, against fixed shapes without noise."""

    seeds = range(2, 3 + 4 // rows)  # results of few rows vary more

    def auto(**options: object) -> tuple[float, float]:
        runs = []
        for seed in seeds:
            made = controller(HEAVY, **options)
            simulation = Simulation(HEAVY, mixed(rows, seed), clock_noise(seed))
            simulation.run(made, 75)
            early = simulation.rate
            simulation.run(made, 225)
            runs.append((early, simulation.rate))
        early, late = np.mean(runs, axis=0).tolist()
        return early, late

    def always(spec: SharedTree | None, rounds: int) -> float:
        return float(np.mean([Simulation(HEAVY, mixed(rows, seed)).run(spec, rounds) for seed in seeds]))

    best, _ = best_fixed(HEAVY, rows, 1500 // (rows + 4) + 20)
    return Contest(always(None, 75), best, always(best, 300), auto(), auto(widths=(1,)))
