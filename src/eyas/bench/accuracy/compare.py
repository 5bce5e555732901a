"""Every method's answers to the same problems: scored, compared with the baseline's, and reported.

Answers of engines in this process are compared token by token; where two diverge, the target says whether rounding
explains it (`bench/offline/certificate.py`). Servers return only text, which is compared character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import Any

import torch
from rich.table import Table

from eyas.bench.accuracy.tasks import AccuracyTask
from eyas.bench.offline.certificate import Divergence, first_divergence
from eyas.bench.offline.external import Endpoint
from eyas.bench.offline.runner import Advance
from eyas.bench.report.page import DataTable, Section, Text
from eyas.bench.serving.report import accept_length
from eyas.engine import Engine
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import PromptRow
from eyas.types import SamplingParams, Stats

_SHOWN_CHARACTERS = 40
"""Characters shown of each text, from the first difference on."""


@dataclass
class AnswerSheet:
    """A method's answers, in the order of the problems."""

    texts: list[str]
    tokens: list[int]
    """Output tokens of each answer."""
    accept_length: float | None
    errors: dict[int, str] = field(default_factory=dict)
    """Number of a problem without an answer -> the reason."""
    dialogues: list[Dialogue] | None = None
    """The answers as token ids; None for a server."""


AnswerProblems = Callable[[Sequence[PromptRow], Advance], AnswerSheet]
"""Answers problems with one method: an engine in this process or a server."""


def engine_answers(engine: Engine, params: SamplingParams) -> AnswerProblems:
    """A method that decodes in this process."""

    def answer(prompts: Sequence[PromptRow], advance: Advance) -> AnswerSheet:
        dialogues = [Dialogue(prompt) for prompt in prompts]
        for _, chunk in converse(engine, dialogues, params):
            if chunk.completion is not None:
                advance()
        done = [dialogue.completions[0] if dialogue.completions else None for dialogue in dialogues]
        stats = Stats()
        for dialogue in dialogues:
            stats.merge(dialogue.stats())
        pairs = zip(dialogues, done, strict=True)
        found = [dialogue.error or (None if one is None else one.error) for dialogue, one in pairs]
        return AnswerSheet(
            ["" if one is None else one.text for one in done],
            [0 if one is None else len(one.token_ids) for one in done],
            stats.accept_length,
            {number: error for number, error in enumerate(found) if error is not None},
            dialogues,
        )

    return answer


def server_answers(server: Endpoint, batch_size: int) -> AnswerProblems:
    """A method that asks a server, `batch_size` problems at a time."""

    def answer(prompts: Sequence[PromptRow], advance: Advance) -> AnswerSheet:
        runs = []
        for start in range(0, len(prompts), batch_size):
            group = prompts[start : start + batch_size]
            runs.append(server.run(group))
            for _ in group:
                advance()
        answers = [answer for run in runs for answer in run.answers]
        return AnswerSheet(
            [answer.text for answer in answers],
            [answer.tokens for answer in answers],
            accept_length(runs),
            {number: answer.error for number, answer in enumerate(answers) if answer.error is not None},
        )

    return answer


@dataclass(frozen=True)
class TextDifference:
    """Where an answer's text diverges from the baseline's. Without token ids, near-ties can't be recognized."""

    row: str
    position: int
    """Index of the character in the answer."""
    plain: str
    """The first characters of the baseline's text from there on."""
    other: str
    tie: bool = False


@dataclass
class MethodAccuracy:
    """One method on one task: its scores, and how its answers compare with the baseline's."""

    task: str
    method: str
    scores: list[dict[str, bool]]
    """For each problem, metric -> whether the answer is right."""
    sheet: AnswerSheet
    dtype: torch.dtype | None
    """Dtype of the target in this process; None for a server."""
    compared: int = 0
    """Problems that this method and the baseline both answered; 0 for the baseline itself."""
    differences: list[Divergence | TextDifference] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        """The number of differences that rounding explains."""
        return sum(difference.tie for difference in self.differences)

    @property
    def broken(self) -> int:
        """The number of differences that count: all in float32 and from servers, else those that aren't near-ties."""
        excused = 0 if self.dtype in (None, torch.float32) else self.near_ties
        return len(self.differences) - excused


