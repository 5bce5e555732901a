"""`eyas bench checkpoints`: the pick is the best, the rest is kept, damage is reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.bench.offline import candidates, drafters
from eyas.bench.offline.candidates import TaskScore

from ...pairs import Pair, write_rows
from ...runs import save_run

Run = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture
def bench(run: Run, pair: Pair, tmp_path: Path) -> Run:
    save_run(tmp_path / "run", pair.model)
    math = write_rows(tmp_path / "math.jsonl", [{"prompt": "48/2?"}, {"prompt": "clips"}])
    code = write_rows(tmp_path / "code.jsonl", [{"prompt": "def add"}])

    def call(*options: Any) -> Result:
        few = ("--max-new-tokens", 12, "--repeats", 1, "--warmup", 0, "--together", 2, "--tree", "dynamic:2,25,50")
        files = ("--prompt-file", math, "--prompt-file", code)
        return run("bench", "checkpoints", tmp_path / "run", *files, *few, *options)

    return call


def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Engines of every measurement that is made from now on."""
    calls: list[tuple[str, ...]] = []
    real = drafters.measure

    def measure(task: Any, engines: Any, *rest: Any) -> Any:
        calls.append((task.name, *engines))
        return real(task, engines, *rest)

    monkeypatch.setattr(drafters, "measure", measure)
    return calls


def test_the_pick_is_the_best_mean(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(monkeypatch)
    result = bench("--write", "--output", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    assert calls == [
        ("math", "none", "step-000010", "step-000020"),
        ("code", "none", "step-000010", "step-000020"),
        ("math", "none", "step-000030"),
        ("code", "none", "step-000030"),
    ]
    report = json.loads((tmp_path / "run" / "bench" / "checkpoints.json").read_text())
    assert report == json.loads((tmp_path / "all.json").read_text())
    means = {
        row["name"]: sum(TaskScore.from_dict(task).figure("accept_length") for task in row["tasks"].values()) / 2
        for row in report["ranked"]
    }
    assert len(set(means.values())) > 1  # drafters that disagree
    assert report["pick"] == max(sorted(means), key=lambda name: means[name])  # the earliest of equals
    assert report["pick"] in report["reason"]
    assert f"Pick: {report['pick']}" in result.stdout
    pick = tmp_path / "run" / "pick"
    source = tmp_path / "run" / "checkpoints" / report["pick"]
    copied, original = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in (pick, source))
    given = json.loads(original.pop("config.json"))
    assert json.loads(copied.pop("config.json")) == given | {
        "default_tree": "auto" if report["doubt"] else "dynamic:2,25,50"
    }
    assert copied == original
    assert report["checkpoints"][0]["training"] == {
        "loss": 8.0,
        "validation_loss": 8.0,
        "validation_accept_length": 1.5,
        "moment": 5.0,
    }
    assert (tmp_path / "run" / "bench" / "checkpoints.svg").read_bytes().startswith(b"<?xml")


def test_a_pick_slower_than_plain_is_warned_of_and_left_to_go_on_with(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "doubt", lambda picked: f"{picked.name} decodes at 0.90 times the speed")
    result = bench("--write")
    assert result.exit_code == 0, result.output
    assert "warning: step-0000" in result.stderr
    assert "--tree auto, which drafts only where that pays" in result.stderr
    assert "Beware: step-0000" in result.stdout
    pick = tmp_path / "run" / "pick"
    assert json.loads((pick / "config.json").read_text())["default_tree"] == "auto"
    assert "its default_tree is auto" in result.stderr
    math, code = (f"--prompt-file {tmp_path}/{name}.jsonl" for name in ("math", "code"))
    assert f"--draft-model {pick} {math} {code}\n" in result.stderr
    following = result.stderr.split("next: eyas ")[1].split()
    assert following[:2] == ["bench", "methods"]


def test_checkpoint_and_tree_are_chosen_together(
    bench: Run, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "doubt", lambda _: None)
    assert bench().stderr.rstrip().endswith("--write")
    few = ("--max-new-tokens", 6, "--repeats", 1, "--warmup", 0)
    result = run("bench", "checkpoints", tmp_path / "run", "--prompt-file", tmp_path / "code.jsonl", *few, "--write")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run" / "bench" / "trees.json").read_text())
    tried = {row["name"] for done in report["passes"] for row in done["candidates"]}
    assert tried == {"chain:1", "chain:2", "chain:3", "chain:5", "dynamic:3,4,8"}
    config = json.loads((tmp_path / "run" / "pick" / "config.json").read_text())
    assert config["default_tree"] == report["pick"]
    assert f"its default_tree is {report['pick']}" in result.stderr
    picked = json.loads((tmp_path / "run" / "bench" / "checkpoints.json").read_text())["pick"]
    assert report["drafter"] == picked


@pytest.mark.slow
def test_what_is_known_is_not_measured_again(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(monkeypatch)
    shutil.move(tmp_path / "run" / "checkpoints" / "step-000030", tmp_path / "kept")
    first = json.loads((bench("--output", tmp_path / "a.json"), tmp_path / "a.json")[1].read_text())
    shutil.move(tmp_path / "kept", tmp_path / "run" / "checkpoints" / "step-000030")
    calls.clear()
    second = json.loads((bench("--output", tmp_path / "a.json"), tmp_path / "a.json")[1].read_text())
    assert calls == [("math", "none", "step-000030"), ("code", "none", "step-000030")]
    before = {row["name"]: row for row in first["ranked"]}
    assert {row["name"]: row for row in second["ranked"] if row["name"] in before} == before
    calls.clear()
    assert bench().exit_code == 0
    assert calls == []
    assert bench("--seed", 5).exit_code == 0  # other settings
    assert len(calls) == 4


def test_a_damaged_checkpoint_is_reported_and_the_others_go_on(bench: Run, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000010" / "model.safetensors").write_bytes(b"short")
    result = bench()
    assert result.exit_code == 1
    assert "error: step-000010: can't read the header" in result.stderr
    assert "Pick: step-0000" in result.stdout
    for name in ("step-000020", "step-000030"):
        (tmp_path / "run" / "checkpoints" / name / "model.safetensors").write_bytes(b"short")
    assert "no checkpoint could be measured" in bench("--seed", 2).stderr


def test_what_is_refused(bench: Run, run: Run, tmp_path: Path) -> None:
    assert "unknown tree" in bench("--tree", "bush").stderr
    (tmp_path / "run" / "config.yaml").unlink()
    assert "names no target: give --model" in bench().stderr
    (tmp_path / "empty").mkdir()
    result = run("bench", "checkpoints", tmp_path / "empty", "--prompt-file", tmp_path / "math.jsonl")
    assert (result.exit_code, "has no checkpoints" in result.stderr) == (1, True)
