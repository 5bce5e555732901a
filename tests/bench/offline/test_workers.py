"""Measurements by workers: the counts of one process, every group's comparison whole, whoever dies."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import pytest

from eyas.bench.offline import runner, workers
from eyas.bench.offline.runner import PLAIN, GroupRun, Plan, Task, measure
from eyas.bench.offline.workers import CrewMeasure, GroupWorker
from eyas.labs.cluster.crew import Crew
from eyas.text.prompts import PromptRow
from eyas.types import SamplingParams, Stats

from ...labs.cluster.fake import FakeExecutor

NAMES: Any = {PLAIN: PLAIN, "one": "one", "two": "two"}
PARAMS = SamplingParams(max_tokens=8)


def name_of(name: str) -> Any:
    return name


class Runs:
    """Stands for `run_group`: counts that depend on engine and group, and who was run in which order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, engine: str, group: Any, params: SamplingParams) -> GroupRun:
        assert params == PARAMS
        self.calls.append((group[0].id, engine))
        number = int(group[0].id)
        stats = Stats(tokens=9 + number, target_passes=9, walked=number + len(engine), decode_seconds=1.0 + number)
        return GroupRun(stats, [[number]], ["no sense"] if number == 3 and engine == PLAIN else [])


def task() -> Task:
    return Task("t", [[PromptRow(str(i), f"f:{i}", prompt="x")] for i in range(7)])


@pytest.mark.parametrize("seed", range(3))
def test_workers_count_what_one_process_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(runner, "run_group", runs)
    monkeypatch.setattr(workers, "run_group", runs)
    alone = task()
    shared = task()
    plan = Plan(repeats=2, warmup=1)
    expected = measure(alone, NAMES, PARAMS, plan)
    runs.calls.clear()
    steps: list[int] = []
    executor = FakeExecutor(seed, deaths=3)
    with Crew(executor, partial(GroupWorker, {"target": "x"}, name_of), workers=None, ahead=1) as crew:
        made = CrewMeasure(crew, {"on": "ray"})
        found = made(shared, NAMES, PARAMS, plan, lambda: steps.append(0))
    assert found.keys() == expected.keys()
    for name, result in found.items():
        assert result.groups == expected[name].groups
        assert (result.same, result.answers, result.stats) == (7, 7, expected[name].stats)
    assert shared.errors == alone.errors == ["no sense"]
    assert len(steps) == 7 * 3 * 2
    (machine,) = made.machines
    assert machine["groups"] == 7
    assert "on one machine of the cluster" in made.described


def test_a_group_is_one_workers_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(workers, "run_group", runs)
    with Crew(FakeExecutor(), partial(GroupWorker, {}, name_of), workers=3, ahead=1) as crew:
        CrewMeasure(crew, {})(task(), NAMES, PARAMS, Plan(repeats=2, warmup=0))
    for start in range(0, len(runs.calls), 6):
        groups, names = zip(*runs.calls[start : start + 6], strict=True)
        assert len(set(groups)) == 1
        assert sorted(names) == sorted([*NAMES] * 2)
        assert names[0] != names[3]  # the order is rotated, as in one process


def test_workers_on_several_machines_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run_group", Runs())
    hosts = cycle("abc")
    monkeypatch.setattr(workers.socket, "gethostname", lambda: next(hosts))
    with Crew(FakeExecutor(), partial(GroupWorker, {}, name_of), workers=2, ahead=1) as crew:
        made = CrewMeasure(crew, {})
        made(task(), NAMES, PARAMS, Plan(repeats=1, warmup=0))
    assert {machine["host"] for machine in made.machines} == set("abc")
    assert sum(machine["groups"] for machine in made.machines) == 7
    assert "Measured on 3 machines, each group of prompts with all methods in turn on one of them" in made.described
