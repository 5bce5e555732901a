"""A crew: every unit is done whoever dies, and what can't go on is said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from eyas.errors import ClusterError, StoreError, UsageError
from eyas.labs.cluster import crew, worker
from eyas.labs.cluster.crew import DEATHS, Crew
from eyas.labs.cluster.worker import installed
from eyas.work import Take, Unit, UnitReport

from .fake import FakeExecutor


class Squares:
    """Squares numbers, two at a time and in three steps; some numbers are errors."""

    def __init__(self, identity: dict[str, Any]) -> None:
        self.identity = identity

    def work(self, take: Take) -> Iterator[UnitReport]:
        running: dict[str | tuple[str, int], tuple[int, int]] = {}
        while True:
            for unit in take(2 - len(running)):
                running[unit.key] = (unit.content, 0)
            if not running:
                return
            for key, (number, steps) in list(running.items()):
                if number == -1:
                    raise StoreError("the disk is full")
                if number == -2:
                    raise UsageError("there is no such number")
                if number == -3:
                    raise ZeroDivisionError("of course")
                running[key] = (number, steps + 1)
                if steps == 2:
                    del running[key]
                    yield UnitReport(key, number * number)
                else:
                    yield UnitReport(key, steps, done=False)


def squares(executor: FakeExecutor, numbers: list[int], **options: Any) -> list[int]:
    """What a crew makes of the numbers; a square below 50 is a further unit."""
    waiting = deque(numbers)

    def take(room: int) -> list[Unit]:
        return [Unit(str(n), n) for n in [waiting.popleft() for _ in range(min(room, len(waiting)))]]

    found = []
    with Crew(executor, partial(Squares, {"by": "hand"}), **{"workers": None, "ahead": 2, **options}) as made:
        for report in made.run(take):
            if report.done:
                found.append(report.value)
                if report.value < 50 and report.value not in numbers:
                    waiting.append(report.value)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_unit_is_done_once_whoever_dies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "EXCHANGE_SECONDS", 0.0 if seed % 2 else 0.2)  # deaths within units, and between them
    executor = FakeExecutor(seed, deaths=seed, room=1 + seed % 4)
    numbers = [2, 3, 5, 6, 8, 10, 11, 12, 13, 14, 15]
    wanted = sorted([n * n for n in numbers] + [n * n for n in (4, 9, 25, 36, 16)])
    assert sorted(squares(executor, numbers)) == wanted
    assert executor.started == 1 + seed % 4 + (seed - executor.deaths)
    assert seed < 6 or executor.deaths < seed  # some did die
    assert executor.stopped
    assert executor.most <= 2


def test_nothing_to_do_ends_at_once() -> None:
    assert squares(FakeExecutor(), []) == []


def test_workers_are_as_many_as_wanted() -> None:
    executor = FakeExecutor(room=3)
    squares(executor, [1], workers=5)
    assert executor.started == 5


@pytest.mark.parametrize("doomed", ["describe", "open", "exchange"])
def test_workers_that_always_die_end_the_run(doomed: str) -> None:
    executor = FakeExecutor(doomed=doomed, room=2)
    with pytest.raises(ClusterError, match=r"11 workers died .*: killed by a test\. What is finished is kept"):
        squares(executor, [1, 2, 3])
    assert executor.started == 2 + DEATHS
    assert executor.stopped


def test_a_worker_of_another_version_is_refused() -> None:
    executor = FakeExecutor()
    executor.describes[1] = {"machine": "far", **installed(), "torch": "1.0"}
    with pytest.raises(ClusterError, match=r"on far runs another version.*torch was '.*', is '1\.0'.*Install the same"):
        squares(executor, list(range(40)))


def test_workers_that_compute_with_something_else_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"computes with something else: by was 'machine', is 'hand'"):
        squares(FakeExecutor(), [1], expected={"by": "machine"})


def test_the_first_worker_says_what_all_compute_with() -> None:
    with Crew(FakeExecutor(), partial(Squares, {"by": "hand"}), workers=2, ahead=1) as made:
        assert made.identity() == {"by": "hand"}


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (-1, ClusterError, r"the disk is full \(the worker on .*, process \d+\)"),
        (-2, UsageError, "there is no such number"),
        (-3, ClusterError, "unexpected ZeroDivisionError: of course"),
    ],
)
def test_an_error_of_a_worker_ends_the_run(number: int, kind: type[Exception], words: str) -> None:
    executor = FakeExecutor()
    with pytest.raises(kind, match=words):
        squares(executor, [8, number])
    assert executor.stopped


def test_a_worker_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(crew, "SILENCE", 0.0)
    executor = FakeExecutor(room=1)
    waits = executor.wait
    silent = [True, True, False]

    def wait(seconds: float) -> list[tuple[int, Any]]:
        hangs = "exchange" in {method for method, _ in executor._calls.values()} and silent and silent.pop(0)
        return [] if hangs else waits(seconds)

    monkeypatch.setattr(executor, "wait", wait)
    assert squares(executor, [9]) == [81]
    assert caplog.text.count("has not answered for 0 s: if it hangs, kill it, and another") == 1