def measure_accuracy(
    task: AccuracyTask,
    methods: Mapping[str, AnswerProblems],
    baseline: str | None,
    params: SamplingParams,
    *,
    judge: Engine | None,
    chat: bool,
    advance: Advance = lambda: None,
) -> list[MethodAccuracy]:
    """Have every method answer all problems. `judge`: the plain engine in this process, which finds near-ties."""
    prompts = task.prompts(chat=chat)
    sheets = {name: method(prompts, advance) for name, method in methods.items()}
    results = []
    for name, sheet in sheets.items():
        scores = [task.score(row, text) for row, text in zip(task.rows, sheet.texts, strict=True)]
        dtype = judge.target.dtype if judge is not None and sheet.dialogues is not None else None
        one = MethodAccuracy(task.name, name, scores, sheet, dtype)
        if baseline is not None and name != baseline:
            _compare(one, sheets[baseline], prompts, judge, params)
        results.append(one)
    return results


def _compare(
    one: MethodAccuracy, base: AnswerSheet, prompts: Sequence[PromptRow], judge: Engine | None, params: SamplingParams
) -> None:
    for number, prompt in enumerate(prompts):
        if number in base.errors or number in one.sheet.errors:
            continue
        one.compared += 1
        difference: Divergence | TextDifference | None
        if judge is not None and base.dialogues is not None and one.sheet.dialogues is not None:
            difference = first_divergence(judge, params, base.dialogues[number], one.sheet.dialogues[number])
        else:
            difference = text_difference(prompt.id, base.texts[number], one.sheet.texts[number])
        if difference is not None:
            one.differences.append(difference)


def text_difference(row: str, plain: str, other: str) -> TextDifference | None:
    """Find where two texts diverge; None if they are equal."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    return TextDifference(row, at, plain[at : at + _SHOWN_CHARACTERS], other[at : at + _SHOWN_CHARACTERS])


DEFINITIONS = (
    "strict-match, flexible-extract: the answer's number equals the reference's. It is found as lm-evaluation-harness "
    "does: the number after `####`, or the last one.",
    "pass@1: the program made from the answer passes the problem's unit tests.",
    "±: standard error of the share, sqrt(p (1 - p) / (n - 1)). It tells how the share varies with the choice of "
    "problems, not how methods differ: equal answers have equal scores.",
    "equal: answers identical to the baseline's, token for token; for a server, character for character.",
    "near-tie: two answers diverge where the target scores both tokens almost equally, so that rounding decides.",
    "cut off: answers that reached the limit of new tokens; with more tokens they might have been right.",
)


def share_of(right: Sequence[bool]) -> tuple[float, float]:
    """The share of right answers and its standard error, 0 for a single answer."""
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
        "differences": [asdict(difference) | {"tie": difference.tie} for difference in one.differences],
    }


def accuracy_report(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    tasks: Sequence[AccuracyTask],
    results: Sequence[MethodAccuracy],
    max_tokens: int,
    baseline: str | None,
) -> dict[str, Any]:
    """The JSON form: figures, all answers of the baseline, and other methods' answers where they differ."""
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
    """Headers and rows of the table: a row for every metric of every method on every task."""
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
    settings = content["settings"]
    heads_and_rows = accuracy_rows(content["lines"])
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
    """One line about a differing answer: where it diverges from the baseline's, and what that means."""
    where = f"{one.task}, {one.method}, problem {difference.row}"
    if isinstance(difference, TextDifference):
        return f"{where}: from character {difference.position} on {difference.other!r}, baseline {difference.plain!r}"
    return f"{where}, position {difference.position}: {difference.describe()}"


def verdict(results: Sequence[MethodAccuracy]) -> str:
    """The last line: the result of the comparison."""
    compared = sum(one.compared for one in results)
    if not compared:
        return "NOTHING COMPARED"
    broken = sum(one.broken for one in results)
    ties = sum(one.near_ties for one in results)
    if broken:
        return f"NOT EQUAL: {broken} of {compared} answers differ"
    return f"EQUAL BUT FOR NEAR-TIES: {ties} of {compared} answers" if ties else f"EQUAL: all {compared} answers"
