"""A run's folder, read."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.bench.offline.trees import TrainingRun
from eyas.errors import DataError

from ...pairs import write_rows


def test_checkpoints_come_by_step_and_whole(tmp_path: Path) -> None:
    for name in ("step-000200", "step-001000", "step-000090", "step-000300", "other", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "step-000300":  # being written
            (tmp_path / "checkpoints" / name / "config.json").write_text("{}")
    assert [found.step for found in TrainingRun(tmp_path).checkpoints] == [90, 200, 1000]
    with pytest.raises(DataError, match="has no checkpoints"):
        _ = TrainingRun(tmp_path / "checkpoints").checkpoints


def test_what_training_said_at_a_step(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "seconds": 1.5, "loss": 3.0},
        {"step": 20, "seconds": 3.0, "validation_loss": 4.0},
        {"step": 20, "seconds": 3.5, "loss": 2.0},
        {"step": 30, "seconds": 5.0, "loss": 1.0},
        '{"step": 40, "seco',
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    run = TrainingRun(tmp_path)
    assert run.at(25, ("loss", "validation_loss")) == {"loss": 2.0, "validation_loss": 4.0, "moment": 3.5}
    assert run.at(5, ("loss",)) == {}
    assert run.curve("loss") == ([1.5, 3.5, 5.0], [3.0, 2.0, 1.0])
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 3.0}])
    assert TrainingRun(tmp_path).curve("loss") == ([1.0], [3.0])  # without a clock, by step
    write_rows(tmp_path / "metrics.jsonl", ["{", {"step": 1}])
    with pytest.raises(DataError, match=r"metrics.jsonl:1 isn't a metrics record"):
        _ = TrainingRun(tmp_path).records


def test_the_recipe(tmp_path: Path) -> None:
    assert TrainingRun(tmp_path).recipe == {}
    (tmp_path / "config.yaml").write_text("drafter: {target: there}\n")
    assert TrainingRun(tmp_path).recipe == {"target": "there"}
    (tmp_path / "config.yaml").write_text("target: here\n")
    assert TrainingRun(tmp_path).recipe == {"target": "here"}
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match="not valid YAML"):
        _ = TrainingRun(tmp_path).recipe
