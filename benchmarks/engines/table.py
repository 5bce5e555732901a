"""The compatibility table of docs/formats.md, made of what was run; whom nobody ran is by specification only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from engines.compare import Result
from eyas.errors import DataError
from eyas.interop.consumers import CONSUMERS, Consumer

BEGIN, END = "<!-- made by `make engines` -->", "<!-- end of what `make engines` made -->"
_HEAD = ("| exported for | read by | run | outcome |", "|---|---|---|---|")


def table(results: Sequence[Result]) -> str:
    """Markdown: a row for each form in each engine, then the consumers that were never run."""
    key = lambda result: (result.form, result.engine, result.version)  # noqa: E731
    ordered = sorted((r for r in results if not r.misfit), key=lambda r: (*key(r), r.way, r.chain))
    misfits = sorted((r for r in results if r.misfit), key=lambda r: (*key(r), r.way, r.chain))
    lines = [*_HEAD]
    for runs in (ordered, misfits):
        lines += [_row(*group, list(rows)) for group, rows in groupby(runs, key)]
    run = {result.form for result in ordered}
    lines += [_unrun(consumer) for name, consumer in CONSUMERS.items() if name not in run]
    return "\n".join(lines)


def _row(form: str, engine: str, version: str, results: Sequence[Result]) -> str:
    ways = dict.fromkeys(f"{result.way}, K = {result.chain}" for result in results)
    dates = " to ".join(sorted({result.date for result in results}))
    first = results[0]
    what = f"{dates}, CPU, float32, {first.prompts} prompts, {first.tokens} tokens: {'; '.join(ways)}"
    said = "; ".join(dict.fromkeys(_outcome(result) for result in results))
    note = f" {first.misfit}." if first.misfit else ""
    return f"| `{form}` | {engine} {version} | {what} | {said}.{note} |"


def _outcome(result: Result) -> str:
    if result.equal == result.prompts:
        answers = "all answers equal"
    else:
        ties = sum(parting.tie for parting in result.partings)
        others = len(result.partings) - ties
        answers = f"{result.equal} of {result.prompts} answers equal, {ties} parted at a tie, {others} DIFFERENT"
    ours, theirs = (", ".join(map(str, counts.accepted)) for counts in (result.ours, result.theirs))
    difference = result.ours.difference(result.theirs)
    if result.ours == result.theirs:
        counts = f"accepted by position {theirs}, as in eyas"
    else:
        counts = f"accepted by position {theirs}, in eyas {ours} (at most {100 * difference:.2g} % apart)"
    return f"K = {result.chain}: {answers}, {counts}"


def _unrun(consumer: Consumer) -> str:
    return f"| `{consumer.name}` | {consumer.title} | not run | by specification only: {consumer.version} |"


def insert(page: str, made: str) -> str:
    """The page with its generated part replaced. DataError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"the page has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"
