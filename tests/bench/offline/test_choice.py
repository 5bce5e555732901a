"""The pick and its reason."""

from __future__ import annotations

from eyas.bench.offline.candidates import choose

from .candidates import candidate


def test_the_reason_names_the_margin_and_the_ties() -> None:
    made = [
        candidate("early", 2.0, 2.1, seconds=4.0),
        candidate("late", 3.0, 3.3),
        candidate("last", 3.2, 3.0),
    ]
    choice = choose(made, "accept_length")
    assert choice.best.name == "late"
    assert choice.ties == ("last",)
    assert [each.name for each in choice.ranked] == ["late", "last", "early"]
    assert "late has the best mean accept length on t, 3.150. Next is last, 0.050 lower" in choice.reason
    assert "last is within two standard errors" in choice.reason
    assert "early has the best measured speedup, 2.50x against 2.00x" in choice.reason
    assert choose(made, "speedup").best.name == "early"


def test_a_single_prompt_tells_nothing_of_the_uncertainty() -> None:
    reason = choose([candidate("a", 2.0), candidate("b", 2.5)], "accept_length").reason
    assert "Next is a, 0.500 lower (one prompt a file: no telling how sure that is)." in reason


def test_a_single_candidate_is_the_pick() -> None:
    choice = choose([candidate("only", 2.0)], "speedup")
    assert (choice.best.name, choice.ties) == ("only", ())
    assert "nothing else to choose from" in choice.reason
    assert choice.as_dict()["pick"] == "only"


def test_of_equals_the_first_is_picked() -> None:
    choice = choose([candidate("early", 2.0, 3.0), candidate("late", 3.0, 2.0)], "accept_length")
    assert (choice.best.name, choice.ties) == ("early", ("late",))
    assert "Next is late, no lower, but later in order" in choice.reason
