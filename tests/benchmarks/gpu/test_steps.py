"""Steps of a long measurement: order, budget, what is written when, and what a second call runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.report import page
from benchmarks.gpu.steps import Outcome, OutOfTime, Results, Skipped, Step, limited, run_steps
from eyas.errors import UsageError

IDENTITY = {"device": "a device", "torch": "2", "sizes": "full"}


def step(name: str, call: Callable[[], Outcome | None], seconds: float = 0.0) -> Step:
    return Step("section", name, lambda: call() or Outcome([{"figure": 1}]), seconds)


def failing() -> None:
    raise ValueError("no such kernel")


def endless() -> None:
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001 - as an engine catches what ends a pass
        pytest.fail("OutOfTime was caught")


def skipping() -> None:
    raise Skipped("nothing to see")


def statuses(results: Results) -> list[str]:
    return [entry["status"] for entry in results.steps.values()]


def test_a_second_call_runs_what_is_not_done(tmp_path: Path) -> None:
    ran: list[str] = []
    bad = True

    def mended() -> None:
        ran.append("mended")
        if bad:
            failing()

    def differing() -> Outcome:
        ran.append("differing")
        return Outcome([{"equal": 1}], ["one answer differs"] if bad else [])

    steps = [step("fine", lambda: ran.append("fine")), step("mended", mended), step("differing", differing)]
    path = tmp_path / "folder" / "gpu.json"
    run_steps(steps, Results.open(path, IDENTITY), 10)
    assert ran == ["fine", "mended", "differing"]
    held = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert [entry["status"] for entry in held.values()] == ["done", "failed", "failed"]
    assert held["section/mended"]["error"] == "ValueError: no such kernel"
    assert held["section/differing"]["rows"] == [{"equal": 1}]
    bad = False
    results = Results.open(path, IDENTITY)
    run_steps(steps, results, 10)
    assert ran[3:] == ["mended", "differing"]
    assert statuses(results) == ["done"] * 3


def test_each_result_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    seen: list[int] = []

    def look() -> None:
        seen.append(len(json.loads(path.read_text(encoding="utf-8"))["steps"]))

    run_steps([step("first", lambda: None), step("second", look)], Results.open(path, IDENTITY), 10)
    assert seen == [1]


def test_the_budget_cuts_a_step_and_leaves_long_ones(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "gpu.json", IDENTITY)
    ran: list[str] = []
    steps = [
        step("long", lambda: ran.append("long"), seconds=60),
        step("short", lambda: ran.append("short")),
        step("endless", endless),
        step("late", lambda: ran.append("late")),
    ]
    began = time.monotonic()
    run_steps(steps, results, 0.3)
    assert time.monotonic() - began < 5
    assert ran == ["short"]
    assert [results.status(each) for each in steps] == [None, "done", "cut", None]
    run_steps(steps, results, 0.3)
    assert ran == ["short"]


def test_a_step_is_cut_at_its_own_limit(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "gpu.json", IDENTITY)
    steps = [Step("section", "endless", lambda: endless() or Outcome([]), limit=0.1), step("late", lambda: None)]
    run_steps(steps, results, 20)
    assert statuses(results) == ["cut", "done"]


def test_what_can_not_run_here_is_tried_again_and_is_no_failure(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "gpu.json", IDENTITY)
    one = step("skipped", skipping)
    run_steps([one], results, 10)
    assert statuses(results) == ["skipped"]
    assert not results.done(one)


def test_results_of_another_device_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    run_steps([step("fine", lambda: None)], Results.open(path, IDENTITY), 10)
    with pytest.raises(UsageError, match="results of another torch: choose another output"):
        Results.open(path, IDENTITY | {"torch": "3"})


def test_a_limit_ends_with_its_block() -> None:
    with limited(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(OutOfTime), limited(0.05):
        time.sleep(5)


def test_the_page_shows_figures_errors_and_what_is_missing(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "gpu.json", IDENTITY)
    rows = [{"batch": 1, "tokens/s": 12.5, "apart": 2e-6}, {"batch": 8, "peak GiB": None, "text": "a | b"}]
    steps = [
        step("rates", lambda: Outcome(rows)), step("broken", failing), step("absent", skipping),
        step("later", lambda: None, seconds=60),
    ]  # fmt: skip
    run_steps(steps, results, 10)
    lines = page(results, steps).splitlines()
    assert lines[0] == "# eyas on a device"
    assert "torch 2, sizes full" in lines
    assert "| step | result | s | batch | tokens/s | apart | peak GiB | text |" in lines
    assert "| rates | done | 0.0 | 1 | 12.5 | 2e-06 |  |  |" in lines
    assert "| rates | done | 0.0 | 8 |  |  |  | a / b |" in lines
    assert "| broken | failed: ValueError: no such kernel | 0.0 |  |  |  |  |  |" in lines
    assert any(line.startswith("| absent | skipped: nothing to see |") for line in lines)
    assert any(line.startswith("| later | not run yet |") for line in lines)
