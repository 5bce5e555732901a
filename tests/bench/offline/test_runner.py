"""Interleaving, medians, comparison: with engines that are only names."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.bench.offline import runner
from eyas.bench.offline.runner import GroupRun, MethodResult, Plan, Task, measure, measure_answerers, pooled
from eyas.text.prompts import PromptRow
from eyas.types import Completion, SamplingParams, Stats

NAMES: Any = {"none": "none", "a": "a", "b": "b"}
PARAMS = SamplingParams()


class Bench:
    """Stands for `run_group`; times and tokens are looked up."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.tokens: dict[tuple[str, str], list[list[list[int]]]] = {}
        self.errors: dict[str, list[str]] = {}

    def __call__(self, engine: str, group: Any, params: SamplingParams) -> GroupRun:
        assert params is PARAMS
        key = (engine, group[0].id)
        self.calls.append(key)
        seconds = self.seconds[key].pop(0) if self.seconds.get(key) else 1.0
        tokens = self.tokens[key].pop(0) if self.tokens.get(key) else [[1, 2]]
        return GroupRun(Stats(tokens=10, decode_seconds=seconds), tokens, self.errors.get(group[0].id, []))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    fake = Bench()
    monkeypatch.setattr(runner, "run_group", fake)
    return fake


def task(groups: int) -> Task:
    return Task("t", [[PromptRow(f"g{i}", f"f:{i}", prompt="x")] for i in range(groups)])


def test_methods_take_turns_and_none_always_goes_first(bench: Bench) -> None:
    steps: list[int] = []
    measure(task(2), NAMES, PARAMS, Plan(repeats=2, warmup=1), lambda: steps.append(0))
    order = ["".join(name[0] for name, _ in bench.calls[i : i + 3]) for i in range(0, 15, 3)]
    assert order == ["nab", "nab", "abn", "abn", "bna"]  # warm-up; group 0 twice; group 1 twice
    assert [group for _, group in bench.calls] == ["g0"] * 9 + ["g1"] * 6
    assert len(steps) == 12  # the warm-up is not progress


def test_the_median_run_counts_for_its_group(bench: Bench) -> None:
    bench.seconds = {("none", "g0"): [9.0, 1.0, 3.0], ("none", "g1"): [5.0, 6.0, 700.0]}
    measured = measure(task(2), NAMES, PARAMS, Plan(repeats=3, warmup=0))["none"]
    assert measured.stats.decode_seconds == 3.0 + 6.0
    assert measured.stats.tokens == 20
    bench.seconds = {("none", "g0"): [4.0, 2.0]}
    assert measure(task(1), NAMES, PARAMS, Plan(2, 0))["none"].stats.decode_seconds == 2.0  # the lower of two


def test_the_warm_up_is_not_counted(bench: Bench) -> None:
    bench.seconds = {("a", "g0"): [50.0, 60.0, 1.0]}
    assert measure(task(1), NAMES, PARAMS, Plan(1, 2))["a"].stats.decode_seconds == 1.0


def test_an_answer_is_identical_only_in_every_repeat(bench: Bench) -> None:
    plain = [[1, 2], [3]]
    bench.tokens = {
        ("none", "g0"): [plain, plain],
        ("a", "g0"): [plain, [[1, 2], [3, 4]]],
        ("b", "g0"): [plain, plain],
    }
    results = measure(task(1), NAMES, PARAMS, Plan(2, 0))
    assert {name: (m.same, m.answers, m.identical) for name, m in results.items()} == {
        "none": (2, 2, True),
        "a": (1, 2, False),
        "b": (2, 2, True),
    }


def test_a_missing_answer_is_not_identical(bench: Bench) -> None:
    bench.tokens = {("none", "g0"): [[[1], [2]]], ("a", "g0"): [[[1]]]}
    assert (lambda m: (m.same, m.answers))(measure(task(1), NAMES, PARAMS, Plan(1, 0))["a"]) == (1, 2)


def test_groups_without_answers_leave_errors_only(bench: Bench) -> None:
    bench.tokens = {(name, "g0"): [[]] for name in NAMES}
    bench.errors = {"g0": ["f:0: too long"]}
    made = task(2)
    results = measure(made, NAMES, PARAMS, Plan(1, 0))
    assert made.errors == ["f:0: too long"]
    assert (results["a"].answers, results["a"].stats.tokens) == (1, 10)
    assert measure(task(0), NAMES, PARAMS, Plan()) == {name: MethodResult() for name in NAMES}


def test_times_of_a_batch_are_wall_times() -> None:
    made = [
        Completion("", [], "", "stop", Stats(tokens=n, prefill_seconds=p, decode_seconds=d, draft_seconds=d / 4))
        for n, p, d in ((5, 0.5, 2.0), (7, 0.4, 3.0))
    ]
    together = pooled(made)
    assert (together.tokens, together.prefill_seconds, together.decode_seconds) == (12, 0.5, 3.0)
    assert together.draft_seconds == 0.75


def test_the_spread_of_repeats_is_kept(bench: Bench) -> None:
    bench.seconds = {("none", "g0"): [9.0, 10.0, 11.0]}
    assert measure(task(2), NAMES, PARAMS, Plan(repeats=3, warmup=0))["none"].spreads == [0.1, 0.0]
    assert measure(task(2), NAMES, PARAMS, Plan(repeats=1, warmup=0))["none"].spreads == []


def test_ratios_are_of_the_same_repeat(bench: Bench) -> None:
    bench.seconds = {("none", "g0"): [4.0, 2.0], ("a", "g0"): [2.0, 4.0]}
    results = measure(task(1), NAMES, PARAMS, Plan(2, 0))
    assert results["a"].ratios == [2.0, 0.5]
    assert results["none"].ratios == [1.0, 1.0]


def test_anything_that_answers_can_be_measured() -> None:
    def answers(tokens: list[int], seconds: float) -> Any:
        return lambda _: GroupRun(Stats(tokens=10, decode_seconds=seconds), [tokens], [])

    answerers = {"none": answers([1, 2], 1.0), "elsewhere": answers([1, 3], 2.0)}
    results = measure_answerers(task(1), answerers, Plan(1, 0))
    assert (results["elsewhere"].ratios, results["elsewhere"].same) == ([0.5], 0)
