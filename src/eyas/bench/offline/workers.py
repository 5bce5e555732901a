"""Measurements on many machines: a worker answers a group of prompts with every method in turn.

Each group is a complete interleaved comparison on one machine, so no ratio mixes times of two machines. Tokens/s are
pooled over groups, and so over machines; every machine contributes equally to all methods.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from eyas.bench.machine import describe_machine
from eyas.bench.offline.runner import (
    PLAIN,
    Advance,
    Group,
    GroupRun,
    MethodResult,
    Plan,
    Task,
    add_group,
    interleaved,
    run_group,
)
from eyas.drafters.base import Drafter
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.options import EngineOptions, TargetOptions
from eyas.runtime import taken_by_others
from eyas.session import Session
from eyas.targets.fingerprint import fingerprint
from eyas.types import SamplingParams
from eyas.work import Crew, Key, Take, Unit, UnitReport

MakeEngine = Callable[[str], Engine]
"""Makes a worker's engine for a method, by its name."""


class GroupWork(NamedTuple):
    """A group of prompts for some methods to answer, and the task's first group, which warms them up."""

    task: str
    names: tuple[str, ...]
    number: int
    group: Group
    first: Group
    params: SamplingParams
    plan: Plan


class GroupWorker:
    """Answers groups of prompts with engines of its own, made when a method is first needed."""

    def __init__(self, identity: dict[str, Any], make: MakeEngine) -> None:
        """`identity` is what answers depend on: the target's fingerprint, dtype and device."""
        self.identity = identity
        self._make = make
        self._engines: dict[str, Engine] = {}
        self._warm: tuple[str, tuple[str, ...]] | None = None

    def work(self, take: Take) -> Iterator[UnitReport]:
        """Answer groups; a group's report has its runs by method, and the state of the machine at that time."""
        while units := take(1):
            given: GroupWork = units[0].content
            self._engines = {name: self._engines.get(name) or self._make(name) for name in given.names}
            if self._warm != (given.task, given.names):
                for engine in self._engines.values():
                    for _ in range(given.plan.warmup):
                        run_group(engine, given.first, given.params)
                self._warm = (given.task, given.names)
            answer = partial(self._answer, given.params)
            runs = interleaved(given.names, answer, given.group, given.plan.repeats, given.number, lambda: None)
            yield UnitReport(units[0].key, (runs, {"host": socket.gethostname(), **describe_machine()}))

    def _answer(self, params: SamplingParams, name: str, group: Group) -> GroupRun:
        return run_group(self._engines[name], group, params)


@dataclass(frozen=True)
class MeasuringMaker:
    """Makes the worker of a measurement on its machine: the target, and an engine for each method."""

    target: TargetOptions
    methods: Mapping[str, tuple[DrafterOptions, str | None]]
    """Method -> its drafter and its tree; None: the drafter's own tree."""
    options: EngineOptions
    """Options of all engines, except the tree."""

    def __call__(self) -> GroupWorker:
        """Load the target; drafters are loaded when they are first needed."""
        session = Session.open(self.target)

        @lru_cache(maxsize=1)  # trees share a drafter; each of several drafters is loaded once, by its engine
        def drafter(options: DrafterOptions) -> Drafter:
            return session.drafter(options)

        def engine(name: str) -> Engine:
            if name == PLAIN:
                return session.engine(None, self.options)
            chosen, tree = self.methods[name]
            return session.fixed_engine(drafter(chosen), replace(self.options, tree=tree))

        target = session.target
        dtype = str(target.dtype).removeprefix("torch.")
        return GroupWorker({"target": fingerprint(target.model), "dtype": dtype, "device": target.device.type}, engine)


class CrewMeasure:
    """Measures as `runner.measure` does, on a crew's workers; the engines given to it only name the methods."""

    def __init__(self, crew: Crew, settings: Mapping[str, Any]) -> None:
        """`settings` go into reports: where the workers are, and what they compute with."""
        self.settings = dict(settings)
        self._crew = crew
        self._groups: Counter[str] = Counter()
        self._machines: dict[str, dict[str, Any]] = {}

    def __call__(
        self,
        task: Task,
        engines: Mapping[str, Engine],
        params: SamplingParams,
        plan: Plan,
        advance: Advance = lambda: None,
    ) -> dict[str, MethodResult]:
        """Results of all groups in the task's order, whichever worker answered them."""
        names = tuple(engines)
        waiting = deque(enumerate(task.groups))
        found: dict[Key, dict[str, list[GroupRun]]] = {}
        others = 0.0

        def units(room: int) -> list[Unit]:
            chosen = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            return [
                Unit((task.name, number), GroupWork(task.name, names, number, group, task.groups[0], params, plan))
                for number, group in chosen
            ]

        for report in self._crew.run(units):
            runs, machine = report.value
            found[report.key] = runs
            others = max(others, taken_by_others(machine))
            self._groups[machine["host"]] += 1
            self._machines[machine["host"]] = machine
            for _ in range(len(names) * plan.repeats):
                advance()
        results = {name: MethodResult(others=others) for name in names}
        for number in range(len(task.groups)):
            add_group(task, results, found[task.name, number])
        return results

    @property
    def machines(self) -> list[dict[str, Any]]:
        """The machines that measured, each with the number of groups that it answered."""
        return [{**self._machines[host], "groups": groups} for host, groups in sorted(self._groups.items())]

    @property
    def described(self) -> str:
        """What measured, and what that means for the figures: the last line of a report."""
        count = len(self._groups)
        if not count:
            return "Nothing was measured: the scores of an earlier run on a cluster were kept."
        if count == 1:
            return (
                "All was measured on one machine of the cluster; workers that share it affect each other's times, but "
                "not accept lengths."
            )
        return (
            f"Measured on {count} machines, each group of prompts with all methods in turn on one of them: speedups "
            "are ratios of one machine's times, tokens/s are means over the machines. Workers that share a machine "
            "affect each other's times, but not accept lengths."
        )
