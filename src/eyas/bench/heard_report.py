"""Methods that are measured from outside: interleaved as in `runner.py`, and their figures in the same report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.bench.report import Line
from eyas.bench.runner import Plan, Progress, interleaved, median_run
from eyas.bench.serve_client import LoadRun
from eyas.bench.serve_counters import Counted
from eyas.bench.serve_report import ACCEPT_LENGTH, accept_length, quantiles
from eyas.bench.tasks import Group, Task

Ask = Callable[[Group], LoadRun]

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


@dataclass
class Heard:
    """A method on a task."""

    runs: list[LoadRun] = field(default_factory=list)
    """The groups' median runs."""
    same: int = 0
    compared: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(answer.tokens for run in self.runs for answer in run.answers)

    @property
    def seconds(self) -> float:
        """Wall time."""
        return sum(run.seconds for run in self.runs)

    @property
    def counted(self) -> Counted:
        """What was counted of speculation."""
        return sum((run.counted for run in self.runs), Counted())

    def as_dict(self) -> dict[str, Any]:
        """The counts behind the figures."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "passes": sum(answer.passes for run in self.runs for answer in run.answers),
            "accepted_in_passes": sum(answer.accepted for run in self.runs for answer in run.answers),
            "counted": vars(self.counted),
        }


def measure_heard(
    task: Task, methods: Mapping[str, Ask], baseline: str | None, plan: Plan, advance: Progress = lambda: None
) -> dict[str, Heard]:
    """Ask every method for every group; texts are compared with the baseline's."""
    heard = {name: Heard() for name in methods}
    for _ in range(plan.warmup if task.groups else 0):
        for ask in methods.values():
            ask(task.groups[0])
    for number, group in enumerate(task.groups):
        runs = interleaved(
            list(methods), lambda name, asked: methods[name](asked), group, plan.repeats, number, advance
        )
        for name, one in heard.items():
            one.runs.append(median_run(runs[name], lambda run: run.seconds))
            one.errors.update(a.error for run in runs[name] for a in run.answers if a.error is not None)
            if baseline is not None:
                texts = _texts(runs[baseline][0])
                one.compared += len(texts)
                one.same += sum(
                    all(_texts(run).get(item) == text for run in runs[name]) for item, text in texts.items()
                )
    return heard


def _texts(run: LoadRun) -> dict[int, str]:
    """Number -> text of the answers that came."""
    return {answer.item: answer.text for answer in run.answers if answer.error is None}


def heard_lines(task: str, heard: Mapping[str, Heard], baseline: str | None) -> list[Line]:
    """The lines of one file."""
    base = None if baseline is None else _speed(heard[baseline])
    plain = baseline is not None and accept_length(heard[baseline].runs) in (None, 1.0)
    return [_line(task, name, one, base, against_plain=plain and name != baseline) for name, one in heard.items()]


def _line(task: str, method: str, heard: Heard, base: float | None, *, against_plain: bool) -> Line:
    good = [answer for run in heard.runs for answer in run.answers if answer.error is None]
    speed = _speed(heard)
    return Line(
        task,
        method,
        speed,
        None if base is None else speed / base if base else 0.0,
        accept_length(heard.runs),
        None,
        heard.counted.rates,
        heard.same,
        heard.compared,
        quantiles([answer.first_seconds for answer in good]).get("p50"),
        quantiles([answer.seconds_per_token for answer in good]).get("p50"),
        against_plain=against_plain,
    )


def _speed(heard: Heard) -> float:
    return heard.tokens / heard.seconds if heard.seconds else 0.0


def heard_errors(heard: Mapping[str, Mapping[str, Heard]]) -> Sequence[str]:
    """What went wrong, with counts."""
    return [
        f"{task}, {method}: {count} times {error}"
        for task, methods in heard.items()
        for method, one in methods.items()
        for error, count in one.errors.items()
    ]
