"""The pick and its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.bench.offline.candidates import Candidate, choose, doubt, joint_margin, with_margin

from .candidates import candidate


def test_the_reason_names_the_margin_and_the_ties() -> None:
    made = [
        candidate("early", 2.0, 2.1, seconds=4.8),
        candidate("late", 3.0, 3.3),
        candidate("last", 3.2, 3.0),
    ]
    choice = choose(made, "accept_length")
    assert choice.best.name == "late"
    assert choice.ties == ("last",)
    assert [each.name for each in choice.ranked] == ["late", "last", "early"]
    assert "late has the best mean accept length on t, 3.150. Next is last, 0.050 lower" in choice.reason
    assert "last is within two standard errors" in choice.reason
    assert "early has the best measured speedup, 2.08x against 2.00x" in choice.reason
    assert choose(made, "speedup").best.name == "early"


def test_a_single_prompt_tells_nothing_of_the_uncertainty() -> None:
    reason = choose([candidate("a", 2.0), candidate("b", 2.5)], "accept_length").reason
    assert "Next is a, 0.500 lower (one prompt per file: the uncertainty is unknown)." in reason


def test_a_reason_says_what_is_impossible() -> None:
    true = candidate("true", 2.0)
    wrong = candidate("wrong", 2.0, seconds=0.1)
    reason = choose([true, wrong], "accept_length").reason
    assert "Impossible: wrong, " in reason
    assert "Impossible: true" not in reason


def test_a_single_candidate_is_the_pick() -> None:
    choice = choose([candidate("only", 2.0)], "speedup")
    assert (choice.best.name, choice.ties) == ("only", ())
    assert "nothing else to choose from" in choice.reason
    assert choice.as_dict()["pick"] == "only"


def test_of_equals_the_first_is_picked() -> None:
    choice = choose([candidate("early", 2.0, 3.0), candidate("late", 3.0, 2.0)], "accept_length")
    assert (choice.best.name, choice.ties) == ("early", ("late",))
    assert "Next is late, no lower, but later in order" in choice.reason


def test_what_is_not_certainly_faster_than_plain_is_doubted() -> None:
    fast = candidate("fast", 2.0, 2.0)
    slow = candidate("slow", 3.0, 3.0, seconds=11.0)
    assert doubt(fast) is None
    assert "slow decodes at 0.91 times the speed of plain decoding (give or take 0.00" in (doubt(slow) or "")
    assert "so serving with it is slower than without a drafter" in (doubt(slow) or "")
    loud = Candidate("loud", {"t": replace(candidate("loud", 2.0, 2.0, seconds=8.0).tasks["t"], noise=0.2)})
    assert "1.25 times the speed of plain decoding (give or take 0.50" in (doubt(loud) or "")
    assert "more prompts or a quieter machine would show it" in (doubt(loud) or "")
    assert doubt(candidate("wrong", 2.0, 2.0, seconds=0.1)) == "the figures measured for wrong can't be true"

    choice = choose([slow, fast], "accept_length")
    assert (choice.best.name, choice.as_dict()["doubt"]) == ("slow", doubt(slow))
    assert f"Beware: {doubt(slow)}." in choice.reason
    assert "Beware" not in choose([fast], "speedup").reason
    assert "Times are uncertain by 20%" in choose([loud], "speedup").reason
    assert Candidate.from_dict(loud.as_dict()) == loud


@pytest.mark.parametrize("seconds", [8.0, 11.0])
def test_no_verdict_that_the_margin_does_not_allow(seconds: float) -> None:
    """Neither faster nor slower is claimed while the margin has room for both."""
    noisy = replace(candidate("noisy", 2.0, 2.0, seconds=seconds).tasks["t"], noise=0.2)
    found = Candidate("noisy", {"t": noisy})
    assert found.faster is None
    assert "which may be slower than without a drafter" in (doubt(found) or "")
    alone = candidate("alone", 2.0, seconds=seconds)
    assert (alone.faster, alone.margin("speedup")) == (None, None), "a single prompt has no error"
    assert "with one prompt per file the uncertainty is unknown" in (doubt(alone) or "")
    sure = candidate("sure", 2.0, 2.0, seconds=seconds)
    assert sure.faster is (seconds < 10.0)


def test_what_cannot_be_true_is_never_the_fastest() -> None:
    true = candidate("true", 2.0, 2.0)
    wrong = candidate("wrong", 2.0, 2.0, seconds=0.1)
    for by in ("speedup", "tokens_per_second"):
        assert choose([wrong, true], by).best.name == "true"
    assert choose([wrong, true], "accept_length").best.name == "wrong", "counts aren't timed"


def test_figures_stand_beside_their_margins() -> None:
    assert with_margin("{:.2f}x", 1.284, 0.307) == "1.28x ±0.31"
    assert with_margin("{:.1f}", 31.2, 2.0) == "31.2 ±2.0"
    assert with_margin("{:.2f}", 2.0, None) == "2.00 ±?"
    assert joint_margin([0.3, 0.4]) == pytest.approx(0.25)
    assert joint_margin([0.3, None]) is joint_margin([]) is None
