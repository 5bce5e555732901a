"""Every shipped sweep is one: its recipe is there and knows the knobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.config import load_config
from eyas.labs.sweep.search import SweepConfig
from eyas.labs.sweep.trial import Trials

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "src/eyas/recipes/sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_sweep_is_ready_to_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    Trials(load_config(SweepConfig, path)).check()
