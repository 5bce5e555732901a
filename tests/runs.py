"""A training run's folder as `eyas train` leaves it, made without training."""

from __future__ import annotations

from pathlib import Path

import yaml

from .pairs import save_drafter, write_rows


def save_run(path: Path, model: Path, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    """Save checkpoints with different weights, metrics and the config."""
    for step in steps:
        save_drafter(path / "checkpoints" / f"step-{step:06d}", seed=step)
    rows = []
    for step in steps:
        rows.append({"step": step, "seconds": step / 2, "loss": 9.0 - step / 10})
        rows.append({"step": step, "seconds": step / 2, "validation_loss": 8.0, "validation_accept_length": 1.5})
    write_rows(path / "metrics.jsonl", rows)
    (path / "config.yaml").write_text(yaml.safe_dump({"drafter": {"target": str(model)}}), encoding="utf-8")
    return path
