"""Figures of measurements, as a table for a terminal and as JSON. Every figure is defined here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, quantiles
from typing import Any, Literal, NamedTuple

from rich.table import Table

from eyas.bench.offline.candidates import (
    WORDS,
    Candidate,
    Criterion,
    faster_than_plain,
    impossible,
    joint_margin,
    task_score,
    with_margin,
)
from eyas.bench.offline.methods import OpenedMethod, Skipped
from eyas.bench.offline.runner import PLAIN, MethodResult
from eyas.tables import by_position
from eyas.tree import is_auto
from eyas.types import CONTEXT_BUCKETS

DEFINITIONS = (
    "tokens/s: emitted tokens / wall time of decoding; prefill is timed separately. A group of prompts counts with its "
    "median run.",
    "accept length: tokens per target pass, the bonus token counted (1 + accepted / passes), pooled over rows; passes "
    "for which nothing was drafted count.",
    "speedup: tokens/s of the method / tokens/s of `none`, plain decoding by the same code and counter, interleaved.",
    "±: two standard errors, over prompts and, for times, over repeats; ±? where a file has a single group of prompts.",
    "by context: accept length of rounds by the tokens before them (k = 1,024); shown where there are several.",
    "efficiency: speedup / accept length; 1 = verifying and drafting cost nothing.",
    "by position: of the passes that offered a draft token at that depth, the share that accepted it.",
    "identical: answers equal to plain decoding's, token for token, in every repeat.",
    "mean: arithmetic mean of the files' figures.",
)


MEAN = "mean"
"""The task of lines that are means over files."""


@dataclass(frozen=True)
class MethodLine:
    """The figures of one method on one file, or their mean over files: a line of the table."""

    task: str
    method: str
    tokens_per_second: float
    speedup: float | None
    """tokens/s / the baseline's tokens/s; None without one."""
    accept_length: float | None
    """Tokens per target pass; None if the server doesn't report it."""
    prefill_seconds: float | None
    by_position: list[float]
    same: int
    answers: int
    ttft_ms: float | None = None
    """Median time to the first text, for methods timed as a client sees them."""
    tpot_ms: float | None = None
    """Median time per token after the first, for the same methods."""
    by_context: Mapping[str, float] = field(default_factory=dict)
    """Accept length by range of context length, for the ranges that had rounds."""
    against_plain: bool = True
    """Whether the baseline is another method that decodes plainly."""
    margins: Mapping[Criterion, float | None] = field(default_factory=dict)
    """Two standard errors of the figures of that name; None where one group of prompts can't tell, empty for plain
    decoding and for methods timed as a client sees them."""

    @property
    def efficiency(self) -> float | None:
        """Speedup / accept length; None without a plain baseline or without one of the two."""
        if self.method == PLAIN or not self.against_plain or self.speedup is None:
            return None
        return self.speedup / self.accept_length if self.accept_length else None

    @property
    def impossible(self) -> str | None:
        """A sentence about a speedup that can't be true; None if it can, and for means."""
        if self.efficiency is None or self.task == MEAN:
            return None
        return impossible(f"{self.method} on {self.task}", self.speedup, self.accept_length)


def lines_of(task: str, results: Mapping[str, MethodResult]) -> list[MethodLine]:
    """The figures of every method on one file."""
    base = results[PLAIN].stats.tokens_per_second
    return [
        MethodLine(
            task,
            method,
            measured.stats.tokens_per_second,
            measured.stats.tokens_per_second / base if base else 0.0,
            measured.stats.accept_length,
            measured.stats.prefill_seconds,
            measured.stats.accepted_by_position,
            measured.same,
            measured.answers,
            by_context=measured.stats.accept_length_by_context,
            margins=_margins(task, method, measured, results[PLAIN]),
        )
        for method, measured in results.items()
    ]


def _margins(task: str, method: str, measured: MethodResult, plain: MethodResult) -> dict[Criterion, float | None]:
    if method == PLAIN:
        return {}
    candidate = Candidate(method, {task: task_score(measured, plain)})
    return {name: candidate.margin(name) for name in WORDS}


