"""Which draft tree suits a drafter on this machine: depth x top_k x nodes, and chains, by successive halving."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from eyas.bench.offline.candidates import Candidate, Criterion, Selection, choose, rank, task_score
from eyas.bench.offline.runner import PLAIN, Advance, Plan, Task, measure
from eyas.engine import Engine
from eyas.errors import CheckpointError, UsageError
from eyas.files import write_json
from eyas.tree import parse_tree
from eyas.types import SamplingParams


class Setting(NamedTuple):
    """A tree by its numbers; a chain has top_k 1 and as many nodes as levels."""

    depth: int
    top_k: int
    nodes: int

    @property
    def name(self) -> str:
        """What `--tree` takes."""
        return f"chain:{self.depth}" if self.top_k == 1 else f"dynamic:{self.depth},{self.top_k},{self.nodes}"


def grid(depths: Sequence[int], top_ks: Sequence[int], nodes: Sequence[int], chains: Sequence[int]) -> list[Setting]:
    """Every combination that is a tree of its own, chains first.

    Left out: more nodes than the beam offers (top_k on the first level, top_k squared on each other one), which is
    the tree with fewer nodes again, and fewer nodes than levels, of which the last could never be verified.
    """
    chosen = [Setting(length, 1, length) for length in chains]
    for depth in depths:
        for top_k in top_ks:
            offered = top_k + (depth - 1) * top_k**2
            chosen += [Setting(depth, top_k, n) for n in nodes if depth <= n <= offered and top_k > 1]
    settings = list(dict.fromkeys(chosen))
    if not settings:
        raise UsageError(
            "no tree to try: nodes must be at least the depth, and at most top_k + (depth - 1) * top_k * top_k"
        )
    for setting in settings:
        parse_tree(setting.name)  # refuses numbers below 1 by name
    return settings


@dataclass(frozen=True)
class Pass:
    """One rung, measured."""

    rung: Rung
    candidates: tuple[Candidate, ...]


@dataclass
class TreeSweep:
    """One drafter on one target with many trees; `engines` by setting name, and plain decoding."""

    engines: Mapping[str, Engine]
    settings: Sequence[Setting]
    tasks: Sequence[Task]
    params: SamplingParams
    plan: Plan
    by: Criterion = "tokens_per_second"
    coarse: int = 2
    """Groups of prompts of a task in the first pass, each run once."""
    finalists: int = 4
    passes: list[Pass] = field(default_factory=list)

    @property
    def rungs(self) -> list[Rung]:
        """What will be measured."""
        most = max(len(task.groups) for task in self.tasks)
        return rungs(len(self.settings), most, coarse=self.coarse, finalists=self.finalists)

    @property
    def work(self) -> int:
        """Runs of groups, plain decoding's included."""
        total = 0
        for number, rung in enumerate(self.rungs, start=1):
            groups = sum(min(rung.groups, len(task.groups)) for task in self.tasks)
            total += groups * (rung.settings + 1) * (self.plan.repeats if number == len(self.rungs) else 1)
        return total

    def run(self, advance: Advance = lambda: None) -> Selection:
        """All passes; the choice is among the finalists, by the last pass alone."""
        alive = [setting.name for setting in self.settings]
        for number, rung in enumerate(self.rungs, start=1):
            last = number == len(self.rungs)
            plan = self.plan if last else Plan(1, self.plan.warmup)
            names = alive[: rung.settings]
            candidates = self._measure(names, rung.groups, plan, advance)
            self.passes.append(Pass(rung, tuple(candidates)))
            alive = [candidate.name for candidate in sorted(candidates, key=self._promise, reverse=True)]
        return choose(self.passes[-1].candidates, self.by)

    def _promise(self, candidate: Candidate) -> float:
        """What decides who goes on: few runs are easily disturbed, so speed is judged by the pace."""
        return candidate.mean(self.by) if self.by == "accept_length" else candidate.pace

    def _measure(self, names: Sequence[str], groups: int, plan: Plan, advance: Advance) -> list[Candidate]:
        engines = {name: self.engines[name] for name in (PLAIN, *names)}
        scores: dict[str, dict[str, Any]] = {name: {} for name in names}
        for task in self.tasks:
            part = Task(task.name, task.groups[:groups])
            results = measure(part, engines, self.params, plan, advance)
            task.errors += [error for error in part.errors if error not in task.errors]
            for name in names:
                scores[name][task.name] = task_score(results[name], results[PLAIN])
        return [Candidate(name, found) for name, found in scores.items()]


def write_default_tree(drafter: Path, tree: str) -> None:
    """Set `default_tree` in a drafter directory's config.json; every other key stays as it was."""
    path = drafter / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}; is {drafter} a drafter directory?") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    config["default_tree"] = tree
    try:
        write_json(path, config, ensure_ascii=text.isascii())
    except OSError as error:
        raise CheckpointError(f"can't write {path}: {error.strerror}") from error


# Successive halving: many settings on few prompts, ever fewer settings on ever more prompts.
#
# Every rung is a measurement of its own, everything in it interleaved. Only the last, on all prompts, gives the figures
# of the finalists; what an earlier rung said is used to drop settings, and reported as what it is.


FACTOR = 3
"""A rung keeps one setting in three, and gives each three times the prompts."""


class Rung(NamedTuple):
    """How many settings are measured on how many groups of prompts."""

    settings: int
    groups: int


def rungs(settings: int, groups: int, *, coarse: int, finalists: int) -> list[Rung]:
    """The plan: from all `settings` on `coarse` groups down to `finalists` on all `groups`."""
    plan = []
    left, prompts = settings, min(coarse, groups)
    while left > finalists:
        plan.append(Rung(left, prompts))
        left = max(finalists, ceil(left / FACTOR))
        prompts = min(prompts * FACTOR, groups)
    return [*plan, Rung(left, groups)]


# What a sweep over draft trees found: ranked table and JSON.


@dataclass(frozen=True)
class TreeReport:
    """Everything about the choice."""

    drafter: str
    settings_tried: Sequence[Setting]
    passes: Sequence[Pass]
    choice: Selection
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, Pass]]:
        """Finalists best first, then the dropped ones, those that went further before the others."""
        seen: set[str] = set()
        rows = []
        for done in reversed(self.passes):
            for candidate in rank([c for c in done.candidates if c.name not in seen], self.choice.by):
                seen.add(candidate.name)
                rows.append((candidate, done))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The JSON object; `passes` holds every figure that was taken."""
        numbers = {setting.name: setting._asdict() for setting in self.settings_tried}
        return {
            "drafter": self.drafter,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            **self.choice.as_dict(),
            "passes": [
                {
                    "prompts": done.rung.groups,
                    "candidates": [candidate.as_dict() | numbers[candidate.name] for candidate in done.candidates],
                }
                for done in self.passes
            ],
            "errors": list(self.errors),
        }

    def table(self) -> Table:
        """Ranked; a setting's figures are those of the last pass it took part in."""
        table = Table("", "tree", title=f"Draft trees for {self.drafter}")
        for header in ("tokens/s", "speedup", "accept length", "efficiency", "prompts a file"):
            table.add_column(header, justify="right")
        for candidate, done in self.in_order:
            mark = "pick" if candidate is self.choice.best else "tie" if candidate.name in self.choice.ties else ""
            speedup, length = candidate.mean("speedup"), candidate.mean("accept_length")
            table.add_row(
                mark,
                candidate.name,
                f"{candidate.mean('tokens_per_second'):.1f}",
                f"{speedup:.2f}x",
                f"{length:.2f}",
                f"{speedup / length:.2f}" if length else "",
                str(done.rung.groups),
            )
        return table
