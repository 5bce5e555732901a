"""The grid, the passes with engines that are only names, and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.offline import runner
from eyas.bench.offline.runner import PLAIN, GroupRun, Plan, Task
from eyas.bench.offline.trees import TreeSetting, TreeSweep, grid, write_default_tree
from eyas.errors import CheckpointError, UsageError
from eyas.text.prompts import PromptRow
from eyas.tree import parse_tree
from eyas.tree.dynamic import DynamicTree
from eyas.types import SamplingParams, Stats

from ...pairs import save_drafter

numbers = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(numbers, numbers, numbers)
def test_no_two_settings_of_the_grid_are_the_same_tree(depths: list[int], top_ks: list[int], nodes: list[int]) -> None:
    settings = grid(depths, top_ks, nodes, [1])
    assert len({setting.name for setting in settings}) == len(settings)
    for setting in settings[1:]:
        spec = parse_tree(setting.name)
        assert isinstance(spec, DynamicTree)
        offered = sum(setting.top_k * (1 if level == 0 else setting.top_k) for level in range(setting.depth))
        assert setting.depth <= setting.nodes <= offered
    expected = sum(
        d <= n <= k + (d - 1) * k * k and k > 1 for d in set(depths) for k in set(top_ks) for n in set(nodes)
    )
    assert len(settings) == 1 + expected


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no tree to try"):
        grid([5], [2], [3], [])


class Clock:
    """Stands for `run_group`: tokens/s of each engine, by name."""

    def __init__(self, speed: dict[str, float]) -> None:
        self.speed = speed
        self.calls: list[tuple[str, str]] = []

    def __call__(self, engine: str, group: Any, params: SamplingParams) -> GroupRun:  # noqa: ARG002
        self.calls.append((engine, group[0].id))
        stats = Stats(tokens=100, target_passes=50, walked=50, decode_seconds=100 / self.speed[engine])
        return GroupRun(stats, [[1, 2]], [])


def sweep(speed: dict[str, float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[TreeSweep, Clock]:
    clock = Clock({PLAIN: 10.0} | speed)
    monkeypatch.setattr(runner, "run_group", clock)
    settings = [TreeSetting(1, 1, 1), *(TreeSetting(3, 2, nodes) for nodes in range(3, 2 + len(speed)))]
    assert {setting.name for setting in settings} == set(speed)
    engines: Any = {name: name for name in clock.speed}
    task = Task("t", [[PromptRow(f"g{i}", f"f:{i}", prompt="x")] for i in range(9)])
    return TreeSweep(engines, settings, [task], SamplingParams(), Plan(2, 0), **options), clock


@given(st.permutations(range(10)))
def test_the_fastest_survives_every_pass(order: list[int]) -> None:
    names = ["chain:1", *(f"dynamic:3,2,{nodes}" for nodes in range(3, 12))]
    speed = {name: 20.0 + place for name, place in zip(names, order, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        made, clock = sweep(speed, patch, coarse=1, finalists=2)
        steps: list[int] = []
        choice = made.run(lambda: steps.append(0))
    assert choice.best.name == max(speed, key=lambda name: speed[name])
    assert [done.rung for done in made.passes] == [(10, 1), (4, 3), (2, 9)]
    assert len(steps) == made.work == len(clock.calls) == 11 * 1 + 5 * 3 + 3 * 9 * 2
    assert {c.name for c in choice.ranked} == {name for name in speed if speed[name] >= 28}


def test_a_dropped_setting_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"chain:1": 50.0, "dynamic:3,2,3": 40.0, "dynamic:3,2,4": 11.0}
    made, clock = sweep(speed, monkeypatch, coarse=1, finalists=2, by="speedup")
    assert made.run().best.mean("speedup") == 5.0
    assert clock.calls.count(("dynamic:3,2,4", "g0")) == 1
    assert ("dynamic:3,2,4", "g1") not in clock.calls
    assert clock.calls.count(("chain:1", "g8")) == 2


def test_a_busy_moment_does_not_drop_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"chain:1": 50.0, "dynamic:3,2,3": 40.0, "dynamic:3,2,4": 30.0}
    made, clock = sweep(speed, monkeypatch, coarse=3, finalists=1)

    def disturbed(engine: str, group: Any, params: SamplingParams) -> GroupRun:
        run = clock(engine, group, params)
        if (engine, group[0].id) == ("chain:1", "g1"):
            run.stats.decode_seconds *= 100
        return run

    monkeypatch.setattr(runner, "run_group", disturbed)
    assert made.run().best.name == "chain:1"


def test_default_tree_is_the_only_change(tmp_path: Path) -> None:
    drafter = save_drafter(tmp_path)
    before = json.loads((drafter / "config.json").read_text())
    weights = (drafter / "model.safetensors").read_bytes()
    write_default_tree(drafter, "dynamic:4,3,9")
    write_default_tree(drafter, "chain:4")
    after = json.loads((drafter / "config.json").read_text())
    assert after == before | {"default_tree": "chain:4"}
    assert list(after) == [*(key for key in before if key != "default_tree"), "default_tree"]
    assert (drafter / "model.safetensors").read_bytes() == weights
    assert {file.name for file in drafter.iterdir()} == {"config.json", "model.safetensors"}


def test_only_a_drafter_directory_is_written_to(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a drafter directory"):
        write_default_tree(tmp_path, "chain:4")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        write_default_tree(tmp_path, "chain:4")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        write_default_tree(tmp_path, "chain:4")
    assert (tmp_path / "config.json").read_text() == "{"
