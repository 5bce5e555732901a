"""What `eyas bench accuracy` found: scores with standard errors, equal answers, differences; as table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from rich.table import Table

from eyas.bench.accuracy.compare import MethodAccuracy, TextDifference, difference_dict
from eyas.bench.accuracy.tasks import AccuracyTask
from eyas.bench.offline.certificate import Divergence
from eyas.bench.report.page import DataTable, Section, Text

DEFINITIONS = (
    "strict-match, flexible-extract: the answer's number is the reference's, as lm-evaluation-harness finds it: after "
    "`####`, or the last one.",
    "pass@1: the program made of the answer passes the problem's unit tests.",
    "±: standard error of the share, sqrt(p (1 - p) / (n - 1)). It is about other problems of the same sort, not about "
    "the methods: equal answers have equal scores.",
    "equal: answers that are the baseline's, token for token; of a server, character for character.",
    "near-tie: two answers part where the target scores both tokens almost alike, so that rounding decides.",
    "cut off: answers as long as --max-new-tokens allows, which may have been right later.",
)


def share_of(right: Sequence[bool]) -> tuple[float, float]:
    """The share of right answers and its standard error; that of a single answer is 0."""
    count = len(right)
    share = sum(right) / count
    return share, sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0


def accuracy_line(one: MethodAccuracy, metrics: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """The figures of one method on one task."""
    found = {}
    for metric in metrics:
        right = [score[metric] for score in one.scores]
        share, error = share_of(right)
        found[metric] = {"right": sum(right), "share": round(share, 6), "standard_error": round(error, 6)}
    length = one.sheet.accept_length
    return {
        "task": one.task,
        "method": one.method,
        "problems": len(one.scores),
        "metrics": found,
        "compared": one.compared,
        "equal": one.compared - len(one.differences),
        "near_ties": one.near_ties,
        "broken": one.broken,
        "accept_length": None if length is None else round(length, 4),
        "cut_off": sum(tokens >= max_tokens for tokens in one.sheet.tokens),
        "differences": [difference_dict(difference) for difference in one.differences],
    }


def accuracy_report(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    tasks: Sequence[AccuracyTask],
    results: Sequence[MethodAccuracy],
    max_tokens: int,
    baseline: str | None,
) -> dict[str, Any]:
    """The JSON form: figures, and of every problem what the baseline answered and what other methods said instead."""
    by_name = {task.name: task for task in tasks}
    return {
        "machine": dict(machine),
        "settings": dict(settings) | {"tasks": {task.name: task.settings() for task in tasks}},
        "definitions": list(DEFINITIONS),
        "lines": [accuracy_line(one, by_name[one.task].metrics, max_tokens) for one in results],
        "answers": {
            task.name: {
                one.method: _answers(task, one, everything=baseline in (None, one.method))
                for one in results
                if one.task == task.name
            }
            for task in tasks
        },
        "equal": not any(one.broken for one in results),
        "errors": [
            f"{one.task}, {one.method}: {by_name[one.task].rows[number].where}: {error}"
            for one in results
            for number, error in one.sheet.errors.items()
        ],
    }


def _answers(task: AccuracyTask, one: MethodAccuracy, *, everything: bool) -> list[dict[str, Any]]:
    differing = {difference.row for difference in one.differences}
    return [
        {"id": row.id, "text": text, "tokens": tokens, "right": score}
        for row, text, tokens, score in zip(task.rows, one.sheet.texts, one.sheet.tokens, one.scores, strict=True)
        if everything or row.id in differing
    ]


def accuracy_rows(lines: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of the table: a row for every metric of every method on every task."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        compared, other = line["compared"], line["differences"]
        equal = f"{line['equal']}/{compared}" + (f", {line['near_ties']} near-ties" if line["near_ties"] else "")
        length = "" if line["accept_length"] is None else f"{line['accept_length']:.2f}"
        common = (equal if compared else "", str(len(other) - line["near_ties"]) if compared else "")
        for metric, found in line["metrics"].items() or (("", None),):
            right = ("", "") if found is None else _right(found, line["problems"])
            rows.append((line["task"], line["method"], metric, *right, *common, length, str(line["cut_off"])))
    heads = ("task", "method", "metric", "right", "share", "equal answers", "different", "accept length", "cut off")
    return heads, rows


def _right(found: Mapping[str, Any], problems: int) -> tuple[str, str]:
    share = f"{100 * found['share']:.1f}% ± {100 * found['standard_error']:.1f}"
    return f"{found['right']}/{problems}", share


def accuracy_section(content: Mapping[str, Any]) -> Section:
    """The section of a report page, from the JSON form."""
    settings, heads_and_rows = content["settings"], accuracy_rows(content["lines"])
    what = f"{settings['model'] or 'servers'}, temperature {settings['sampling']['temperature']:g}"
    found = "no answer differs" if content["equal"] else "ANSWERS DIFFER"
    return Section(
        "Answers with and without speculation",
        [Text(f"{what}: {found}."), DataTable(*heads_and_rows), Text(" ".join(content["definitions"]), faint=True)],
    )


def accuracy_table(lines: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The table for a terminal."""
    heads, rows = accuracy_rows(lines)
    table = Table(*heads[:3], title=title)
    for head in heads[3:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def describe_difference(one: MethodAccuracy, difference: Divergence | TextDifference) -> str:
    """One line about a differing answer: where it parts from the baseline's, and what that means."""
    where = f"{one.task}, {one.method}, problem {difference.row}"
    if isinstance(difference, TextDifference):
        return f"{where}: from character {difference.position} on {difference.other!r}, baseline {difference.plain!r}"
    return f"{where}, position {difference.position}: {difference.describe()}"


def verdict(results: Sequence[MethodAccuracy]) -> str:
    """The last line: what the comparison came to."""
    compared = sum(one.compared for one in results)
    if not compared:
        return "NOTHING COMPARED"
    broken, ties = sum(one.broken for one in results), sum(one.near_ties for one in results)
    if broken:
        return f"NOT EQUAL: {broken} of {compared} answers differ"
    return f"EQUAL BUT FOR {ties} NEAR-TIES of {compared} answers" if ties else f"EQUAL: all {compared} answers"