def means(lines: Sequence[MethodLine]) -> list[MethodLine]:
    """The mean of every method over all files; empty if there is one file only."""
    if len({line.task for line in lines}) < 2:
        return []
    made = []
    for method in dict.fromkeys(line.method for line in lines):
        mine = [line for line in lines if line.method == method]
        depth = min(len(line.by_position) for line in mine)
        ranges = [name for name in CONTEXT_BUCKETS if all(name in line.by_context for line in mine)]
        made.append(
            MethodLine(
                MEAN,
                method,
                fmean(line.tokens_per_second for line in mine),
                _mean([line.speedup for line in mine]),
                _mean([line.accept_length for line in mine]),
                _mean([line.prefill_seconds for line in mine]),
                [fmean(line.by_position[i] for line in mine) for i in range(depth)],
                sum(line.same for line in mine),
                sum(line.answers for line in mine),
                _mean([line.ttft_ms for line in mine]),
                _mean([line.tpot_ms for line in mine]),
                {name: fmean(line.by_context[name] for line in mine) for name in ranges},
                all(line.against_plain for line in mine),
                {name: joint_margin([line.margins.get(name) for line in mine]) for name in mine[0].margins},
            )
        )
    return made


def _mean(values: Sequence[float | None]) -> float | None:
    """Arithmetic mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def table_of(lines: Sequence[MethodLine], title: str) -> Table:
    """The table for a terminal; with TTFT and TPOT in place of prefill if any method has them."""
    as_client = any(line.ttft_ms is not None for line in lines)
    times = ("TTFT ms", "TPOT ms") if as_client else ("prefill s",)
    by_context = any(len(line.by_context) > 1 for line in lines)
    table = Table("file", "method", title=title)
    for name in ("tokens/s", "speedup", "accept length", "efficiency", *times):
        table.add_column(name, justify="right")
    table.add_column("by position")
    if by_context:
        table.add_column("by context")
    table.add_column("identical", justify="right")
    for line in lines:
        table.add_row(
            line.task,
            line.method,
            f"{line.tokens_per_second:.1f}",
            margin_cell(line, "speedup"),
            margin_cell(line, "accept_length"),
            efficiency_cell(line),
            *(
                (_cell(line.ttft_ms, "{:.1f}"), _cell(line.tpot_ms, "{:.1f}"))
                if as_client
                else (_cell(line.prefill_seconds, "{:.2f}"),)
            ),
            by_position(line.by_position),
            *([" ".join(f"{name}: {one:.2f}" for name, one in line.by_context.items())] if by_context else []),
            f"{line.same}/{line.answers}" if line.answers else "",
        )
    return table


def _cell(value: float | None, form: str) -> str:
    """The formatted value; empty for None."""
    return "" if value is None else form.format(value)


def margin_cell(line: MethodLine, name: Literal["speedup", "accept_length"]) -> str:
    """The speedup or the accept length, with its margin if it has one."""
    value = getattr(line, name)
    form = "{:.2f}x" if name == "speedup" else "{:.2f}"
    if value is None or name not in line.margins:
        return _cell(value, form)
    return with_margin(form, value, line.margins[name])


def efficiency_cell(line: MethodLine) -> str:
    """The efficiency, with a question mark if it can't be true."""
    return _cell(line.efficiency, "{:.2f}" if line.impossible is None else "{:.2f} ?")


def line_dict(line: MethodLine) -> dict[str, Any]:
    """The JSON form, rounded to four digits."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(line).items()}
    del rounded["against_plain"]
    rounded["margins"] = {name: None if one is None else round(one, 4) for name, one in line.margins.items()}
    rounded["by_context"] = {name: round(length, 4) for name, length in line.by_context.items()}
    rounded["by_position"] = [round(rate, 4) for rate in line.by_position]
    rounded["efficiency"] = None if line.efficiency is None else round(line.efficiency, 4)
    return rounded


def document(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    definitions: Sequence[str],
    lines: Sequence[MethodLine],
    counts: Mapping[str, Any],
    errors: Sequence[str],
) -> dict[str, Any]:
    """The JSON form of a report, however its lines were measured; `counts` by task and method."""
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "definitions": list(definitions),
        "lines": [line_dict(line) for line in (*lines, *means(lines))],
        "stats": dict(counts),
        "errors": list(errors),
    }


Results = Mapping[tuple[float, str], Mapping[str, MethodResult]]
"""(temperature, task) -> method -> its result."""

COMPARISON = (
    *DEFINITIONS,
    "drafting: the drafter's share of decoding time: drafting, and reading the committed tokens.",
    "weights: the drafter's memory without slots, beyond the target's own; cache: what its slots add.",
)
"""The definitions of a comparison's figures."""


class Quartiles(NamedTuple):
    """The lower and the upper quartile of some ratios."""

    lower: float
    upper: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Quartiles | None:
        """The quartiles of at least two ratios; None for fewer."""
        if len(ratios) < 2:
            return None
        lower, _, upper = quantiles(ratios, n=4, method="inclusive")
        return Quartiles(lower, upper)


