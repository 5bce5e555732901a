"""Recipes: YAML files for `eyas train` with one section, `drafter` or `lm`, for the trainer of that name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from eyas.config import StrictModel, override, validated
from eyas.recipes import read_recipe
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.lm.lm import LmConfig, train_lm


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train what a recipe, a file or a name, describes, with `key=value` overrides. Raises ConfigError."""
    recipe = load_recipe(path, overrides)
    if recipe.lm is not None:
        train_lm(recipe.lm)
    if recipe.drafter is not None:
        train_drafter(recipe.drafter)


class Recipe(StrictModel):
    """The sections of a recipe, exactly one of which is given."""

    lm: LmConfig | None = None
    drafter: DrafterTrainConfig | None = None

    @model_validator(mode="after")
    def _one_section(self) -> Recipe:
        if (self.lm is None) == (self.drafter is None):
            raise ValueError("a recipe must have one section, `lm` or `drafter`")
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, a file or a name, apply `key=value` overrides, and validate it; unknown keys are refused."""
    values = read_recipe(path)
    override(values, overrides, str(path))
    return validated(Recipe, values, str(path))
