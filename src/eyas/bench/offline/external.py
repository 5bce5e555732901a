"""Engines and servers measured alike: a group of prompts is answered and timed as a client sees it, prefill included.

Groups are interleaved as in `runner.py`; figures go into the same report. An answer's number is `turn * rows + row`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from eyas.bench.offline.report import MethodLine
from eyas.bench.offline.runner import Advance, Group, Plan, Task, interleaved, median_run
from eyas.bench.serving.answer import TimedAnswer
from eyas.bench.serving.client import Client, LoadRun
from eyas.bench.serving.counters import SpeculationCounts
from eyas.bench.serving.load import Item, Load, item_of
from eyas.bench.serving.report import ACCEPT_LENGTH, accept_length, quantiles
from eyas.bench.serving.servers import Side
from eyas.engine import Engine
from eyas.errors import RequestError
from eyas.text.dialogue import Dialogue, converse
from eyas.types import SamplingParams, Stats

T = TypeVar("T")
Method = Callable[[Group], LoadRun]
"""Answers a group of prompts: an engine here, or a server."""

DEFINITIONS = (
    "tokens/s: output tokens (of a server as its `usage` counts them) / wall time from the request to the end of the "
    "answer, prefill included. A group of prompts counts with its median run.",
    "speedup: tokens/s of the method / tokens/s of the baseline.",
    "TTFT: request sent to first text. TPOT: (end - first text) / (tokens - 1). Medians over the answers.",
    ACCEPT_LENGTH,
    "efficiency: speedup / accept length, if the baseline decodes plainly.",
    "by position: drafts accepted at that depth / drafts, by the server's counters.",
    "identical: answers whose text is the baseline's, in every repeat.",
    "mean: arithmetic mean of the files' figures.",
)


def run_engine_as_client(engine: Engine, group: Group, params: SamplingParams) -> LoadRun:
    """Decode a group in this process; a turn begins when the last answer of the turn before has ended."""
    dialogues = [Dialogue(row) for row in group]
    began = ended = time.perf_counter()
    starts: dict[int, float] = {0: began}
    firsts: dict[int, float] = {}
    answers: list[TimedAnswer] = []
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
                TimedAnswer(
                    number,
                    start - began,
                    now - start,
                    firsts.get(number),
                    done.stats.tokens,
                    len(dialogue.requests[turn].prompt),
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
    """A server that answers groups of prompts. Use it as a context manager; EndpointError if it can't be reached.

    With a tokenizer prompts are sent as token ids, if the server takes them: `sends_ids` says so.
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
            if self._tokenizer is not None and not self._await(self._client.takes_ids(_some_ids(self._tokenizer))):
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
        """Whether prompts are sent as token ids."""
        return self._tokenizer is not None

    def run(self, group: Group) -> LoadRun:
        """Send all rows of a group at once, turn after turn."""
        return self._await(self._converse(group))

    async def _converse(self, group: Group) -> LoadRun:
        texts: list[list[str]] = [[] for _ in group]
        open_rows, answers, runs, turn = list(range(len(group))), list[TimedAnswer](), list[LoadRun](), 0
        while open_rows:
            items: dict[int, Item] = {}
            for row in open_rows:
                number = turn * len(group) + row
                try:
                    items[row] = item_of(group[row], group[row].id, self._tokenizer, texts[row])
                except RequestError as error:
                    answers.append(_failed(number, f"{group[row].where}: {error}"))
            run = await self._client.run(Load("closed", max(1, len(items))), list(items.values()), 0, 0)
            for row, answer in zip(items, run.answers, strict=True):
                answers.append(replace(answer, item=turn * len(group) + row))
                texts[row].append(answer.text)
            failed = {answer.item % len(group) for answer in answers if answer.error is not None}
            turn += 1
            open_rows = [row for row in open_rows if row not in failed and turn < len(group[row].turns or ("",))]
            runs.append(run)
        counted = sum((run.counted for run in runs), SpeculationCounts())
        return LoadRun(sum(run.seconds for run in runs), sorted(answers, key=lambda answer: answer.item), counted)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def _some_ids(tokenizer: Any) -> Sequence[int]:
    """Token ids of a short text, to try whether a server takes any."""
    ids: list[int] = tokenizer("one two")["input_ids"]
    return ids