@dataclass(frozen=True)
class ComparedLine:
    """A method's figures on one file at one temperature, or their mean over files."""

    temperature: float
    line: MethodLine
    spread: Quartiles | None
    """The quartiles of the paired ratios: tokens/s / plain decoding's in the same repeat on the same prompts; None for
    a mean or for plain decoding."""
    pairs: int
    """Number of paired ratios."""
    draft_share: float

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, rounded to four digits."""
        row = line_dict(self.line)
        del row["ttft_ms"], row["tpot_ms"]
        spread = None if self.spread is None else [round(value, 4) for value in self.spread]
        return row | {
            "temperature": self.temperature,
            "speedup_quartiles": spread,
            "pairs": self.pairs,
            "draft_share": round(self.draft_share, 4),
        }


def compared(results: Results) -> list[ComparedLine]:
    """All lines: for each temperature, one per method and file, then the means over files."""
    made: list[ComparedLine] = []
    for temperature in dict.fromkeys(heat for heat, _ in results):
        mine = [
            _line(temperature, line, measured[line.method])
            for (heat, task), measured in results.items()
            if heat == temperature
            for line in lines_of(task, measured)
        ]
        made += mine
        for line in means([one.line for one in mine]):
            share = fmean(one.draft_share for one in mine if one.line.method == line.method)
            pairs = sum(one.pairs for one in mine if one.line.method == line.method)
            made.append(ComparedLine(temperature, line, None, pairs, share))
    return made


def _line(temperature: float, line: MethodLine, result: MethodResult) -> ComparedLine:
    ratios = [] if line.method == PLAIN else result.ratios
    return ComparedLine(temperature, line, Quartiles.of(ratios), len(ratios), result.stats.draft_share)


class Standing(NamedTuple):
    """A method's mean speedup over files and temperatures."""

    name: str
    speedup: float
    margin: float | None = None
    """Two standard errors; None if unknown."""
    wrong: str | None = None
    """Why a figure of it can't be true."""

    @property
    def faster(self) -> bool | None:
        """Whether it is faster than plain decoding; None if that isn't certain."""
        return None if self.wrong is not None else faster_than_plain(self.speedup, self.margin)


