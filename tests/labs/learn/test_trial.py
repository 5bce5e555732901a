"""Trials: who gets which generation, and when one is taken back."""

from __future__ import annotations

import random

import pytest

from eyas.labs.learn.trial import ROWS, Arm, Canary


def run(trial: Canary, lengths: dict[int, float], requests: int, seed: int = 0) -> int:
    """Requests whose rounds accept geometrically, with these mean accept lengths; returns after how many it ended."""
    rng = random.Random(seed)
    for count in range(1, requests + 1):
        generation = trial.choose()
        more = 1.0 - 1.0 / lengths[generation]
        rounds = rng.randint(5, 40)
        tokens = sum(1 + _accepted(rng, more) for _ in range(rounds))
        trial.finished(generation, tokens, rounds)
        if trial.report is not None:
            return count
    return requests


def _accepted(rng: random.Random, more: float) -> int:
    count = 0
    while rng.random() < more:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_one_is_taken_back_within_200_requests(seed: int) -> None:
    trial = Canary(0, 1, seed=seed)
    assert run(trial, {0: 2.5, 1: 1.02}, 200, seed) <= 200
    assert trial.report is not None
    assert trial.report.verdict == "revert"
    assert trial.choose() == 0


def ended(lengths: dict[int, float]) -> list[str]:
    """The verdicts of 100 trials, each of which ended when it had to."""
    verdicts: list[str] = []
    for seed in range(100):
        trial = Canary(0, 1, seed=seed)
        run(trial, lengths, 3000, seed)
        assert trial.report is not None
        assert trial.arms[1].requests <= ROWS, "the next cycle of learning waits for a trial"
        verdicts.append(trial.report.verdict)
    return verdicts


def test_what_is_not_behind_stays_even_where_no_win_shows() -> None:
    assert ended({0: 2.5, 1: 2.5}).count("settle") >= 95
    assert ended({0: 2.5, 1: 2.55}).count("settle") >= 97


def test_a_loss_that_only_the_last_look_shows_is_taken_back() -> None:
    verdicts = ended({0: 2.5, 1: 2.25})
    assert verdicts.count("revert") >= 85, "looked at before the end alone it would be three quarters"


def test_a_better_one_stays_and_gets_all_rows() -> None:
    trial = Canary(3, 4)
    assert run(trial, {3: 2.0, 4: 2.6}, 3000) < 10 * ROWS, "what is clear ends early"
    assert trial.report is not None
    assert trial.report.verdict == "settle"
    assert {trial.choose() for _ in range(50)} == {4}


def test_share() -> None:
    trial = Canary(0, 1, share=0.1)
    assert 0.05 < sum(trial.choose() for _ in range(2000)) / 2000 < 0.15


def test_requests_without_a_draft_and_of_others_say_nothing() -> None:
    trial = Canary(0, 1)
    trial.finished(0, 0, 0)
    trial.finished(7, 10, 5)
    assert [arm.requests for arm in trial.arms.values()] == [0, 0]


def test_the_variance_is_that_of_repeated_samples() -> None:
    rng = random.Random(0)
    means, variances = [], []
    for _ in range(300):
        arm = Arm()
        for _ in range(60):
            rounds = rng.randint(1, 30)
            arm.add(sum(1 + _accepted(rng, 0.6) for _ in range(rounds)), rounds)
        means.append(arm.accept_length)
        variances.append(arm.variance)
    mean = sum(means) / len(means)
    true = sum((one - mean) ** 2 for one in means) / len(means)
    assert sum(variances) / len(variances) == pytest.approx(true, rel=0.25)
