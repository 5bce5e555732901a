"""How hard texts are to guess: what their own steps and the latest answers say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from eyas.engine.controller.difficulty import Difficulty
from eyas.tree.acceptance import GROUPS, GradedStep
from eyas.tree.draft_tree import Source
from eyas.tree.values import BIN_CENTERS, BINS, ValueTable

VALUES = ValueTable(np.broadcast_to(np.exp(BIN_CENTERS), (GROUPS * len(Source), 2, BINS)))
GROUP = np.zeros(1, dtype=np.int64)


def told(difficulty: Difficulty, text: int, p: float, outcomes: Sequence[bool]) -> float:
    """The exponent of a text after rounds of one step of probability `p` each."""
    for accepted in outcomes:
        difficulty.learn([text], [[GradedStep(False, math.log(p), accepted)]], VALUES, GROUP)
    return difficulty.exponents([text])[0]


def test_a_text_like_all_others_keeps_its_values() -> None:
    draw = np.random.default_rng(0)
    found = [told(Difficulty(), 0, 0.8, (draw.random(60) < 0.8).tolist()) for _ in range(20)]
    assert 0.7 < np.exp(np.mean(np.log(found))) < 1.4


def test_three_wrong_steps_that_were_sure_are_believed() -> None:
    assert told(Difficulty(), 0, 0.9, [False] * 3) > 1.9
    assert told(Difficulty(), 0, 0.2, [False] * 3) < 1.2  # nothing new


@pytest.mark.parametrize("right", [10, 200])
def test_a_text_that_turns_is_noticed_however_long_it_went_well(right: int) -> None:
    difficulty = Difficulty()
    assert told(difficulty, 0, 0.9, [True] * right) < 1.0
    assert told(difficulty, 0, 0.9, [False] * 5) > 1.3


def test_a_new_answer_begins_as_the_latest_ones_were() -> None:
    difficulty = Difficulty()
    for text in range(5):
        told(difficulty, text, 0.9, [False] * 20)
        difficulty.follow([text + 1])
    assert difficulty.exponents([5])[0] > 3.0
    for text in range(5, 10):
        told(difficulty, text, 0.9, [True] * 20)
        difficulty.follow([text + 1])
    assert difficulty.exponents([10])[0] < 1.2