@dataclass(frozen=True)
class MethodComparison:
    """All results of a comparison, and what they were measured with."""

    methods: Sequence[OpenedMethod]
    skipped: Sequence[Skipped]
    results: Results
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]
    samples: Sequence[Mapping[str, Any]] = ()
    """The first prompt of each file, as `task`, `prompt` and `answer`, at the first temperature."""

    @property
    def lines(self) -> list[ComparedLine]:
        """The lines of the table."""
        return compared(self.results)

    @property
    def equality(self) -> str:
        """A sentence on whether all answers are plain decoding's."""
        differing = dict.fromkeys(
            f"{one.line.method} at T={one.temperature:g} on {one.line.task} ({one.line.same} of {one.line.answers})"
            for one in self.lines
            if one.line.same != one.line.answers and one.line.task != MEAN
        )
        if not differing:
            return "Every answer of every method is plain decoding's, token for token, in every repeat."
        return f"NOT all answers are plain decoding's: {', '.join(differing)}."

    @cached_property
    def standings(self) -> list[Standing]:
        """Every method that was measured, fastest first; those with a figure that can't be true come last."""
        found = []
        for name in (each.choice.name for each in self.methods):
            mine = [one.line for one in self.lines if one.line.method == name and one.line.task != MEAN]
            if mine:
                margin = joint_margin([line.margins.get("speedup") for line in mine])
                wrong = next((line.impossible for line in mine if line.impossible is not None), None)
                found.append(Standing(name, fmean(line.speedup or 0.0 for line in mine), margin, wrong))
        return sorted(found, key=lambda one: (one.wrong is not None, -one.speedup))

    @property
    def fastest(self) -> Standing:
        """The fastest method among those whose figures can be true, plain decoding included."""
        return next((one for one in self.standings if one.wrong is None and one.speedup > 1.0), Standing(PLAIN, 1.0))

    @cached_property
    def to_serve(self) -> OpenedMethod | None:
        """The method to serve, with the tree that was measured; None for plain decoding.

        The fastest if it is certain to be faster than plain decoding; else the fastest of those with `auto`, which
        drafts only where that pays.
        """
        opened = {each.choice.name: each for each in self.methods}
        if self.fastest.name == PLAIN or self.fastest.faster:
            return opened.get(self.fastest.name)
        may = (opened[one.name] for one in self.standings if one.wrong is None and one.speedup > 1.0)
        return next((each for each in may if is_auto(each.tree)), None)

    @property
    def serve_options(self) -> list[str]:
        """The options with which `eyas serve` serves what was measured."""
        if self.to_serve is None:
            return []
        choice = self.to_serve.choice
        drafter = [] if choice.source is None else ["--draft-model", choice.source]
        method = [] if choice.method is None else ["--method", choice.method]
        return [*drafter, *method, "--tree", self.to_serve.tree]

    @property
    def verdict(self) -> str:
        """Which method is fastest, how certain that is, and what to serve, in a few sentences."""
        best = self.fastest
        wrong = [f"{one.name} isn't ranked: {one.wrong}." for one in self.standings if one.wrong is not None]
        if best.name == PLAIN:
            unclear = [one.name for one in self.standings if one.wrong is None and one.faster is None]
            if not unclear:
                return " ".join(["Fastest: plain decoding. No method was faster here, so serve without one.", *wrong])
            unsure = (
                "No method measured faster than plain decoding here, so serve without one. The margins of "
                f"{', '.join(unclear)} leave that open: more prompts or a quieter machine would show it."
            )
            return " ".join([unsure, *wrong])
        bars = "one prompt per file: the uncertainty is unknown"
        if best.margin is not None:
            bars = f"give or take {best.margin:.2f}, two standard errors"
        found = f"{best.name}, {best.speedup:.2f} times as fast as plain decoding on these prompts ({bars})."
        if best.faster:
            return " ".join([f"Fastest: {found}", *wrong])
        advice = "serve without a drafter"
        if self.to_serve is not None:
            advice = f"{self.to_serve.choice.name} drafts only where that pays"
        unsure = (
            f"No method is certain to be faster than plain decoding here. The best measured: {found} More prompts or a "
            f"quieter machine would show it; until then, {advice}."
        )
        return " ".join([unsure, *wrong])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: figures, and the counts they came from."""
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "definitions": list(COMPARISON),
            "methods": [method.as_dict() for method in self.methods],
            "skipped": [skipped._asdict() for skipped in self.skipped],
            "lines": [line.as_dict() for line in self.lines],
            "samples": [dict(sample) for sample in self.samples],
            "stats": [
                {"temperature": heat, "task": task, "method": name, **one.stats.as_dict(), "ratios": _rounded(one)}
                for (heat, task), measured in self.results.items()
                for name, one in measured.items()
            ],
            "equality": self.equality,
            "fastest": self.fastest.name,
            "certain": bool(self.fastest.faster),
            "impossible": [one.name for one in self.standings if one.wrong is not None],
            "verdict": self.verdict,
            "serve": self.serve_options,
            "errors": list(self.errors),
        }

    def table(self, title: str) -> Table:
        """The figures for a terminal."""
        table = Table("file", "T", "method", title=title)
        for name in ("tokens/s", "speedup", "accept length", "efficiency", "drafting"):
            table.add_column(name, justify="right")
        table.add_column("by position")
        table.add_column("identical", justify="right")
        for one in self.lines:
            line = one.line
            table.add_row(
                line.task,
                f"{one.temperature:g}",
                line.method,
                f"{line.tokens_per_second:.1f}",
                margin_cell(line, "speedup"),
                margin_cell(line, "accept_length"),
                efficiency_cell(line),
                f"{one.draft_share:.0%}",
                by_position(line.by_position),
                f"{line.same}/{line.answers}",
            )
        return table

    def costs(self) -> Table:
        """What each method costs besides time, for a terminal."""
        table = Table("method", "drafter", "tree", title="What each method drafts with")
        for name in ("weights, MB", "cache, MB", "training"):
            table.add_column(name, justify="right")
        for row in (method.as_dict() for method in self.methods):
            sizes = (f"{row[name] / 1e6:.1f}" for name in ("weights_bytes", "cache_bytes"))
            table.add_row(row["method"], row["drafter"] or "", row["tree"], *sizes, describe_training(row["training"]))
        return table


def describe_training(training: Mapping[str, Any] | None) -> str:
    """What training took, such as `1500 steps, 36 min`; empty if nothing is recorded."""
    words = []
    if training and "steps" in training:
        words.append(f"{training['steps']} steps")
    if training and "seconds" in training:
        words.append(f"{training['seconds'] / 60:.0f} min")
    return ", ".join(words)


def _rounded(result: MethodResult) -> list[float]:
    return [round(ratio, 4) for ratio in result.ratios]
