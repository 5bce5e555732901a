"""Answers and counts of an engine against ours, and the table made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.engines.compare import COARSE_TIE, Answer, Result, compare
from benchmarks.engines.counts import Counts, Round, full_chains
from benchmarks.engines.reference import Reference
from benchmarks.engines.table import table
from eyas.interop.export.consumers import CONSUMERS

RUN: dict[str, Any] = {"engine": "vLLM", "version": "0.32.0", "form": "vllm", "way": "over HTTP", "date": "2026-11-21"}
REFERENCE = [
    Reference((1, 2), (3, 4, 5, 6), {3: (Round(2, 3),)}, {3: 0.5}, ended=False),
    Reference((7,), (8, 9, 1), {3: (Round(0, 3), Round(3, 2, 0))}, {3: 0.5}, ended=True),
]
SAME = [
    Answer((3, 4, 5, 6), full_chains(REFERENCE[0].rounds[3], 3)),
    Answer((8, 9, 1), full_chains(REFERENCE[1].rounds[3], 3)),
]


def run(answers: list[Answer], gap: float = 2.0, reference: list[Reference] = REFERENCE, **more: Any) -> Result:
    return compare(
        RUN | more, answers, reference, 3, lambda reference: full_chains(reference.rounds[3], 3), lambda *_: gap
    )


def test_the_same_answers_and_counts_pass() -> None:
    result = run(SAME)
    assert result.passed
    assert (result.equal, result.same_counts, result.tokens) == (2, 2, 7)
    assert result.ours == result.theirs == Counts(3, 9, (2, 2, 1))


def test_an_answer_that_parts_is_a_tie_or_a_failure_and_not_counted() -> None:
    answers = [SAME[0], Answer((8, 2, 1), Counts(9, 27, (9, 9, 9)))]
    parted = run(answers)
    tied = run(answers, gap=5e-4)
    assert not parted.passed
    assert tied.passed
    assert (tied.partings[0].prompt, tied.partings[0].position, tied.equal) == (1, 1, 1)
    assert tied.theirs == SAME[0].counts


@pytest.mark.parametrize("tokens", [(8, 9), (8, 9, 1, 4), ()])
def test_an_answer_that_ends_elsewhere_is_no_tie(tokens: tuple[int, ...]) -> None:
    result = run([SAME[0], Answer(tokens, SAME[1].counts)], gap=0.0)
    assert result.partings[0].gap is None
    assert not result.passed


def test_counts_that_are_off_fail_unless_the_form_is_for_another_engine() -> None:
    off = [SAME[0], Answer((8, 9, 1), Counts(2, 6, (0, 0, 0)))]
    assert not run(off).passed
    assert run(off).same_counts == 1
    assert run(off, misfit="it reads it wrong").passed
    assert not run(SAME, misfit="it reads it wrong").passed


def test_other_counts_where_two_guesses_were_equally_good_are_a_tie_of_the_drafter() -> None:
    off = [SAME[0], Answer((8, 9, 1), Counts(2, 6, (0, 0, 0)))]
    tied = [REFERENCE[0], replace(REFERENCE[1], leads={3: 5e-5, 5: 0.5})]
    result = run(off, reference=tied)
    assert result.passed
    assert (result.equal, result.same_counts, result.draft_ties) == (2, 1, 1)
    assert result.ours == result.theirs == SAME[0].counts
    assert not run(off, reference=[tied[0], replace(tied[1], leads={3: 5e-4})]).passed
    assert run(SAME, reference=tied).draft_ties == 0
    assert "1 of them not counted: two guesses of the drafter tie" in table([result])


def test_an_engine_that_rounds_otherwise_may_part_where_its_rounding_decides() -> None:
    answers = [SAME[0], Answer((8, 2, 1), Counts(2, 6, (0, 0, 0)))]

    def coarse(gap: float) -> Result:
        found = run(answers, gap=gap)
        return replace(found, own=1, partings=tuple(replace(each, within=COARSE_TIE) for each in found.partings))

    near = coarse(COARSE_TIE / 2)
    assert near.passed
    assert not coarse(COARSE_TIE * 2).passed
    told = (
        "1 of 2 answers as it decodes plainly, 1 of 2 answers equal to ours, 1 parted at a tie within 0.5, 0 DIFFERENT"
    )
    assert told in table([near])
    assert Result.from_dict(json.loads(json.dumps(near.as_dict()))) == near


def test_results_survive_json() -> None:
    result = run([SAME[0], Answer((8, 2, 1), SAME[1].counts)], gap=0.25)
    assert Result.from_dict(json.loads(json.dumps(result.as_dict()))) == result


def test_the_table_says_what_was_run_and_what_was_not() -> None:
    result = run(SAME)
    longer = replace(result, chain=5, way="in process", theirs=Counts(3, 9, (2, 2, 2)))
    misread = replace(result, form="sglang", misfit="it reads it wrong", theirs=Counts(3, 9, (1, 0, 0)))
    lines = table([misread, result, replace(result, way="in process"), longer]).splitlines()
    same = "2 of 2 answers equal; accepted 2, 2, 1, as in eyas"
    assert lines[0] == "| exported for | read by | run | K = 3 | K = 5 |"
    assert lines[2:4] == [
        f"| `vllm` | vLLM 0.32.0, in process | 2026-11-21: 2 prompts, 7 tokens | {same} | "
        "2 of 2 answers equal; accepted 2, 2, 2, in eyas 2, 2, 1: up to 1e+02 % apart |",
        f"| `vllm` | vLLM 0.32.0, over HTTP | 2026-11-21: 2 prompts, 7 tokens | {same} | not run |",
    ]
    assert "over HTTP. it reads it wrong |" in lines[4]
    unrun = [line.split("`")[1] for line in lines if "by specification only" in line]
    assert unrun == [name for name in CONSUMERS if name != "vllm"]


def test_the_table_counts_ties_and_differences_apart() -> None:
    answers = [Answer((3, 9), SAME[0].counts), Answer((8, 2, 1), SAME[1].counts)]
    assert "0 of 2 answers equal, 0 parted at a tie, 2 DIFFERENT" in table([run(answers)])
    assert "0 of 2 answers equal, 2 parted at a tie, 0 DIFFERENT" in table([run(answers, gap=1e-5)])
