"""A recipe is a YAML file; its `kind` key says which trainer it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from eyas.config import StrictModel, load_config
from eyas.train.lm import LmConfig, train_lm


class LmRecipe(StrictModel):
    """`kind: lm`: a target from scratch."""

    kind: Literal["lm"]
    lm: LmConfig


def run_recipe(path: str, overrides: Sequence[str] = ()) -> None:
    """Load strictly and train."""
    train_lm(load_config(LmRecipe, Path(path), overrides).lm)
