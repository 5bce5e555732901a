"""The compatibility table of docs/formats.md, made from results; other consumers are by specification only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from benchmarks.engines.compare import Result
from benchmarks.pages import markdown
from eyas.drafters.kinds import KINDS
from eyas.interop.export.consumers import CONSUMERS

MARKS = "<!-- made by `make engines` -->", "<!-- end of what `make engines` made -->"


def table(results: Sequence[Result]) -> str:
    """Markdown: for each kind of drafter, a row per form, engine and way of running it, then the consumers that take
    the kind and were never run."""
    kinds = sorted({result.kind for result in results} | {_FIRST}, key=lambda kind: (kind != _FIRST, kind))
    return "\n\n".join(_table(kind, [result for result in results if result.kind == kind]) for kind in kinds)


_FIRST = "eagle3"
"""The kind of the embedded drafter."""


def _table(kind: str, results: Sequence[Result]) -> str:
    chains = sorted({result.chain for result in results})
    first = "exported for" if kind == _FIRST else f"{kind} drafter exported for"
    lines = []
    order = {name: number for number, name in enumerate(CONSUMERS)}
    ordered = sorted(results, key=lambda r: (bool(r.misfit), order.get(r.form, len(order)), *_order(r), r.chain))
    for _, runs in groupby(ordered, lambda r: (r.form, *_order(r))):
        lines.append(_row(list(runs), chains))
    run = {result.form for result in results if not result.misfit}
    for name, consumer in CONSUMERS.items():
        if name not in run and KINDS[kind].family in consumer.families:
            by = f"{consumer.title}, {consumer.version}"
            lines.append([f"`{name}`", by, "not run: by specification only", *([""] * len(chains))])
    return markdown([first, "read by", "run", *(f"K = {chain}" for chain in chains)], lines)


def _order(result: Result) -> tuple[str, str, bool, str]:
    return result.engine, result.version, not result.way.startswith("in process"), result.way


def _row(results: Sequence[Result], chains: Sequence[int]) -> list[str]:
    first = results[0]
    dates = " to ".join(sorted({result.date for result in results}))
    note = f". {first.misfit}" if first.misfit else ""
    outcomes = {result.chain: _outcome(result) for result in results}
    return [
        f"`{first.form}`",
        f"{first.engine} {first.version}, {first.way}{note}",
        f"{dates}: {first.prompts} prompts, {first.tokens} tokens",
        *(outcomes.get(chain, "not run") for chain in chains),
    ]


def _outcome(result: Result) -> str:
    answers = f"{result.equal} of {result.prompts} answers equal"
    if result.own is not None:
        answers = f"{result.own} of {result.prompts} answers as it decodes plainly, {answers} to ours"
    if result.equal < result.prompts:
        ties = sum(parting.tie for parting in result.partings)
        near = f" within {max(parting.within for parting in result.partings):g}" if result.own is not None else ""
        answers += f", {ties} parted at a tie{near}, {len(result.partings) - ties} DIFFERENT"
    if result.draft_ties:
        answers += f", {result.draft_ties} of them not counted: two guesses of the drafter tie"
    ours, theirs = (", ".join(map(str, counts.accepted)) for counts in (result.ours, result.theirs))
    if result.ours == result.theirs:
        return f"{answers}; accepted {theirs}, as in eyas"
    apart = result.ours.difference(result.theirs)
    return f"{answers}; accepted {theirs}, in eyas {ours}: up to {100 * apart:.2g} % apart"
