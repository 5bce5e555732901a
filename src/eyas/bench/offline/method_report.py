"""Methods of drafting side by side: the figures of a comparison, as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from rich.table import Table

from eyas.bench.offline.methods import OpenedMethod, Skipped
from eyas.bench.offline.report import DEFINITIONS, MEAN, MethodLine, efficiency_cell, line_dict, lines_of, means
from eyas.bench.offline.runner import PLAIN, MethodResult

Results = Mapping[tuple[float, str], Mapping[str, MethodResult]]
"""(temperature, task) -> method -> what it did."""

REPLACED = "speedup:"
COMPARISON = (
    "speedup: the median of the paired ratios, with their quartiles: tokens/s over those of `none`, plain decoding by "
    "the same code and counter, in the same repeat on the same prompts.",
    *(line for line in DEFINITIONS if not line.startswith(REPLACED)),
    "drafting: the drafter's share of the time of decoding: drafts, and reading what was committed.",
    "weights, cache: what the drafter holds and the target doesn't, without slots, and what its slots add.",
)
"""The definitions of a comparison's figures."""


class Quartiles(NamedTuple):
    """The lower and the upper quartile of some ratios."""

    lower: float
    upper: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Quartiles | None:
        """Those of at least two ratios; None of fewer."""
        if len(ratios) < 2:
            return None
        lower, _, upper = quantiles(ratios, n=4, method="inclusive")
        return Quartiles(lower, upper)


@dataclass(frozen=True)
class ComparedLine:
    """A method's figures on one file at one temperature, or their mean over files."""

    temperature: float
    line: MethodLine
    """Its speedup is the median of the paired ratios."""
    spread: Quartiles | None
    """The quartiles of those ratios; None of a mean, or of plain decoding."""
    pairs: int
    """How many paired ratios there are."""
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
    """All lines: for each temperature those of every file, then the means over files."""
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
    speedup = median(ratios) if ratios else line.speedup
    share = result.stats.draft_share
    return ComparedLine(temperature, replace(line, speedup=speedup), Quartiles.of(ratios), len(ratios), share)


@dataclass(frozen=True)
class MethodComparison:
    """All that a comparison found, and what it was made with."""

    methods: Sequence[OpenedMethod]
    skipped: Sequence[Skipped]
    results: Results
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]
    samples: Sequence[Mapping[str, Any]] = ()
    """Of each file the first prompt, as `task`, `prompt` and `answer`, at the first temperature."""

    @property
    def lines(self) -> list[ComparedLine]:
        """The lines of the table."""
        return compared(self.results)

    @property
    def equality(self) -> str:
        """Whether all answers are plain decoding's, in a sentence."""
        differing = dict.fromkeys(
            f"{one.line.method} at T={one.temperature:g} on {one.line.task} ({one.line.same} of {one.line.answers})"
            for one in self.lines
            if one.line.same != one.line.answers and one.line.task != MEAN
        )
        if not differing:
            return "Every answer of every method is plain decoding's, token for token, in every repeat."
        return f"NOT all answers are plain decoding's: {', '.join(differing)}."

    @cached_property
    def fastest(self) -> tuple[str, float]:
        """The method to serve and its speedup: the best mean over files and temperatures, plain decoding among them."""
        speedups: dict[str, list[float]] = {PLAIN: [1.0]}
        for one in self.lines:
            if one.line.task != MEAN and one.line.method in {each.choice.name for each in self.methods}:
                speedups.setdefault(one.line.method, []).append(one.line.speedup or 0.0)
        name = max(speedups, key=lambda method: fmean(speedups[method]))
        return name, fmean(speedups[name])

    @property
    def fastest_options(self) -> list[str]:
        """The options with which `eyas serve` serves it; trees are then sized by the load."""
        choice = next((each.choice for each in self.methods if each.choice.name == self.fastest[0]), None)
        if choice is None:
            return []
        drafter = [] if choice.source is None else ["--draft-model", choice.source]
        return [*drafter, *([] if choice.method is None else ["--method", choice.method])]

    @property
    def certain(self) -> bool:
        """Whether three quarters of the fastest method's runs, on every file, were faster than plain decoding."""
        spreads = [one.spread for one in self.lines if one.line.method == self.fastest[0] and one.line.task != MEAN]
        return all(spread is not None and spread.lower > 1.0 for spread in spreads)

    @property
    def verdict(self) -> str:
        """Which method to serve, in a sentence or two."""
        name, speedup = self.fastest
        if name == PLAIN:
            return "Fastest: plain decoding. No method was faster here, so serve without one."
        found = f"Fastest: {name}, {speedup:.2f} times as fast as plain decoding on these prompts."
        if self.certain:
            return found
        return (
            f"{found} That isn't certain: not three quarters of its runs on each file were faster. `eyas serve` drafts "
            "only where that pays; more prompts or a quieter machine would tell."
        )

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
            "fastest": self.fastest[0],
            "verdict": self.verdict,
            "serve": self.fastest_options,
            "errors": list(self.errors),
        }

    def table(self, title: str) -> Table:
        """The figures for a terminal."""
        table = Table("file", "T", "method", title=title)
        for name in ("tokens/s", "speedup", "quartiles", "accept length", "efficiency", "drafting"):
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
                "" if line.speedup is None else f"{line.speedup:.2f}x",
                "" if one.spread is None else f"{one.spread.lower:.2f}-{one.spread.upper:.2f}",
                "" if line.accept_length is None else f"{line.accept_length:.2f}",
                efficiency_cell(line),
                f"{one.draft_share:.0%}",
                " ".join(f"{rate:.2f}" for rate in line.by_position),
                f"{line.same}/{line.answers}",
            )
        return table

    def costs(self) -> Table:
        """What each method costs apart from time, for a terminal."""
        table = Table("method", "drafter", "tree", title="What each method drafts with")
        for name in ("weights, MB", "cache, MB", "training"):
            table.add_column(name, justify="right")
        for row in (method.as_dict() for method in self.methods):
            sizes = (f"{row[name] / 1e6:.1f}" for name in ("weights_bytes", "cache_bytes"))
            table.add_row(row["method"], row["drafter"] or "", row["tree"], *sizes, training_words(row["training"]))
        return table


def training_words(training: Mapping[str, Any] | None) -> str:
    """What training took, such as `1500 steps, 36 min`; empty where nothing is recorded."""
    words = []
    if training and "steps" in training:
        words.append(f"{training['steps']} steps")
    if training and "seconds" in training:
        words.append(f"{training['seconds'] / 60:.0f} min")
    return ", ".join(words)


def _rounded(result: MethodResult) -> list[float]:
    return [round(ratio, 4) for ratio in result.ratios]
