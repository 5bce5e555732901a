"""Choose among candidates (checkpoints, trees, trials of a sweep): their scores, how certain a difference is, and the
best.

Speedup is what users notice, but timing is noisy; accept length is a count, and under greedy decoding the same every
time. Both would differ on other prompts. That uncertainty is estimated by leaving out one group of prompts at a time
(the jackknife), on the *difference* of two candidates that answered the same prompts. For figures that depend on time,
the noise of the machine is added: see `TaskScore.noise`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from eyas.bench.offline.runner import MethodResult
from eyas.types import Stats

Criterion = Literal["accept_length", "speedup", "tokens_per_second"]
WORDS: dict[Criterion, str] = {"accept_length": "accept length", "speedup": "speedup", "tokens_per_second": "tokens/s"}
"""Criterion -> its name in reports."""
CRITERION_REASONS: dict[Criterion, str] = {
    "accept_length": (
        "Accept length decides: it is counted, not timed, so it has no timing noise, and candidates that cost the same "
        "per round rank by it as they would by speed on a quiet machine."
    ),
    "speedup": "Speedup decides: tokens/s divided by plain decoding's in the same interleaved run.",
    "tokens_per_second": "Tokens/s decide, all candidates interleaved in one run.",
}
"""Criterion -> the sentence about it in the reason of a choice."""
MIN_NOISE = 0.02
"""Minimum relative uncertainty of times that a reason mentions."""
MARGIN = 2.0
"""Standard errors in the margin that is printed next to a figure."""
MOST_EFFICIENT = 1.05
"""Speedup / accept length beyond which a figure can't be true: a verification pass costs at least a plain one."""


def impossible(name: str, speedup: float | None, accept_length: float | None) -> str | None:
    """A sentence about a speedup that can't be true; None if it can."""
    if not speedup or not accept_length or speedup / accept_length <= MOST_EFFICIENT:
        return None
    return (
        f"impossible: {name}, {speedup:.2f}x at accept length {accept_length:.2f}: no pass yields more tokens than its "
        "accept length, so something else slowed plain decoding down. Measure again, with more repeats"
    )


def faster_than_plain(speedup: float, margin: float | None) -> bool | None:
    """Whether a speedup is above 1.0; None if its margin doesn't tell."""
    return None if margin is None or abs(speedup - 1.0) <= margin else speedup > 1.0


def joint_margin(margins: Sequence[float | None]) -> float | None:
    """The margin of the mean of figures with these margins; None if one is unknown."""
    known = [margin for margin in margins if margin is not None]
    return sqrt(sum(margin**2 for margin in known)) / len(known) if known and len(known) == len(margins) else None


def with_margin(form: str, value: float, margin: float | None) -> str:
    """A figure with its margin, as in `1.28x ±0.31`; `±?` if a single group of prompts leaves it unknown."""
    digits = form.format(value).rstrip("x").partition(".")[2]
    return f"{form.format(value)} ±{'?' if margin is None else f'{margin:.{len(digits)}f}'}"


class Count(NamedTuple):
    """Counts and seconds of one group of prompts, from its median run."""

    tokens: int
    target_passes: int
    walked: int
    decode_seconds: float


def count(stats: Stats) -> Count:
    """Extract the counts from which figures are computed."""
    return Count(stats.decoded_tokens, stats.target_passes, stats.walked, stats.decode_seconds)


