"""The answers of every method to the same problems with the same seed: scored, and compared with the baseline's.

Engines in this process are compared token by token, and where two answers part, the target says whether rounding
excuses it (`bench/offline/certificate.py`). Of servers only the text is known: it is compared character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eyas.bench.accuracy.tasks import AccuracyTask
from eyas.bench.offline.certificate import Divergence, first_divergence
from eyas.bench.offline.external import Endpoint
from eyas.bench.offline.runner import Advance
from eyas.bench.serving.report import accept_length
from eyas.engine import Engine
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import PromptRow
from eyas.types import SamplingParams, Stats

_SHOWN = 40
"""Characters that are shown of each of two texts from where they part."""


@dataclass
class AnswerSheet:
    """What a method answered, problem by problem."""

    texts: list[str]
    tokens: list[int]
    """Output tokens of each answer."""
    accept_length: float | None
    errors: dict[int, str] = field(default_factory=dict)
    """Number of a problem that has no answer -> why."""
    dialogues: list[Dialogue] | None = None
    """The answers as token ids; None if a server gave them."""


AnswerProblems = Callable[[Sequence[PromptRow], Advance], AnswerSheet]
"""A method: an engine here, or a server."""


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
    """A method that asks a server, `batch_size` problems at once."""

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
    """Where the text of an answer leaves the baseline's; whether the two tokens nearly tied can't be known."""

    row: str
    position: int
    """Index of the character in the answer."""
    plain: str
    """The baseline's text from there on, the first characters of it."""
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
    """Of the target here; None for a server."""
    compared: int = 0
    """Problems that this method and the baseline both answered; 0 for the baseline itself."""
    differences: list[Divergence | TextDifference] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        """Differences that rounding excuses."""
        return sum(difference.tie for difference in self.differences)

    @property
    def broken(self) -> int:
        """Differences that count: all of them in float32 and of servers, else those that are no near-ties."""
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
    """Have every method answer all problems. `judge` is the plain engine here, which says what is a near-tie."""
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
    one: MethodAccuracy,
    base: AnswerSheet,
    prompts: Sequence[PromptRow],
    judge: Engine | None,
    params: SamplingParams,
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
    """Where two texts part; None if they are equal."""
    if plain == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    return TextDifference(row, at, plain[at : at + _SHOWN], other[at : at + _SHOWN])


def difference_dict(difference: Divergence | TextDifference) -> dict[str, Any]:
    """The JSON form of a difference, with whether it is a near-tie."""
    return asdict(difference) | {"tie": difference.tie}
