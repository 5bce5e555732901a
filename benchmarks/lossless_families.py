"""Whether speculation equals plain decoding on tiny random models of every architecture, token for token.

    python -m benchmarks.lossless_families [--limit 500] [--families llama,gemma2] [--dtypes float32,bfloat16,int8]
        [--seed 0] [--output FILE.json]

Every prompt is answered by plain decoding alone, then with others in a random setting: drafter, tree, batch of 1 to
16, chunks of prompts, limits of the cache (`lossless_cases.py`). Equality is promised in float32 and wherever passes
are native (docs/lossless.md); exits with 1 where an answer differs that shouldn't. Where equality isn't promised,
differences are counted, and how many of them are near-ties. No speed is measured.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from transformers.utils import logging

from benchmarks.harness import described, script, table
from benchmarks.lossless_cases import PRECISIONS, Bench, Setting, random_requests, random_setting, save_family
from eyas.bench.offline.certificate import first_difference, judge, scores_after
from eyas.cli.common import display
from eyas.files import write_json
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import Int8Linear
from eyas.targets.tokenizers import eos_token_ids
from eyas.types import Completion, Request, Stats
from tests import tiny

Progress = Callable[[str, int, int | None], None]
"""Told a stage, answers done, and answers in all."""


@dataclass
class Cell:
    """A family in a precision: how many answers were compared, and how they differed."""

    family: str
    precision: str
    native: bool
    """Whether the target's passes are native."""
    int8_linears: int
    """Layers whose weights are int8."""
    answers: int = 0
    tokens: int = 0
    equal: int = 0
    near_ties: int = 0
    """Answers that differ where two tokens score alike but for rounding."""
    accept_length: float = 0.0
    logprob_gap: float = 0.0
    """The largest difference of an emitted token's log-probability, of equal answers that have them."""
    first: dict[str, Any] | None = None
    """The first difference: all that is needed to see it again."""

    @property
    def promised(self) -> bool:
        """Whether every answer should be equal."""
        return self.native or self.precision == "float32"

    @property
    def broken(self) -> bool:
        """Whether an answer differs that shouldn't."""
        return self.promised and self.equal < self.answers


def groups(rng: Random, requests: Sequence[Request]) -> Iterator[tuple[Setting, Sequence[Request]]]:
    """Cut requests into groups of random settings, each with one to two batches of them."""
    done = 0
    while done < len(requests):
        setting = random_setting(rng)
        size = rng.randint(setting.batch_size, 2 * setting.batch_size)
        yield setting, requests[done : done + size]
        done += size


def run_cell(bench: Bench, family: str, precision: str, limit: int, seed: int, progress: Progress) -> Cell:
    """Compare `limit` answers of one model."""
    rng = Random(f"{seed} {family} {precision}")
    int8 = sum(isinstance(module, Int8Linear) for module in bench.target.model.modules())
    cell = Cell(family, precision, bench.target.native is not None, int8)
    pooled = Stats()
    for setting, batch in groups(rng, random_requests(rng, limit, bench.target.vocab_size)):
        plain = bench.alone(batch)
        for request, one, other in zip(batch, plain, bench.together(batch, setting, plain), strict=True):
            pooled.merge(other.stats)
            compare(cell, bench, setting, request, one, other)
        progress(f"{precision}, {family}", cell.answers, limit)
    cell.tokens, cell.accept_length = pooled.tokens, round(pooled.accept_length, 3)
    return cell


def compare(cell: Cell, bench: Bench, setting: Setting, request: Request, plain: Completion, other: Completion) -> None:
    """Count an answer."""
    cell.answers += 1
    at = first_difference(plain.token_ids, other.token_ids)
    if at is None and plain.finish_reason == other.finish_reason:
        cell.equal += 1
        scores = zip(plain.logprobs or (), other.logprobs or (), strict=True)
        cell.logprob_gap = max([cell.logprob_gap, *(abs(a.logprob - b.logprob) for a, b in scores)])
        return
    where = None if at is None else difference(bench, request, plain, other, at)
    cell.near_ties += where is not None and where["near_tie"]
    if cell.first is None:
        ends = [plain.finish_reason, other.finish_reason]
        cell.first = {"request": asdict(request) | {"params": request.params.model_dump()}}
        cell.first |= {"setting": asdict(setting), "finish_reasons": ends, "at": where}


def difference(bench: Bench, request: Request, plain: Completion, other: Completion, at: int) -> dict[str, Any]:
    """Where two answers differ, and the gap between the two tokens there; a grammar's scores are not recomputed."""
    left, right = (done.token_ids[at] if at < len(done.token_ids) else None for done in (plain, other))
    gap = tolerance = None
    if request.grammar is None:
        stops = () if request.params.ignore_eos else eos_token_ids(bench.target.model)
        scores = scores_after(bench.target, request.params, request.prompt, plain.token_ids[:at], stops)
        gap, tolerance = judge(scores, left, right, bench.target.dtype)
    tie = gap is not None and tolerance is not None and gap <= tolerance
    return {"position": at, "plain": left, "other": right, "gap": gap, "tolerance": tolerance, "near_tie": tie}


def line(cell: Cell) -> dict[str, Any]:
    """A cell as a row of the printed table."""
    return {
        "family": cell.family, "precision": cell.precision, "passes": "native" if cell.native else "modules",
        "promised": "yes" if cell.promised else "no", "answers": cell.answers, "equal": cell.equal,
        "near-ties": cell.near_ties, "accept length": cell.accept_length, "first difference": describe(cell),
    }  # fmt: skip


def describe(cell: Cell) -> str:
    """The first difference in words."""
    if cell.first is None:
        return "-"
    setting, at = cell.first["setting"], cell.first["at"]
    where = "its end" if at is None else f"token {at['position']}, {at['plain']} or {at['other']}"
    gap = "" if at is None or at["gap"] is None else f", gap {at['gap']:.2g} of {at['tolerance']:.2g}"
    how = f"{setting['drafter']}, {setting['tree']}, batch {setting['batch_size']}"
    return f"request {cell.first['request']['id']}, {where}{gap} ({how})"


FAMILIES = (*tiny.ARCHITECTURES, *tiny.NATIVE_ONLY)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them, all of which must be `known`."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return text.split(",")

    return parse


@script
def main(
    *,
    families: Annotated[list[str], "all by default", names(FAMILIES)] = list(FAMILIES),  # noqa: B006
    dtypes: Annotated[list[str], "all that run on this machine", names(list(PRECISIONS))] = list(PRECISIONS),  # noqa: B006
    limit: Annotated[int, "answers for each family and precision"] = 500,
    seed: int = 0,
    output: Annotated[Path | None, "written after each family and precision"] = None,
) -> int:
    logging.disable_progress_bar()
    wanted = [name for name in dtypes if name != "int8" or kernels() is not None]
    cells: list[Cell] = []
    with TemporaryDirectory() as folder, display.counting() as progress:
        saved = {family: save_family(family, Path(folder) / family, seed) for family in families}
        for precision, family in product(wanted, families):
            bench = Bench.load(saved[family], precision, seed)
            cells.append(run_cell(bench, family, precision, limit, seed, progress))
            if output is not None:
                found = [asdict(cell) | {"promised": cell.promised, "broken": cell.broken} for cell in cells]
                write_json(output, described({"seed": seed, "limit": limit, "cells": found}))
    display.output().print(table([line(cell) for cell in cells]))
    return any(cell.broken for cell in cells)


if __name__ == "__main__":
    raise SystemExit(main())
