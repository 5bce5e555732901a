"""The best draft tree for a drafter on this machine, and the checkpoint of a run to serve with it.

Successive halving tries many settings on few prompts, then fewer and fewer settings on more and more prompts. Every
rung is a measurement of its own, fully interleaved. Earlier rungs only drop settings; the finalists' figures come from
the last one, on all prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.table import Table

from eyas.bench.offline.candidates import (
    Candidate,
    Criterion,
    Selection,
    choose,
    impossible,
    rank,
    task_score,
    with_margin,
)
from eyas.bench.offline.runner import PLAIN, Advance, Measure, Plan, Task, measure
from eyas.drafters.base import Drafter
from eyas.engine import Engine
from eyas.errors import CheckpointError, DataError, UsageError
from eyas.files import write_json
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.tree import parse_tree
from eyas.types import SamplingParams

FEW_TREES = ((3,), (4,), (8,), (1, 2, 3, 5))
"""Depths, top_ks, nodes and chains (as in `grid`) of the few trees to try with a new checkpoint."""
FINALISTS = 3
"""Finalists among the few trees."""
HALVING_FACTOR = 3
"""A rung keeps one setting in three, and gives each three times the prompts."""


class TreeSetting(NamedTuple):
    """The parameters of a tree; a chain has top_k 1 and as many nodes as levels."""

    depth: int
    top_k: int
    nodes: int

    @property
    def name(self) -> str:
        """The tree as `--tree` takes it."""
        return f"chain:{self.depth}" if self.top_k == 1 else f"dynamic:{self.depth},{self.top_k},{self.nodes}"


def grid(
    depths: Sequence[int], top_ks: Sequence[int], nodes: Sequence[int], chains: Sequence[int]
) -> list[TreeSetting]:
    """Every combination that is a distinct tree, chains first. Raises UsageError if there is none.

    Two kinds are left out. Trees with more nodes than the beam offers (top_k on the first level, top_k squared on each
    later one) equal trees with fewer nodes. Trees with fewer nodes than levels never reach their last level.
    """
    chosen = [TreeSetting(length, 1, length) for length in chains]
    for depth in depths:
        for top_k in top_ks:
            offered = top_k + (depth - 1) * top_k**2
            chosen += [TreeSetting(depth, top_k, n) for n in nodes if depth <= n <= offered and top_k > 1]
    settings = list(dict.fromkeys(chosen))
    if not settings:
        raise UsageError(
            "no tree to try: nodes must be at least the depth, and at most top_k + (depth - 1) * top_k * top_k"
        )
    for setting in settings:
        parse_tree(setting.name)  # raises for numbers below 1, naming them
    return settings


def tree_engines(
    session: Session, drafter: Drafter, settings: Sequence[TreeSetting], options: EngineOptions
) -> dict[str, Engine]:
    """Engines for a search: plain decoding, and the drafter with every tree."""
    engines = {PLAIN: session.engine(None, options)}
    return engines | {one.name: session.engine(drafter, replace(options, tree=one.name)) for one in settings}


class Rung(NamedTuple):
    """How many settings are measured on how many groups of prompts."""

    settings: int
    groups: int


def rungs(settings: int, groups: int, *, coarse: int, finalists: int) -> list[Rung]:
    """Plan the rungs: from all `settings` on `coarse` groups down to `finalists` on all `groups`."""
    plan = []
    left = settings
    prompts = min(coarse, groups)
    while left > finalists:
        plan.append(Rung(left, prompts))
        left = max(finalists, ceil(left / HALVING_FACTOR))
        prompts = min(prompts * HALVING_FACTOR, groups)
    return [*plan, Rung(left, groups)]


def sweep_runs(settings: int, groups: Sequence[int], repeats: int, *, coarse: int, finalists: int) -> int:
    """Number of group runs of a search, plain decoding's included; `groups`: of each task."""
    total = 0
    plan = rungs(settings, max(groups), coarse=coarse, finalists=finalists)
    for number, rung in enumerate(plan, start=1):
        measured = sum(min(rung.groups, each) for each in groups)
        total += measured * (rung.settings + 1) * (repeats if number == len(plan) else 1)
    return total


@dataclass(frozen=True)
class Pass:
    """A measured rung and the scores of its settings."""

    rung: Rung
    candidates: tuple[Candidate, ...]


