"""Answers with and without speculation: equal ones, differing ones and near-ties, of engines and of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch

from eyas.bench.accuracy.compare import (
    AnswerProblems,
    AnswerSheet,
    MethodAccuracy,
    TextDifference,
    accuracy_line,
    accuracy_report,
    accuracy_rows,
    engine_answers,
    measure_accuracy,
    share_of,
    text_difference,
    verdict,
)
from eyas.bench.accuracy.tasks import AccuracyTask, ProblemRow
from eyas.bench.offline.certificate import Divergence
from eyas.bench.offline.runner import PLAIN, Advance
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.text.prompts import PromptRow
from eyas.tree import DraftTree, NodeLogits, parse_tree
from eyas.types import SamplingParams
from eyas.verify import Sampler, SeededWalk, Walk, WalkRule

from ... import tiny
from ...pairs import tokenizer

TEXTS = ("48/2?", "def add(a, b):", "clips in May")


class Even(AccuracyTask):
    """An answer of an even number of characters is right."""

    name: ClassVar[str] = "even"
    metrics = ("even",)

    def prompt(self, row: ProblemRow, *, chat: bool) -> str:  # noqa: ARG002
        return str(row.fields["text"])

    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:  # noqa: ARG002
        return {"even": len(answer) % 2 == 0}


def task(*texts: str) -> Even:
    return Even([ProblemRow(f"p{n}", f"f:{n}", {"text": text}) for n, text in enumerate(texts)])


class OneBeside:
    """A broken rule: every token it emits where something was drafted is another than the target's."""

    lossless = seeded = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        walk = SeededWalk()(logits, tree, sampler, rows)
        beside = torch.where(walk.tokens < 0, walk.tokens, (walk.tokens + 1) % 90)
        return walk.replaced(tokens=beside) if tree.size else walk


@cache
def target() -> Target:
    return Target(tiny.build_model("llama", vocab_size=len(tokenizer())))


def engine(speculates: bool, rule: WalkRule | None = None, batch_size: int = 1) -> Engine:
    drafter = tiny.eagle3_drafter(vocab_size=len(tokenizer()), draft_vocab_size=120)
    speculation = Speculation(drafter, parse_tree("dynamic:3,3,6"), True) if speculates else None
    return Engine(target(), tokenizer(), speculation, batch_size=batch_size, rule=rule)


def written(*texts: str, errors: dict[int, str] | None = None) -> AnswerProblems:
    def answer(prompts: Sequence[PromptRow], advance: Advance) -> AnswerSheet:  # noqa: ARG001
        return AnswerSheet(list(texts), [len(text) for text in texts], None, errors or {})

    return answer


def test_texts_are_compared_where_there_are_no_tokens() -> None:
    params = SamplingParams(max_tokens=4)
    methods = {
        "baseline": written("ab", "abcd", "", "x"),
        "endpoint": written("ab", "abXd", "", "y", errors={3: "503"}),
    }
    base, other = measure_accuracy(task(*"abcd"), methods, "baseline", params, judge=None, chat=False)
    assert (base.compared, base.differences) == (0, [])
    assert (other.compared, other.differences) == (3, [TextDifference("p1", 2, "cd", "Xd")])
    assert (other.near_ties, other.broken) == (0, 1)
    assert verdict([base, other]) == "NOT EQUAL: 1 of 3 answers differ"
    line = accuracy_line(base, ("even",), 4)
    assert line["metrics"] == {"even": {"right": 3, "share": 0.75, "standard_error": 0.25}}
    assert line["cut_off"] == 1
    report = accuracy_report({}, {}, [task(*"abcd")], [base, other], 4, "baseline")
    assert not report["equal"]
    assert report["errors"] == ["even, endpoint: f:3: 503"]
    assert [row["id"] for row in report["answers"]["even"]["baseline"]] == ["p0", "p1", "p2", "p3"]
    assert [row["text"] for row in report["answers"]["even"]["endpoint"]] == ["abXd"]


def test_where_texts_part() -> None:
    assert text_difference("r", "same", "same") is None
    assert text_difference("r", "abc", "ab") == TextDifference("r", 2, "c", "")
    assert text_difference("r", "", "b") == TextDifference("r", 0, "", "b")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_speculation_changes_no_answer(temperature: float, batch_size: int) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    plain = engine(False, batch_size=batch_size)
    methods = {PLAIN: engine_answers(plain, params), "tree": engine_answers(engine(True, None, batch_size), params)}
    done: list[int] = []
    base, other = measure_accuracy(
        task(*TEXTS), methods, PLAIN, params, judge=plain, chat=False, advance=lambda: done.append(1)
    )
    assert (other.compared, other.differences, other.broken) == (3, [], 0)
    assert other.sheet.texts == base.sheet.texts
    assert other.scores == base.scores
    assert len(done) == 6
    assert verdict([base, other]) == "EQUAL: all 3 answers"


def test_a_broken_rule_is_seen() -> None:
    params = SamplingParams(max_tokens=8)
    plain = engine(False)
    methods = {PLAIN: engine_answers(plain, params), "broken": engine_answers(engine(True, OneBeside()), params)}
    base, other = measure_accuracy(task(*TEXTS), methods, PLAIN, params, judge=plain, chat=False)
    assert other.broken == 3
    assert all(isinstance(one, Divergence) and not one.tie for one in other.differences)
    assert verdict([base, other]) == "NOT EQUAL: 3 of 3 answers differ"


def test_near_ties_count_in_float32_alone() -> None:
    tie = Divergence("p0", 0, 3, 5, 6, gap=1e-6, tolerance=1e-4)
    sheet = AnswerSheet(["ab"], [2], 2.0)
    one = MethodAccuracy("even", "tree", [{"even": True}], sheet, torch.float32, 1, [tie])
    assert (one.near_ties, one.broken) == (1, 1)
    half = replace(one, dtype=torch.bfloat16)
    assert (half.near_ties, half.broken) == (1, 0)
    assert verdict([half]) == "EQUAL BUT FOR NEAR-TIES: 1 of 1 answers"
    real = replace(half, differences=[replace(tie, gap=1.0)])
    assert (real.near_ties, real.broken) == (0, 1)
    heads, rows = accuracy_rows([accuracy_line(half, ("even",), 9)])
    found = dict(zip(heads, rows[0], strict=True))
    assert (found["equal answers"], found["different"], found["share"]) == ("0/1, 1 near-ties", "0", "100.0% ± 0.0")


def test_a_prompt_that_cannot_be_run_is_an_error_and_no_difference() -> None:
    params = SamplingParams(max_tokens=4)
    plain = engine(False)
    methods = {PLAIN: engine_answers(plain, params), "again": engine_answers(plain, params)}
    base, other = measure_accuracy(task("fine", "too long " * 200), methods, PLAIN, params, judge=plain, chat=False)
    assert list(base.sheet.errors) == [1]
    assert (other.compared, other.differences, base.scores[1]) == (1, [], {"even": True})


def test_shares() -> None:
    assert share_of([True, False, False, True]) == (0.5, pytest.approx(0.288675, abs=1e-6))
    assert share_of([True]) == (1.0, 0.0)