@dataclass(frozen=True)
class TaskScore:
    """A method on a task, and plain decoding in the same interleaved runs; both group by group."""

    method: tuple[Count, ...]
    plain: tuple[Count, ...]
    same: int
    """Answers equal to plain decoding's, token for token."""
    answers: int
    noise: float = 0.0
    """Relative standard error of a time: over repeats of plain decoding, or what other processes took, if larger."""

    def figure(self, by: Criterion, without: int | None = None) -> float:
        """The figure named `by`, pooled over all groups, or over all but group number `without`."""
        method = pooled(self.method, without)
        if by == "accept_length":
            return 1.0 + method.walked / method.target_passes if method.target_passes else 0.0
        speed = method.tokens / method.decode_seconds if method.decode_seconds else 0.0
        if by == "tokens_per_second":
            return speed
        plain = pooled(self.plain, without)
        return speed * plain.decode_seconds / plain.tokens if plain.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: counts, which `from_dict` reads, and figures for readers."""
        figures = {name: round(self.figure(name), 4) for name in WORDS}
        return figures | asdict(self)

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> TaskScore:
        """The score that `as_dict` wrote."""
        method, plain = (tuple(Count(*each) for each in row[name]) for name in ("method", "plain"))
        return TaskScore(method, plain, row["same"], row["answers"], row.get("noise", 0.0))


def task_score(measured: MethodResult, plain: MethodResult) -> TaskScore:
    """The score of a method and of plain decoding that were measured in the same interleaved runs."""
    spread = fmean(plain.spreads) / sqrt(len(plain.spreads)) if plain.spreads else 0.0
    return TaskScore(
        tuple(map(count, measured.groups)),
        tuple(map(count, plain.groups)),
        measured.same,
        measured.answers,
        round(max(spread, plain.others), 6),
    )


def pooled(counts: Sequence[Count], without: int | None = None) -> Count:
    """Sum the counts, leaving out number `without`."""
    kept = [each for index, each in enumerate(counts) if index != without]
    return Count(*(sum(column) for column in zip(*kept, strict=True))) if kept else Count(0, 0, 0, 0.0)


@dataclass(frozen=True)
class Candidate:
    """Something to choose from, with its score on every task."""

    name: str
    tasks: Mapping[str, TaskScore]

    def mean(self, by: Criterion) -> float:
        """Arithmetic mean of the tasks' figures, weighting tasks equally."""
        return fmean(score.figure(by) for score in self.tasks.values())

    def margin(self, by: Criterion) -> float | None:
        """Two standard errors of the mean; None if a task has a single group of prompts."""
        error = uncertainty(self, None, by)
        return None if error is None else MARGIN * error

    @property
    def possible(self) -> bool:
        """Whether the speedup can be true on every task."""
        scores = self.tasks.values()
        return not any(impossible("", one.figure("speedup"), one.figure("accept_length")) for one in scores)

    @property
    def faster(self) -> bool | None:
        """Whether it is faster than plain decoding; None if its margin doesn't tell."""
        return faster_than_plain(self.mean("speedup"), self.margin("speedup")) if self.possible else None

    @property
    def pace(self) -> float:
        """Tokens/s from accept length and the median time of a pass over all groups.

        Less exact than tokens/s, but hardly affected by moments in which the machine was busy. It suits comparisons of
        many candidates on few runs.
        """
        passes = [
            run.decode_seconds / run.target_passes
            for score in self.tasks.values()
            for run in score.method
            if run.target_passes
        ]
        return self.mean("accept_length") / median(passes) if passes and median(passes) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: means over tasks with their margins, and every task's score."""
        means = {name: round(self.mean(name), 4) for name in WORDS}
        margins = {name: None if (found := self.margin(name)) is None else round(found, 4) for name in WORDS}
        scores = {name: score.as_dict() for name, score in self.tasks.items()}
        return {"name": self.name, "mean": means, "margin": margins, "tasks": scores}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> Candidate:
        """The candidate that `as_dict` wrote."""
        return Candidate(row["name"], {name: TaskScore.from_dict(score) for name, score in row["tasks"].items()})


def rank(candidates: Sequence[Candidate], by: Criterion) -> list[Candidate]:
    """Sort candidates, best mean first, those whose times can't be true last; ties stay in the given order."""
    return sorted(candidates, key=lambda each: (by != "accept_length" and not each.possible, -each.mean(by)))


def uncertainty(one: Candidate, other: Candidate | None, by: Criterion) -> float | None:
    """Standard error of the difference of two means, or of one mean; None if a task has a single group of prompts."""
    total = 0.0
    for name, score in one.tasks.items():
        rivals = [] if other is None else [other.tasks[name]]
        groups = len(score.method)
        if groups < 2 or any(len(rival.method) != groups for rival in rivals):
            return None
        left_out = [
            score.figure(by, group) - sum(rival.figure(by, group) for rival in rivals) for group in range(groups)
        ]
        middle = fmean(left_out)
        total += (groups - 1) / groups * sum((each - middle) ** 2 for each in left_out)
        if by != "accept_length":
            total += sum((timed.noise * timed.figure(by)) ** 2 for timed in (score, *rivals))
    return sqrt(total) / len(one.tasks)


def tied(best: Candidate, other: Candidate, by: Criterion) -> bool:
    """Whether the difference is at most twice its standard error; equal means always tie."""
    gap = best.mean(by) - other.mean(by)
    error = uncertainty(best, other, by)
    return gap == 0 if error is None else gap <= MARGIN * error