@dataclass
class TreeSweep:
    """The search over trees for one drafter and target. `engines`: by name, plain decoding's included."""

    engines: Mapping[str, Engine]
    settings: Sequence[TreeSetting]
    tasks: Sequence[Task]
    params: SamplingParams
    plan: Plan
    by: Criterion = "tokens_per_second"
    coarse: int = 2
    """Prompt groups per task in the first pass, each run once."""
    finalists: int = 4
    """Settings in the last pass, which runs every group with all repeats."""
    measure: Measure | None = None
    """Measures a task; None: in this process."""
    passes: list[Pass] = field(default_factory=list)

    @property
    def rungs(self) -> list[Rung]:
        """The rungs that will be measured, coarsest first."""
        most = max(len(task.groups) for task in self.tasks)
        return rungs(len(self.settings), most, coarse=self.coarse, finalists=self.finalists)

    @property
    def work(self) -> int:
        """Number of group runs needed, plain decoding's included."""
        return sweep_runs(
            len(self.settings),
            [len(task.groups) for task in self.tasks],
            self.plan.repeats,
            coarse=self.coarse,
            finalists=self.finalists,
        )

    def run(self, advance: Advance = lambda: None) -> Selection:
        """Run all passes; the choice is among the finalists, by the last pass alone."""
        remaining = [setting.name for setting in self.settings]
        for number, rung in enumerate(self.rungs, start=1):
            last = number == len(self.rungs)
            plan = self.plan if last else Plan(1, self.plan.warmup)
            names = remaining[: rung.settings]
            candidates = self._measure(names, rung.groups, plan, advance)
            self.passes.append(Pass(rung, tuple(candidates)))
            remaining = [candidate.name for candidate in sorted(candidates, key=self._rung_score, reverse=True)]
        return choose(self.passes[-1].candidates, self.by)

    def _rung_score(self, candidate: Candidate) -> float:
        """The score that decides which settings stay. Few runs are easily disturbed, so speed is judged by the pace."""
        return candidate.mean(self.by) if self.by == "accept_length" else candidate.pace

    def _measure(self, names: Sequence[str], groups: int, plan: Plan, advance: Advance) -> list[Candidate]:
        engines = {name: self.engines[name] for name in (PLAIN, *names)}
        scores: dict[str, dict[str, Any]] = {name: {} for name in names}
        for task in self.tasks:
            part = Task(task.name, task.groups[:groups])
            results = (self.measure or measure)(part, engines, self.params, plan, advance)
            task.errors += [error for error in part.errors if error not in task.errors]
            for name in names:
                scores[name][task.name] = task_score(results[name], results[PLAIN])
        return [Candidate(name, found) for name, found in scores.items()]


@dataclass(frozen=True)
class TreeReport:
    """The result of a search over draft trees: the choice and every measured figure."""

    drafter: str
    settings_tried: Sequence[TreeSetting]
    passes: Sequence[Pass]
    choice: Selection
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, Pass]]:
        """Finalists, best first, then dropped settings, those of later passes first; each with its last pass."""
        seen: set[str] = set()
        rows = []
        for done in reversed(self.passes):
            for candidate in rank([c for c in done.candidates if c.name not in seen], self.choice.by):
                seen.add(candidate.name)
                rows.append((candidate, done))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; `passes` has every measured figure."""
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
        """The ranking for a terminal; a setting's figures are those of the last pass it took part in."""
        table = Table("", "tree", title=f"Draft trees for {self.drafter}")
        for header in ("tokens/s", "speedup", "accept length", "efficiency", "prompts per file"):
            table.add_column(header, justify="right")
        for candidate, done in self.in_order:
            mark = "pick" if candidate is self.choice.best else "tie" if candidate.name in self.choice.ties else ""
            speedup = candidate.mean("speedup")
            length = candidate.mean("accept_length")
            table.add_row(
                mark,
                candidate.name,
                f"{candidate.mean('tokens_per_second'):.1f}",
                with_margin("{:.2f}x", speedup, candidate.margin("speedup")),
                with_margin("{:.2f}", length, candidate.margin("accept_length")),
                f"{speedup / length:.2f}{' ?' if impossible(candidate.name, speedup, length) else ''}"
                if length
                else "",
                str(done.rung.groups),
            )
        return table


def tree_to_keep(choice: Selection, tree: str) -> str:
    """The default tree to store for a drafter: a choice's `tree`, or `auto` if it is in doubt."""
    return tree if choice.doubt is None else "auto"


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


METRICS = ("loss", "validation_loss", "validation_accept_length", "decoded_accept_length")
"""A run's logged metrics: training and validation loss; accept length, simulated and decoded."""
_VALIDATED = ("decoded_accept_length", "validation_accept_length")
Record = dict[str, Any]
"""A line of a run's metrics.jsonl."""


