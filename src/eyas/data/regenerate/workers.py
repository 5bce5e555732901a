"""Answers from many machines: workers with engines of their own, to which a crew hands out questions.

There is one journal, which the process that runs the crew writes: a question whose answer isn't in it is asked again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from eyas.cluster.crew import Crew
from eyas.cluster.worker import Take as TakeUnits
from eyas.cluster.worker import Unit, UnitReport
from eyas.data.regenerate.entries import Answerer, Question, Reply, Take


class AnswererWorker:
    """Answers questions with an answerer on its own machine."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer

    @property
    def identity(self) -> dict[str, Any]:
        """What the answers depend on: the answerer's settings."""
        return self._answerer.settings

    def work(self, take: TakeUnits) -> Iterator[UnitReport]:
        """Answer questions; the report on one has its reply."""

        def questions(room: int) -> Sequence[Question]:
            return [unit.content for unit in take(room)]

        for reply in self._answerer.answers(questions):
            yield UnitReport((reply.entry.id, reply.entry.turn), reply)


class ServerAnswerer:
    """An endpoint that a worker has started for itself: its address says nothing about the answers."""

    def __init__(self, name: str, answerer: Answerer, stop: Callable[[], object]) -> None:
        """`name` is the engine's; `stop` ends the server, which lasts as long as this object."""
        self._name, self._answerer = name, answerer
        weakref.finalize(self, stop)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the requests, and the engine in place of the address."""
        return {**self._answerer.settings, "answered_by": self._name}

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""
        return self._answerer.answers(take)


class CrewAnswerer:
    """Has the workers of a crew answer; which of them answers what makes no difference."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    @property
    def settings(self) -> dict[str, Any]:
        """The settings on which all workers agree; waits for the first of them."""
        return self._crew.identity()

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""

        def units(room: int) -> list[Unit]:
            return [Unit((question.id, question.turn), question) for question in take(room)]

        for report in self._crew.run(units):
            yield report.value
