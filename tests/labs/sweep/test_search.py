"""Where a sweep looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eyas.labs.sweep.search import Halving, HalvingConfig, Knob, SweepConfig, Tpe, draws, grid

RATE = Knob(low=1e-4, high=1e-1, log=True)
LAYERS = Knob(low=1, high=3)
LOSS = Knob(values=({"token": "ce"}, {"token": "kl"}))


def test_a_grid_is_every_combination() -> None:
    knobs = {"a": Knob(values=(1, 2)), "b": Knob(values=("x", "y", "z"))}
    made = list(grid(knobs))
    assert len(made) == 6
    assert made[:2] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}]


@given(st.integers(0, 50), st.integers(1, 30))
def test_draws_are_inside_different_and_repeatable(seed: int, trials: int) -> None:
    knobs = {"rate": RATE, "layers": LAYERS, "loss": LOSS}
    made = list(draws(knobs, trials, seed))
    assert made == list(draws(knobs, trials, seed))
    assert len(made) == trials
    assert all(1e-4 <= values["rate"] <= 1e-1 for values in made)
    assert all(values["layers"] in (1, 2, 3) and values["loss"] in (LOSS.values or ()) for values in made)
    assert len({str(values) for values in made}) == trials
    assert made[: trials // 2] == list(draws(knobs, trials // 2, seed))  # more trials later: the old ones stay


def test_draws_end_where_there_is_nothing_new() -> None:
    assert len(list(draws({"layers": LAYERS}, 50, 0))) == 3


def config(**changes: Any) -> SweepConfig:
    values = {"recipe": Path("r"), "output": Path("o"), "search": "tpe", "trials": 40, **changes}
    return SweepConfig(**{"knobs": {"rate": RATE, "loss": LOSS}, **values})


def test_tpe_moves_towards_what_scores_well() -> None:
    search = Tpe(config())
    proposed = []
    while (values := search.ask()) is not None:
        assert 1e-4 <= values["rate"] <= 1e-1
        proposed.append(values)
        search.record(values, -abs(values["rate"] - 0.05) + (values["loss"] == {"token": "kl"}))
    assert len(proposed) == 40
    late = proposed[20:]
    assert sum(values["loss"] == {"token": "kl"} for values in late) > 14
    assert sum(values["rate"] > 0.02 for values in late) > 10


def test_tpe_goes_on_from_history() -> None:
    done: list[Any] = [({"rate": 0.01, "loss": {"token": "ce"}}, 2.0)] * 3
    pending: Any = {"rate": 0.02, "loss": {"token": "kl"}}
    search = Tpe(config(trials=5), done, [pending])
    assert search.ask() == pending
    search.record(pending, None)
    second = search.ask()
    assert second is not None
    search.record(second, 1.0)
    assert search.ask() is None


@given(st.permutations(range(7)))
def test_halving_keeps_the_best_third_whoever_ends_first(order: list[int]) -> None:
    """Scores come in any order; a rung begins when the one before has all of them."""
    values = [{"x": x} for x in range(7)]
    score = {0: 1.0, 1: 3.0, 2: None, 3: 3.0, 4: 2.0, 5: 0.5, 6: 2.5}
    search = Halving(values, 100, HalvingConfig(rungs=3))
    rung = [search.ask() for _ in range(7)]
    assert (rung, search.ask(), search.until) == (values, None, 12)
    for x in order:
        assert search.ask() is None
        search.record({"x": x}, score[x])
    assert (search.until, [search.ask() for _ in range(4)]) == (34, [{"x": 1}, {"x": 3}, {"x": 6}, None])
    search.record({"x": 6}, 9.0)
    search.record({"x": 3}, 9.5)
    search.record({"x": 1}, None)
    assert (search.until, search.ask(), search.ask()) == (None, {"x": 3}, None)
    search.record({"x": 3}, 9.5)
    assert search.ask() is None
