"""A recipe is a YAML file with one section, `lm` or `drafter`: the trainer it is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from eyas.config import StrictModel, load_config
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.lm.lm import LmConfig, train_lm


class Recipe(StrictModel):
    """Exactly one of the sections."""

    lm: LmConfig | None = None
    drafter: DrafterTrainConfig | None = None

    @model_validator(mode="after")
    def _one_section(self) -> Recipe:
        if (self.lm is None) == (self.drafter is None):
            raise ValueError("a recipe has one section, `lm` or `drafter`")
        return self


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Load strictly and train."""
    recipe = load_config(Recipe, Path(path), overrides)
    if recipe.lm is not None:
        train_lm(recipe.lm)
    if recipe.drafter is not None:
        train_drafter(recipe.drafter)
