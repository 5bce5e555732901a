"""Figures and their uncertainty, against hand-made counts and a jackknife by definition."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.offline.candidates import Candidate, TaskScore, pooled, rank, task_score, tied, uncertainty
from eyas.bench.offline.runner import MethodResult
from eyas.types import Stats

from .candidates import candidate, task


def test_figures_are_pooled_over_groups() -> None:
    score = task((30, 10, 20, 2.0), (10, 10, 0, 2.0), plain_seconds=4.0)
    assert score.figure("accept_length") == 2.0
    assert score.figure("tokens_per_second") == 10.0
    assert score.figure("speedup") == 10.0 / (40 / 8.0)
    assert score.figure("accept_length", without=1) == 3.0
    assert score.figure("speedup", without=0) == (10 / 2) / (10 / 4)
    assert TaskScore((), (), 0, 0).figure("speedup") == 0.0


def test_a_score_survives_json_and_comes_from_the_runner() -> None:
    score = task((30, 10, 20, 2.0), (10, 10, 0, 2.0))
    assert TaskScore.from_dict(score.as_dict()) == score
    runs = [Stats(tokens=30, target_passes=10, walked=20, decode_seconds=2.0)]
    plain = [Stats(tokens=30, target_passes=30, decode_seconds=10.0)]
    made = task_score(MethodResult(groups=runs, same=1, answers=1), MethodResult(groups=plain))
    assert made == task((30, 10, 20, 2.0))


def test_the_mean_is_over_tasks_not_over_tokens() -> None:
    long = task((1000, 100, 200, 1.0))
    short = task((2, 1, 4, 1.0))
    assert Candidate("c", {"a": long, "b": short}).mean("accept_length") == (3.0 + 5.0) / 2


lengths = st.lists(st.floats(1, 6), min_size=1, max_size=5)


@given(st.lists(lengths, min_size=1, max_size=6), st.sampled_from(["accept_length", "speedup"]))
def test_the_first_of_a_ranking_has_the_greatest_mean(groups: list[list[float]], by: str) -> None:
    made = [candidate(str(i), *values, seconds=1.0 + i) for i, values in enumerate(groups)]
    ranked = rank(made, by)  # type: ignore[arg-type]
    means = [each.mean(by) for each in ranked]  # type: ignore[arg-type]
    possible = [each.possible or by == "accept_length" for each in ranked]
    assert sorted(zip(possible, means, strict=True), reverse=True) == list(zip(possible, means, strict=True))
    assert {each.name for each in ranked} == {each.name for each in made}


def test_equals_keep_their_order() -> None:
    made = [candidate("later", 2.0), candidate("first", 3.0), candidate("again", 3.0)]
    assert [each.name for each in rank(made, "accept_length")] == ["first", "again", "later"]


def test_uncertainty_is_the_jackknife_of_the_difference() -> None:
    one = candidate("a", 3.0, 2.0, 4.0)
    other = candidate("b", 2.5, 2.0, 3.0)
    left_out = []
    for group in range(3):
        kept = [i for i in range(3) if i != group]
        left_out.append(fmean([3.0, 2.0, 4.0][i] for i in kept) - fmean([2.5, 2.0, 3.0][i] for i in kept))
    expected = sqrt(2 / 3 * sum((value - fmean(left_out)) ** 2 for value in left_out))
    assert uncertainty(one, other, "accept_length") == pytest.approx(expected)
    assert uncertainty(candidate("a", 3.0), candidate("b", 2.0), "accept_length") is None


def test_noise_widens_the_error_of_times_alone() -> None:
    quiet = candidate("a", 3.0, 2.0, 4.0)
    other = candidate("b", 2.5, 2.0, 3.0)
    loud = Candidate("a", {"t": replace(quiet.tasks["t"], noise=0.2)})
    assert uncertainty(quiet, None, "speedup") == pytest.approx(0.0, abs=1e-12)  # every group took the same time
    assert uncertainty(loud, None, "speedup") == pytest.approx(0.2 * 2.0)
    assert uncertainty(loud, other, "speedup") == pytest.approx(0.2 * 2.0)
    assert uncertainty(loud, other, "accept_length") == uncertainty(quiet, other, "accept_length")
    assert not tied(candidate("fast", 2.0, 2.0, seconds=4.0), candidate("slow", 2.0, 2.0), "speedup")
    fast = candidate("fast", 2.0, 2.0, seconds=4.0)
    assert tied(Candidate("fast", {"t": replace(fast.tasks["t"], noise=0.2)}), candidate("slow", 2.0, 2.0), "speedup")


def test_noise_is_the_spread_of_repeats_or_the_share_that_others_took() -> None:
    run = Stats(tokens=30, target_passes=10, walked=20, decode_seconds=2.0)
    method = MethodResult(groups=[run])
    plain = MethodResult(groups=[run] * 4, spreads=[0.1, 0.2, 0.3, 0.2])
    assert task_score(method, plain).noise == pytest.approx(0.2 / 2)
    assert task_score(method, replace(plain, others=0.4)).noise == 0.4
    assert task_score(method, MethodResult(groups=[run])).noise == 0.0
    kept = task_score(method, plain)
    assert TaskScore.from_dict(kept.as_dict()) == kept
    assert TaskScore.from_dict({k: v for k, v in kept.as_dict().items() if k != "noise"}).noise == 0.0  # older files


def test_a_constant_lead_is_no_tie_however_the_prompts_vary() -> None:
    hard = [1.2, 3.5, 5.0, 2.0]
    ahead = candidate("ahead", *(x + 0.1 for x in hard))
    behind = candidate("behind", *hard)
    assert not tied(ahead, behind, "accept_length")
    assert tied(candidate("a", 2.0, 4.0), candidate("b", 4.0, 1.9), "accept_length")
    assert not tied(candidate("a", 2.0), candidate("b", 1.0), "accept_length")  # one group: no excuse is made up
    assert tied(candidate("a", 2.0), candidate("b", 2.0), "accept_length")


def test_pooling_nothing_is_zero() -> None:
    assert pooled(()) == (0, 0, 0, 0.0)


def test_a_disturbed_run_hardly_moves_the_pace() -> None:
    calm = Candidate("calm", {"t": task(*[(100, 50, 50, 1.0)] * 5)})
    disturbed = Candidate("disturbed", {"t": task(*[(100, 50, 50, 1.0)] * 4, (100, 50, 50, 60.0))})
    assert calm.pace == disturbed.pace == 2.0 / (1.0 / 50)
    assert disturbed.mean("tokens_per_second") < calm.mean("tokens_per_second") / 5
    assert Candidate("nothing", {"t": task()}).pace == 0.0
