"""The race: whose clock is behind moves next, and nobody pays for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eyas.cli.decode import demo as racing
from eyas.cli.decode.demo import Lane, race
from eyas.types import Chunk, Completion, Request, Stats

from ...pairs import tokenizer


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Runner:
    """An engine whose every round takes the same time and adds the same number of tokens."""

    def __init__(self, clock: Clock, seconds: float, step: int, log: list[float]) -> None:
        self.clock = clock
        self.seconds = seconds
        self.step = step
        self.log = log
        self.tokenizer = tokenizer()

    def stream(self, requests: list[Request]) -> Iterator[Chunk]:
        tokens = self.tokenizer("def add(a, b): clips")["input_ids"][:6]
        assert len(requests) == 1
        for start in range(0, 6, self.step):
            self.clock.now += self.seconds
            self.log.append(self.seconds)
            new = tuple(tokens[start : start + self.step])
            done = start + self.step >= 6
            completion = Completion("", tokens, self.tokenizer.decode(tokens), "length", Stats()) if done else None
            yield Chunk(0, new, len(new) - 1, completion)


def test_turns_times_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = list[float]()
    monkeypatch.setattr(racing, "time", clock)
    engines: list[Any] = [Runner(clock, 1.0, 1, log), Runner(clock, 1.5, 3, log)]
    slow, fast = lanes = [Lane("plain", engines[0]), Lane("speculative", engines[1])]
    moves: list[tuple[int, int]] = []

    def moved() -> None:
        moves.append((slow.tokens, fast.tokens))
        clock.now += 100.0  # drawing is on nobody's time

    race(lanes, Request((1,)), moved)
    assert (slow.seconds, fast.seconds) == (6.0, 3.0)
    assert log == [1.0, 1.5, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0]
    assert moves[:4] == [(1, 0), (1, 3), (2, 3), (2, 6)]
    for lane in lanes:
        assert lane.completion is not None
        assert "".join(text for text, _ in lane.pieces) == lane.completion.text
        assert lane.tokens == 6
    assert [accepted for _, accepted in fast.pieces[:6]] == [True, True, False] * 2
    assert not any(accepted for _, accepted in slow.pieces)
    race(lanes, Request((1,)), lambda: None)
    assert (slow.seconds, slow.tokens) == (6.0, 6)  # a lane starts anew


def test_short_rounds_move_on_until_a_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of lanes finds the caches full of the other's weights."""
    clock = Clock()
    log = list[float]()
    monkeypatch.setattr(racing, "time", clock)
    monkeypatch.setattr(racing, "_TURN", 3.0)
    engines: list[Any] = [Runner(clock, 1.0, 1, log), Runner(clock, 2.0, 1, log)]
    race([Lane(str(i), engine) for i, engine in enumerate(engines)], Request((1,)), lambda: None)
    assert log == [1.0] * 3 + [2.0] * 2 + [1.0] * 3 + [2.0] * 4
