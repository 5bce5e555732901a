"""What learning may cost."""

from __future__ import annotations

import math
from dataclasses import replace

from eyas.engine.controller.budget import Budget, Pace
from eyas.engine.controller.explore import Explorer
from eyas.engine.controller.observation import ObservationPolicy
from eyas.tree.shared import PlannedTree, SharedTree


def test_an_allowance_spends_its_share_and_no_more() -> None:
    allowance = Budget(0.01)
    lost = 0.0
    for _ in range(10_000):
        allowance.earn(1.0)
        if allowance.affords(3.0):
            allowance.spend(3.0)
            lost += 3.0
    assert 90.0 <= lost <= 100.0


def test_no_spree_follows_a_quiet_time() -> None:
    allowance = Budget(0.01)
    allowance.earn(1e6)
    spent = 0
    while allowance.affords(1.0):
        allowance.spend(1.0)
        spent += 1
    assert spent == 2


def test_a_dear_probe_is_paid_off_before_the_next() -> None:
    allowance = Budget(0.01)
    allowance.earn(100.0)
    assert allowance.affords(1.0)
    allowance.spend(5.0)  # it took longer than it was expected to
    allowance.earn(400.0)
    assert not allowance.affords(1.0)
    allowance.earn(101.0)
    assert allowance.affords(1.0)


def rounds_until_due(pace: Pace) -> int:
    waits = 0
    while not pace.due():
        pace.round(1.0)
        waits += 1
    return waits


def test_a_pace_begins_at_once_and_what_the_first_time_takes_does_not_count() -> None:
    pace = Pace(0.01, least=20, most=1000)
    waits = []
    for seconds in (9.0, 1.0, 1.0, 1.0):
        waits.append(rounds_until_due(pace))
        pace.done(seconds)
    assert waits == [0, 20, 100, 100]


def test_a_pace_keeps_its_share() -> None:
    pace = Pace(0.01, least=2, most=50)
    pace.done(0.1)
    pace.done(0.1)
    assert rounds_until_due(pace) == 10
    for _ in range(60):  # it got faster: by and by it may come as often as it wants
        pace.done(0.0001)
    assert rounds_until_due(pace) == 2


def test_a_pace_never_stops() -> None:
    pace = Pace(0.01, least=1, most=5)
    pace.done(1e9)
    pace.done(1e9)
    assert rounds_until_due(pace) == 5


def test_rounds_are_planned_together_for_thirty_milliseconds_but_not_past_a_text_s_end() -> None:
    explorer = Explorer()
    planned = PlannedTree(SharedTree(3, 1, 3))
    assert explorer.ahead(planned, 0.005, math.inf) == 6
    assert explorer.ahead(planned, 0.005, 20.0) == 0
    assert explorer.ahead(None, 0.005, 20.0) == 6
    assert explorer.ahead(planned, 0.05, math.inf) == 0
    assert explorer.ahead(replace(planned, keeps_candidates=True), 0.005, math.inf) == 0  # it shows what others bring


def observed_share(policy: ObservationPolicy, rows: int, used: bool, sequences: int = 400) -> float:
    """The share of sequences that are observed where each takes 40 rounds and `rows` run at a time."""
    admitted = 0
    for _ in range(sequences):
        admitted += (observed := policy.admits(rows))
        for _ in range(40 // rows * observed):
            policy.round(rows, used)
    return admitted / sequences


def test_where_nobody_drafts_few_are_observed() -> None:
    assert observed_share(ObservationPolicy(), 8, used=False) < 0.3
    assert observed_share(ObservationPolicy(), 8, used=True) == 1.0


def test_of_few_rows_everyone_is_observed() -> None:
    """Texts differ, so that the next one may be worth drafting for."""
    assert observed_share(ObservationPolicy(), 3, used=False) == 1.0


def test_what_many_rows_showed_says_nothing_about_few() -> None:
    policy = ObservationPolicy()
    observed_share(policy, 16, used=False)
    assert policy.admits(2)
    assert observed_share(policy, 5, used=True) == 1.0


def waves(policy: ObservationPolicy, rows: int, count: int) -> float:
    """The share of sequences that are observed where `rows` come one by one, decode together and end together."""
    admitted = 0
    for _ in range(count):
        observed = [policy.admits(row + 1) for row in range(rows)]
        admitted += sum(observed)
        for _ in range(40):
            policy.decoded(rows)
            if any(observed):
                policy.round(rows, False)
    return admitted / (rows * count)


def test_clients_that_come_one_by_one_are_expected_to_be_as_many_as_before() -> None:
    assert waves(ObservationPolicy(), 4, 100) < 0.3
    assert waves(ObservationPolicy(), 3, 100) == 1.0


def test_who_is_alone_after_others_is_soon_observed_again() -> None:
    policy = ObservationPolicy()
    waves(policy, 16, 40)
    for _ in range(40):
        policy.decoded(1)
    assert policy.admits(1)


def test_after_a_while_they_are_observed_again() -> None:
    policy = ObservationPolicy()
    observed_share(policy, 8, used=False)
    assert observed_share(policy, 8, used=True, sequences=2000) > 0.8
