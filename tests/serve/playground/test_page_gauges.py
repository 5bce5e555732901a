"""The gauges: the last state, and sums over rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eyas.serve.playground import page as gauges
from eyas.serve.playground.page import Gauges

from .fake_server import engine_state


def test_before_the_first_step_all_is_zero() -> None:
    read = Gauges().read()
    assert (read["running"], read["waiting"], read["tokens_total"], read["busy"]) == (0, 0, 0, None)


def test_a_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    load = {"cores": 2, "threads": 2, "load_average": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(gauges, "machine_load", lambda: load)
    made = Gauges()
    made.stepped(engine_state(), None, None)
    assert made.read()["busy"] is None
    load["load_average"] = [9.0, 1.0, 1.0]
    assert "load 9 on 2 cores" in made.read()["busy"]


def test_the_last_state_and_the_sums() -> None:
    made = Gauges()
    outcome: Any = SimpleNamespace(accepted=[2, 0], tokens=[[7, 8, 9], [7]], contexts=[30, 2048], nodes=[5, 0])
    made.stepped(engine_state(running=2, waiting=3, cached_tokens=40, cache_limit=100), None, outcome)
    made.stepped(engine_state(prefilling=1), None, None)
    made.stepped(engine_state(running=1, cache_limit=100), None, outcome)
    read = made.read()
    assert (read["running"], read["prefilling"], read["waiting"], read["cache_limit"]) == (1, 0, 0, 100)
    assert read["tokens_total"] == 8  # two rounds of two rows: two accepted and a token of each row's own
    assert (read["row_rounds_total"], read["accepted_total"]) == (4, 4)
    assert read["by_context"] == {
        "0-1k": {"row_rounds_total": 2, "accepted_total": 4},
        "2-4k": {"row_rounds_total": 2, "accepted_total": 0},
    }
    assert read["nodes_total"] == 10
