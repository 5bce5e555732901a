"""A group of prompts answered and timed as its asker hears it: by an engine in this process, or by a server.

Both are timed alike, prefill included, so that the two can be compared. An answer's number is `turn * rows + row`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from eyas.bench.serve_answer import Answer
from eyas.bench.serve_client import Client, LoadRun
from eyas.bench.serve_counters import Counted
from eyas.bench.serve_load import Load
from eyas.bench.serve_prompts import Item, item_of
from eyas.bench.serve_side import Side
from eyas.bench.tasks import Group
from eyas.data.dialogue import Dialogue, converse
from eyas.engine import Engine
from eyas.errors import RequestError
from eyas.types import SamplingParams, Stats

T = TypeVar("T")


def hear_engine(engine: Engine, group: Group, params: SamplingParams) -> LoadRun:
    """Decode a group here; a turn begins when the last answer of the turn before is there."""
    dialogues = [Dialogue(row) for row in group]
    began = ended = time.perf_counter()
    starts: dict[int, float] = {0: began}
    firsts: dict[int, float] = {}
    answers: list[Answer] = []
    stats = Stats()
    for dialogue, chunk in converse(engine, dialogues, params):
        now, done = time.perf_counter(), chunk.completion
        turn = len(dialogue.completions) - (done is not None)
        start = starts.setdefault(turn, ended)
        number = turn * len(group) + dialogues.index(dialogue)
        if chunk.token_ids:
            firsts.setdefault(number, now - start)
        if done is not None:
            ended = now
            answers.append(
                Answer(
                    number,
                    start - began,
                    now - start,
                    firsts.get(number),
                    done.stats.tokens,
                    len(dialogue.prompts[turn]),
                    done.text,
                    float(done.stats.target_passes),
                    float(done.stats.walked),
                    done.error,
                )
            )
            stats.merge(done.stats)
    for row, dialogue in enumerate(dialogues):
        if dialogue.error is not None:
            answers.append(_failed(len(dialogue.completions) * len(group) + row, dialogue.error))
    return LoadRun(ended - began, sorted(answers, key=lambda answer: answer.item), _counted(stats))


class Endpoint:
    """A server that is asked for groups. Use it as a context manager; raises EndpointError if it isn't there.

    With a tokenizer prompts are sent as token ids, if the server takes such: `sends_ids` says.
    """

    def __init__(
        self,
        side: Side,
        params: SamplingParams,
        timeout: float = 600.0,
        api_key: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._client = Client(side, params, timeout, api_key, own_seeds=False)
        self._tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Endpoint:
        try:
            self._await(self._client.__aenter__())
            if self._tokenizer is not None and not self._await(self._client.takes_ids(_few(self._tokenizer))):
                self._tokenizer = None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._await(self._client.__aexit__())
        self._loop.close()

    @property
    def sends_ids(self) -> bool:
        """Are prompts sent as token ids?"""
        return self._tokenizer is not None

    def run(self, group: Group) -> LoadRun:
        """Ask all rows at once, turn after turn."""
        return self._await(self._converse(group))

    async def _converse(self, group: Group) -> LoadRun:
        said: list[list[str]] = [[] for _ in group]
        open_rows, answers, runs, turn = list(range(len(group))), list[Answer](), list[LoadRun](), 0
        while open_rows:
            items: dict[int, Item] = {}
            for row in open_rows:
                number = turn * len(group) + row
                try:
                    items[row] = item_of(group[row], group[row].id, self._tokenizer, said[row])
                except RequestError as error:
                    answers.append(_failed(number, f"{group[row].where}: {error}"))
            run = await self._client.run(Load("closed", max(1, len(items))), list(items.values()), 0, 0)
            for row, answer in zip(items, run.answers, strict=True):
                answers.append(replace(answer, item=turn * len(group) + row))
                said[row].append(answer.text)
            failed = {answer.item % len(group) for answer in answers if answer.error is not None}
            turn += 1
            open_rows = [row for row in open_rows if row not in failed and turn < len(group[row].turns or ("",))]
            runs.append(run)
        counted = sum((run.counted for run in runs), Counted())
        return LoadRun(sum(run.seconds for run in runs), sorted(answers, key=lambda answer: answer.item), counted)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def _few(tokenizer: Any) -> Sequence[int]:
    """Some token ids to try a server with."""
    ids: list[int] = tokenizer("one two")["input_ids"]
    return ids


def _failed(number: int, error: str) -> Answer:
    return Answer(number, 0.0, 0.0, error=error)


def _counted(stats: Stats) -> Counted:
    """The engine's own counts in the words of servers."""
    histogram, offered = stats.accepted_histogram, stats.offered_by_depth
    return Counted(
        float(offered[0]) if offered else 0.0,
        float(stats.drafted_depth),
        float(stats.walked),
        tuple(float(sum(histogram[depth + 1 :])) for depth in range(len(offered))),
    )