def _failed(number: int, error: str) -> TimedAnswer:
    return TimedAnswer(number, 0.0, 0.0, error=error)


def _counted(stats: Stats) -> SpeculationCounts:
    """The engine's statistics as the counters that servers publish."""
    histogram, offered = stats.accepted_histogram, stats.offered_by_depth
    return SpeculationCounts(
        float(offered[0]) if offered else 0.0,
        float(stats.drafted_depth),
        float(stats.walked),
        tuple(float(sum(histogram[depth + 1 :])) for depth in range(len(offered))),
    )


@dataclass
class ExternalResult:
    """What a method did on a task, timed as a client sees it."""

    runs: list[LoadRun] = field(default_factory=list)
    """The median run of every group."""
    same: int = 0
    compared: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.tokens for run in self.runs for answer in run.answers)

    @property
    def seconds(self) -> float:
        """Wall time of all groups, one after the other."""
        return sum(run.seconds for run in self.runs)

    @property
    def counted(self) -> SpeculationCounts:
        """The counters of speculation, summed over the groups."""
        return sum((run.counted for run in self.runs), SpeculationCounts())

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: the counts that figures are computed from."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "passes": sum(answer.passes for run in self.runs for answer in run.answers),
            "accepted_in_passes": sum(answer.accepted for run in self.runs for answer in run.answers),
            "counted": vars(self.counted),
        }


def measure_external(
    task: Task, methods: Mapping[str, Method], baseline: str | None, plan: Plan, advance: Advance = lambda: None
) -> dict[str, ExternalResult]:
    """Have every method answer every group, interleaved; texts are compared with the baseline's."""
    results = {name: ExternalResult() for name in methods}
    for _ in range(plan.warmup if task.groups else 0):
        for method in methods.values():
            method(task.groups[0])
    for number, group in enumerate(task.groups):
        runs = interleaved(list(methods), lambda name, each: methods[name](each), group, plan.repeats, number, advance)
        for name, one in results.items():
            one.runs.append(median_run(runs[name], lambda run: run.seconds))
            one.errors.update(a.error for run in runs[name] for a in run.answers if a.error is not None)
            if baseline is not None:
                texts = _texts(runs[baseline][0])
                one.compared += len(texts)
                one.same += sum(
                    all(_texts(run).get(item) == text for run in runs[name]) for item, text in texts.items()
                )
    return results


def _texts(run: LoadRun) -> dict[int, str]:
    """Number -> text of the answers without an error."""
    return {answer.item: answer.text for answer in run.answers if answer.error is None}


def external_lines(task: str, results: Mapping[str, ExternalResult], baseline: str | None) -> list[MethodLine]:
    """The figures of every method on one file."""
    base = None if baseline is None else _speed(results[baseline])
    plain = baseline is not None and accept_length(results[baseline].runs) in (None, 1.0)
    return [_line(task, name, one, base, against_plain=plain and name != baseline) for name, one in results.items()]


def _line(task: str, method: str, result: ExternalResult, base: float | None, *, against_plain: bool) -> MethodLine:
    good = [answer for run in result.runs for answer in run.answers if answer.error is None]
    speed = _speed(result)
    return MethodLine(
        task,
        method,
        speed,
        None if base is None else speed / base if base else 0.0,
        accept_length(result.runs),
        None,
        result.counted.rates,
        result.same,
        result.compared,
        quantiles([answer.first_seconds for answer in good]).get("p50"),
        quantiles([answer.seconds_per_token for answer in good]).get("p50"),
        against_plain=against_plain,
    )


def _speed(result: ExternalResult) -> float:
    return result.tokens / result.seconds if result.seconds else 0.0


def external_errors(results: Mapping[str, Mapping[str, ExternalResult]]) -> Sequence[str]:
    """Every error of every method and task, with how often it occurred."""
    return [
        f"{task}, {method}: {count} times {error}"
        for task, methods in results.items()
        for method, one in methods.items()
        for error, count in one.errors.items()
    ]