def doubt(candidate: Candidate) -> str | None:
    """Why a candidate should not be served: it isn't certain to be faster than plain decoding. None if it is.

    Certain means a plausible figure that is more than two standard errors above 1.0.
    """
    if not candidate.possible:
        return f"the figures measured for {candidate.name} can't be true"
    if candidate.faster:
        return None
    measured = f"{candidate.name} decodes at {describe_speed(candidate)}"
    if candidate.faster is False:
        return f"{measured}, so serving with it is slower than without a drafter"
    if candidate.margin("speedup") is None:
        return f"{measured}, and with one prompt per file the uncertainty is unknown: measure more prompts"
    return f"{measured}, which may be slower than without a drafter: more prompts or a quieter machine would show it"


def describe_speed(candidate: Candidate) -> str:
    """Its speedup and how certain that is, in words."""
    speedup = candidate.mean("speedup")
    margin = candidate.margin("speedup")
    bars = "" if margin is None else f" (give or take {margin:.2f}, two standard errors)"
    return f"{speedup:.2f} times the speed of plain decoding{bars}"


@dataclass(frozen=True)
class Selection:
    """The choice among candidates: all of them in order, the chosen one first, and the reason."""

    ranked: tuple[Candidate, ...]
    by: Criterion
    ties: tuple[str, ...]
    """Candidates that these prompts can't distinguish from the chosen one."""
    reason: str

    @property
    def best(self) -> Candidate:
        """The candidate that was chosen."""
        return self.ranked[0]

    @property
    def doubt(self) -> str | None:
        """Why the chosen one should not be served; None if it is certain to be faster than plain decoding."""
        return doubt(self.best)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: the choice, its reason, and all candidates in order."""
        return {
            "by": self.by,
            "pick": self.best.name,
            "reason": self.reason,
            "doubt": self.doubt,
            "ties": list(self.ties),
            "ranked": [candidate.as_dict() for candidate in self.ranked],
        }


def choose(candidates: Sequence[Candidate], by: Criterion) -> Selection:
    """Choose the candidate with the best mean; takes at least one, all measured on the same tasks."""
    ranked = rank(candidates, by)
    best, rest = ranked[0], ranked[1:]
    ties = tuple(other.name for other in rest if tied(best, other, by))
    return Selection(tuple(ranked), by, ties, _reason(best, rest, ties, by))


def _reason(best: Candidate, rest: Sequence[Candidate], ties: Sequence[str], by: Criterion) -> str:
    scope = "over tasks" if len(best.tasks) > 1 else f"on {next(iter(best.tasks))}"
    digits = 1 if by == "tokens_per_second" else 3
    parts = [f"{best.name} has the best mean {WORDS[by]} {scope}, {best.mean(by):.{digits}f}."]
    if rest:
        second = rest[0]
        gap = best.mean(by) - second.mean(by)
        error = uncertainty(best, second, by)
        sure = "one prompt per file: the uncertainty is unknown"
        if error is not None:
            sure = f"standard error over prompts {error:.{digits}f}"
        lower = f"{gap:.{digits}f} lower" if gap else "no lower, but later in order"
        parts.append(f"Next is {second.name}, {lower} ({sure}).")
    else:
        parts.append("There was nothing else to choose from.")
    if ties:
        verb, pronoun = ("is", "it") if len(ties) == 1 else ("are", "them")
        parts.append(
            f"{', '.join(ties)} {verb} within two standard errors: these prompts can't tell {pronoun} from the pick; "
            "more prompts might."
        )
    if by != "speedup" and (fastest := rank([best, *rest], "speedup")[0]) is not best:
        parts.append(
            f"{fastest.name} has the best measured speedup, {fastest.mean('speedup'):.2f}x "
            f"against {best.mean('speedup'):.2f}x."
        )
    parts.append(CRITERION_REASONS[by])
    noise = max(score.noise for each in (best, *rest) for score in each.tasks.values())
    if noise >= MIN_NOISE:
        parts.append(
            f"Times are uncertain by {noise:.0%}, from repeats of plain decoding and the machine's other work: the "
            "error bars of speeds are that much wider."
        )
    for each in (best, *rest):
        if (wrong := impossible(each.name, each.mean("speedup"), each.mean("accept_length"))) is not None:
            parts.append(f"{wrong[0].upper()}{wrong[1:]}.")
    if (doubted := doubt(best)) is not None:
        parts.append(f"Beware: {doubted}.")
    return " ".join(parts)