@dataclass(frozen=True)
class CheckpointReport:
    """The choice of a checkpoint: every candidate on real tasks, next to its training metrics at that step."""

    run: TrainingRun
    choice: Selection
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, int, dict[str, float]]]:
        """Candidates by step: (candidate, step, the values of `METRICS` and `moment` at that step)."""
        found = {candidate.name: candidate for candidate in self.choice.ranked}
        return [
            (found[checkpoint.name], checkpoint.step, self.run.at(checkpoint.step, METRICS))
            for checkpoint in self.run.checkpoints
            if checkpoint.name in found
        ]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: settings, machine, the choice, and every checkpoint's training metrics."""
        rows = [
            {"name": candidate.name, "step": step, "training": training} for candidate, step, training in self.in_order
        ]
        return {
            "run": self.run.path.name,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            **self.choice.as_dict(),
            "checkpoints": rows,
            "errors": list(self.errors),
        }

    def table(self) -> Table:
        """The table for a terminal, by step; the choice and its ties are marked."""
        rows = self.in_order
        tasks = list(self.choice.best.tasks)
        shown = [metric for metric in METRICS if any(metric in training for *_, training in rows)]
        table = Table("", "step", "trained s" if self.run.timed else "", title=f"Checkpoints of {self.run.path}")
        for header in (*(metric.replace("_", " ") for metric in shown), *_columns(tasks), "identical"):
            table.add_column(header, justify="right")
        for candidate, step, training in rows:
            mark = "pick" if candidate is self.choice.best else "tie" if candidate.name in self.choice.ties else ""
            moment = f"{training['moment']:.0f}" if self.run.timed and "moment" in training else ""
            metrics = (f"{training[name]:.3f}" if name in training else "" for name in shown)
            same = sum(score.same for score in candidate.tasks.values())
            answers = sum(score.answers for score in candidate.tasks.values())
            table.add_row(mark, str(step), moment, *metrics, *_figures(candidate, tasks), f"{same}/{answers}")
        return table


def _columns(tasks: Sequence[str]) -> list[str]:
    names = [*tasks, *(["mean"] if len(tasks) > 1 else [])]
    return [f"{name}: {figure}" for name in names for figure in ("accept length", "speedup")]


def _figures(candidate: Candidate, tasks: Sequence[str]) -> list[str]:
    """The accept length and the speedup of every task, and their means, with their margins."""
    each = [Candidate(candidate.name, {task: candidate.tasks[task]}) for task in tasks]
    return [
        with_margin(form, one.mean(by), one.margin(by))
        for one in (*each, *([candidate] if len(tasks) > 1 else []))
        for by, form in _SHOWN
    ]


_SHOWN: tuple[tuple[Criterion, str], ...] = (("accept_length", "{:.2f}"), ("speedup", "{:.2f}x"))


@dataclass(frozen=True)
class RunCheckpoint:
    """A drafter directory of a run, and the training step after which it was written."""

    name: str
    path: Path
    step: int


@dataclass(frozen=True)
class TrainingRun:
    """The folder that `eyas train` writes: its checkpoints, its metrics and its recipe."""

    path: Path

    @cached_property
    def checkpoints(self) -> list[RunCheckpoint]:
        """Checkpoints by step. Directories without config.json, which is written last, are unfinished and left out."""
        found = [
            RunCheckpoint(path.name, path, int(path.name.removeprefix("step-")))
            for path in (self.path / "checkpoints").glob("step-*")
            if path.name.removeprefix("step-").isdecimal() and (path / "config.json").is_file()
        ]
        if not found:
            raise DataError(
                f"{self.path} has no checkpoints: a run of `eyas train` keeps them in {self.path / 'checkpoints'}, "
                "one directory step-N each"
            )
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def best(self, count: int) -> set[str]:
        """The names of the `count` checkpoints that did best in validation, the latest of equals."""

        def validated(checkpoint: RunCheckpoint) -> tuple[float, int]:
            found = self.at(checkpoint.step, _VALIDATED)
            return next((found[name] for name in _VALIDATED if name in found), 0.0), checkpoint.step

        ranked = sorted(self.checkpoints, key=validated, reverse=True)
        return {checkpoint.name for checkpoint in ranked[:count]}

    @cached_property
    def records(self) -> list[Record]:
        """The lines of metrics.jsonl, except a last line that a kill cut short; empty if there is no such file."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"])})
            except (ValueError, TypeError, KeyError) as error:
                if number < len(lines):
                    raise DataError(f"{path}:{number} isn't a metrics record (an object with a step)") from error
        return records

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The drafter section of the run's recipe, config.yaml; empty if there is none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise DataError(f"{path} is not valid YAML: {error}") from error
        section = values.get("drafter", values) if isinstance(values, dict) else None
        return section if isinstance(section, dict) else {}

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Training seconds (or steps, if records have no seconds) and values of all records that have `metric`."""
        found = [(self.moment(record), record[metric]) for record in self.records if metric in record]
        return [moment for moment, _ in found], [value for _, value in found]

    @property
    def timed(self) -> bool:
        """Whether all records have training seconds."""
        return bool(self.records) and all("seconds" in record for record in self.records)

    def moment(self, record: Record) -> float:
        """A record's position on the time axis: its seconds, or its step."""
        return float(record["seconds"] if self.timed else record["step"])

    def at(self, step: int, metrics: Sequence[str]) -> dict[str, float]:
        """The latest values of `metrics` at or before `step`, and the run's `moment` there."""
        found: dict[str, float] = {}
        for record in self.records:
            if record["step"] <= step:
                found |= {name: record[name] for name in metrics if name in record}
                found["moment"] = self.moment(record)
        return found
