"""The clock of a request, and observers as one."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.serve.observe.observer import FinishedSequence, Observers, SequenceClock
from eyas.types import Chunk, Completion, Stats

from .watched import CONTROLLER, REQUEST, outcome, state


class Recorder:
    """Keeps the calls of its hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [10.0]
    monkeypatch.setattr("eyas.serve.observe.observer.time.monotonic", lambda: clock[0])
    return clock


def test_a_request_is_timed(now: list[float]) -> None:
    seen = Recorder()
    watch = SequenceClock(seen, REQUEST)
    now[0] = 11.0
    watch.add(Chunk(0, (), 0))
    now[0] = 12.0
    watch.add(Chunk(0, (1, 2), 1))
    now[0] = 12.5
    watch.add(Chunk(0, (3, 4, 5), 2))
    now[0] = 14.0
    stats = Stats(tokens=5)
    watch.add(Chunk(0, (), 0, Completion("", [], "", "stop", stats)))
    watch.end("cancelled")
    end = FinishedSequence(REQUEST, "stop", stats, 4.0, 2.0)
    assert seen.calls == [
        ("request_received", REQUEST),
        ("first_token", REQUEST, 2.0),
        ("more_tokens", REQUEST, 3, 0.5),
        ("finished", end),
    ]
    assert end.seconds_per_token == 0.5


def test_an_end_without_the_engines_word_has_the_tokens_that_came(now: list[float]) -> None:
    seen = Recorder()
    watch = SequenceClock(seen, REQUEST)
    watch.add(Chunk(0, (1, 2), 1))
    now[0] = 12.0
    watch.add(Chunk(0, (3, 4, 5), 2))
    watch.end("cancelled")
    assert seen.calls[-1] == ("finished", FinishedSequence(REQUEST, "cancelled", Stats(tokens=5), 2.0, 0.0))


def test_an_end_without_tokens(now: list[float]) -> None:
    seen = Recorder()
    watch = SequenceClock(seen, REQUEST)
    now[0] = 13.0
    watch.end("error")
    (_, (name, end)) = seen.calls
    assert (name, end.reason, end.seconds, end.seconds_per_token) == ("finished", "error", 3.0, None)


def test_several_as_one() -> None:
    seen = [Recorder(), Recorder()]
    together = Observers(seen)
    step = (state(), CONTROLLER, outcome([1], [2], [3]))
    end = FinishedSequence(REQUEST, "stop", Stats(), 1.0, None)
    together.request_received(REQUEST)
    together.first_token(REQUEST, 0.5)
    together.more_tokens(REQUEST, 2, 0.1)
    together.refused("/x", 404, "c", "/x")
    together.stepped(*step)
    together.finished(end)
    assert seen[0].calls == seen[1].calls
    assert seen[0].calls == [
        ("request_received", REQUEST),
        ("first_token", REQUEST, 0.5),
        ("more_tokens", REQUEST, 2, 0.1),
        ("refused", "/x", 404, "c", "/x"),
        ("stepped", *step),
        ("finished", end),
    ]
