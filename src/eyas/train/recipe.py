"""Recipes: YAML files for `eyas train` with one section, `drafter` or `lm`, for the trainer of that name.

With `extends: FILE`, or a list of files, a recipe overrides values of other recipes, key by key. Paths are relative to
the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator

from eyas.config import StrictModel, override, read_yaml, validated
from eyas.errors import ConfigError
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.lm.lm import LmConfig, train_lm


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train what a recipe describes, with `key=value` overrides. Raises ConfigError for an invalid recipe."""
    recipe = load_recipe(Path(path), overrides)
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


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides, and validate it; unknown keys are refused."""
    values = read_recipe(path)
    override(values, overrides, str(path))
    return validated(Recipe, values, str(path))


def read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a recipe merged over those of the files it extends; `extending` are the files that led here."""
    if path.resolve() in extending:
        raise ConfigError(f"{path} extends itself through {', '.join(map(str, extending))}")
    own = read_yaml(path)
    bases = own.pop("extends", [])
    if not isinstance(bases, (str, list)):
        raise ConfigError(f"{path}: extends must be a file or a list of files, not {bases!r}")
    values: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        values = _merged(values, read_recipe(path.parent / str(base), (*extending, path.resolve())))
    return _merged(values, own)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; where both have a value, that of `over` counts."""
    merged = dict(under)
    for key, value in over.items():
        there = under.get(key)
        merged[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return merged
