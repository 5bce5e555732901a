"""Sweeps with a small script as the trainer: it copies a ready drafter, fails or hangs, depending on the recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.labs.sweep import sweep, trial
from eyas.labs.sweep.search import SweepConfig

from ...pairs import save_drafter, save_target, write_rows

FAKE_TRAINER = """
import json, os, pathlib, shutil, sys, time, yaml
recipe = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())["drafter"]
drafters, run = pathlib.Path(sys.argv[2]), pathlib.Path(recipe["output"])
seed = recipe["loop"]["seed"]
with (drafters / "calls").open("a") as calls:
    calls.write(f"{seed} {os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
while (drafters / f"block-{seed}").exists():
    time.sleep(0.02)
if not (drafters / str(seed)).exists():
    sys.exit("error: no such drafter")
run.mkdir(parents=True, exist_ok=True)
(run / "metrics.jsonl").write_text(json.dumps({"step": 1, "seconds": 2.5}) + "\\n")
shutil.copytree(drafters / str(seed), run / "best", dirs_exist_ok=True)
"""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and three drafters, named by their seeds."""
    path = tmp_path_factory.mktemp("models")
    save_target(path / "target")
    for seed in range(3):
        save_drafter(path / str(seed), seed=seed)
    (path / "trainer.py").write_text(FAKE_TRAINER)
    return path


class Setup:
    """A sweep's files and the calls of its trainer."""

    def __init__(self, models: Path, folder: Path) -> None:
        self.drafters = models
        self.folder = folder
        (models / "calls").unlink(missing_ok=True)
        recipe = {"target": str(models / "target"), "chats": str(folder / "chats.jsonl"), "output": "unused"}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"drafter": {**recipe, "loop": {"steps": 1}}}))
        self.prompts = write_rows(folder / "rows.jsonl", [{"prompt": text} for text in ("48/2?", "def", "clips")])

    def config(self, **changes: Any) -> SweepConfig:
        values = {
            "recipe": self.folder / "recipe.yaml",
            "output": self.folder / "sweep",
            "knobs": {"drafter.loop.seed": [0, 1, 2]},
            "score": {"prompt_files": [self.prompts], "max_tokens": 12, "tree": "dynamic:2,25,50"},
            "timing": {"repeats": 1, "warmup": 0},
        }
        return SweepConfig.model_validate(values | changes)

    @property
    def calls(self) -> list[str]:
        """One line per training process."""
        file = self.drafters / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def setup(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    def command(recipe: Path) -> list[str]:
        return [sys.executable, str(models / "trainer.py"), str(recipe), str(models)]

    monkeypatch.setattr(trial, "train_command", command)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    return Setup(models, tmp_path)
