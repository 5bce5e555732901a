"""Curves, tables in files, and corrections that follow the machine but no burst of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.controller import CostModel, CostTable, Curve
from eyas.engine.controller.costs import Work
from eyas.errors import UsageError

from .simulation import Machine

TABLE = Machine().table()


def passes(costs: CostModel, tokens: int) -> float:
    return float(costs.pass_seconds(tokens, 1, [0]))


def test_a_curve_is_linear_between_points_and_beyond() -> None:
    curve = Curve(sizes=(1, 3, 5), seconds=(2.0, 4.0, 10.0))
    assert curve.at(np.array([0.5, 1, 2, 3, 4, 5, 7])).tolist() == [2, 2, 3, 4, 7, 10, 16]
    assert Curve(sizes=(1, 2), seconds=(3.0, 2.0)).at(10.0) == 2.0  # noise never makes large sizes free
    assert Curve(sizes=(4,), seconds=(1.0,)).at(100.0) == 1.0


@pytest.mark.parametrize(("sizes", "seconds"), [((), ()), ((1, 1), (1, 1)), ((1, 2), (1,)), ((1,), (-1,))])
def test_a_curve_that_is_none_is_refused(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a curve needs"):
        Curve(sizes=sizes, seconds=seconds)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    TABLE.save(path)
    assert CostTable.read(path, "simulation") == TABLE
    with pytest.raises(UsageError, match="were measured on 'simulation', but this is 'elsewhere'"):
        CostTable.read(path, "elsewhere")
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a file of costs"):
        CostTable.read(path, "simulation")
    with pytest.raises(UsageError, match="can't read the costs"):
        CostTable.read(tmp_path / "none.json", "simulation")
    with pytest.raises(UsageError, match="can't write the costs"):
        TABLE.save(tmp_path / "no" / "costs.json")


def test_one_bad_moment_makes_no_size_dearer_than_larger_ones() -> None:
    costs = CostModel(TABLE)
    before = passes(costs, 1), passes(costs, 12)
    for number in range(41):
        once = number == 20
        costs.learn(Work(1, [0], 1 if once else 12, 10.0 * before[0] if once else before[1]))
        costs.settle()
    assert passes(costs, 12) == pytest.approx(before[1], rel=0.02)
    assert passes(costs, 1) <= passes(costs, 13)


def test_a_size_s_own_cost_is_learned_from_rounds_beside_it() -> None:
    """Passes of 16 really cost half as much again as was measured at start-up, those of one token do not."""
    costs = CostModel(TABLE)
    before = passes(costs, 1), passes(costs, 16)
    for number in range(60):
        tokens, factor = (16, 1.5) if number % 2 else (1, 1.0)
        costs.learn(Work(1, [0], tokens, before[number % 2] * factor))
        costs.settle()
    assert passes(costs, 16) / passes(costs, 1) == pytest.approx(1.5 * before[1] / before[0], rel=0.05)

    def error(tokens: int) -> float:
        return passes(costs, tokens) / float(TABLE.pass_by_tokens.at(tokens)) / (passes(costs, 1) / before[0])

    assert 1.0 < error(4) < error(8) < error(14) < 1.55  # sizes between share
    assert error(128) == pytest.approx(error(16))  # and those beyond


def test_plain_rounds_alone_make_no_tree_dearer() -> None:
    costs = CostModel(TABLE)
    noise = np.random.default_rng(0)
    bare = {tokens: passes(costs, tokens) for tokens in (1, 4)}

    def dearer() -> float:
        return passes(costs, 4) / costs.plain_seconds(1, [0])

    for number in range(1200):
        tokens = 4 if number < 100 and number % 2 else 1
        costs.learn(Work(1, [0], tokens, bare[tokens] * (1.0 + noise.exponential(0.05)), plain=tokens == 1))
        if number == 200:
            costs.settle()
            before = dearer()
        if number % 16 == 0:
            costs.settle()
    assert dearer() == pytest.approx(before, rel=0.04)


def test_a_machine_that_slows_down_slows_everything() -> None:
    costs = CostModel(TABLE)
    ratio = passes(costs, 16) / passes(costs, 1)
    for _ in range(20):
        costs.learn(Work(1, [0], 16, 3.0 * float(TABLE.pass_by_tokens.at(16))))
    costs.settle()
    assert passes(costs, 16) == pytest.approx(3.0 * float(TABLE.pass_by_tokens.at(16)), rel=0.1)
    assert passes(costs, 16) / passes(costs, 1) < 1.6 * ratio  # until others are seen, they share the blame


@given(st.integers(1, 6), st.floats(1.5, 50.0))
def test_a_burst_moves_no_size_against_another(length: int, factor: float) -> None:
    costs = CostModel(TABLE)
    truth = {size: float(TABLE.pass_by_tokens.at(size)) for size in (1, 16)}
    for number in range(40):
        costs.learn(Work(1, [0], (1, 16)[number % 2], truth[(1, 16)[number % 2]]))
    for number in range(length):  # noisy rounds, most of one size
        costs.learn(Work(1, [0], 16 if number else 1, factor * truth[16 if number else 1]))
    costs.settle()
    assert passes(costs, 16) / passes(costs, 1) == pytest.approx(truth[16] / truth[1], rel=0.03)


def test_parts_are_learned_apart() -> None:
    costs = CostModel(TABLE)
    machine = Machine()
    for _ in range(30):
        costs.learn(
            Work(
                1,
                [0],
                8,
                machine.pass_seconds(8, 1, [0]),
                width=4,
                levels=3,
                draft_seconds=2.0 * machine.draft_seconds(1, 4, 3),
                pairs=3,
                observe_seconds=machine.observe_seconds(3),
            )
        )
        costs.settle()
    drafts = float(costs.draft_seconds(1, 4, 3)) / machine.draft_seconds(1, 4, 3)
    assert drafts / (passes(costs, 8) / machine.pass_seconds(8, 1, [0])) == pytest.approx(2.0, rel=0.1)
    assert drafts == pytest.approx(2.0, rel=0.1)
    costs.learn(Work(1, [0], 8, 0.0))  # a clock that stood still teaches nothing


def test_what_few_rows_showed_says_nothing_of_many() -> None:
    """32 tokens of 4 rows are long trees and cost more than was measured; of 16 rows they may not."""
    costs = CostModel(TABLE)
    few = [0] * 4
    many = [0] * 16
    table = CostModel(TABLE)
    for number in range(60):
        tokens, factor = (32, 1.6) if number % 2 else (4, 1.0)
        costs.learn(Work(4, few, tokens, factor * float(table.pass_seconds(tokens, 4, few))))
        costs.settle()

    def dearer(costs: CostModel, lengths: list[int], small: int) -> float:
        rows = len(lengths)
        return float(costs.pass_seconds(32, rows, lengths) / costs.pass_seconds(small, rows, lengths))

    assert dearer(costs, few, 4) > 1.4 * dearer(table, few, 4)
    assert dearer(costs, many, 16) == dearer(table, many, 16)


def test_rows_of_different_lengths_cost_what_padding_costs_and_teach_nothing_else() -> None:
    machine = Machine(unequal=0.1, padding_unit=0.02)
    costs = CostModel(machine.table())
    assert costs.padding_seconds(np.array([0.0, 8.0, 16.0]), 8) == pytest.approx(
        [0.0, machine.padding_seconds(8), machine.padding_seconds(16)]
    )
    before = float(costs.pass_seconds(32, 8, [9] * 8))
    for _ in range(40):
        costs.learn(Work(8, [9] * 8, 32, before + machine.padding_seconds(24), padded=24))
        costs.settle()
    assert float(costs.pass_seconds(32, 8, [9] * 8)) == pytest.approx(before, rel=1e-3)


def test_reading_has_its_own_curve_where_observing_only_stores() -> None:
    """What observing then takes says nothing about reading; that the machine is slow does."""
    assert CostModel(TABLE).reading_seconds(64, 1) == TABLE.observe_by_pairs.of(64)
    reading = Curve(sizes=(1.0, 64.0), seconds=(0.0, 2.0))
    costs = CostModel(TABLE.model_copy(update={"read_by_pairs": reading}))
    assert costs.reading_seconds(64, 1) == 2.0
    for _ in range(20):
        costs.learn(Work(1, [0], 5, 2 * TABLE.pass_by_tokens.of(5), pairs=5, observe_seconds=1e-6))
    costs.settle()
    assert costs.reading_seconds(64, 1) == pytest.approx(4.0, rel=0.01)
