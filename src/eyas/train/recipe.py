"""Recipes: YAML files with one section, `drafter` or `lm`, for the trainer of that name.

With `extends: FILE`, or a list of files relative to it, a recipe replaces values of others, key by key.
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
    """Train what a recipe describes; `overrides` are `key=value`. Raises ConfigError for anything that it can't be."""
    recipe = load_recipe(Path(path), overrides)
    if recipe.lm is not None:
        train_lm(recipe.lm)
    if recipe.drafter is not None:
        train_drafter(recipe.drafter)


class Recipe(StrictModel):
    """The sections of a recipe, of which one is given."""

    lm: LmConfig | None = None
    drafter: DrafterTrainConfig | None = None

    @model_validator(mode="after")
    def _one_section(self) -> Recipe:
        if (self.lm is None) == (self.drafter is None):
            raise ValueError("a recipe has one section, `lm` or `drafter`")
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with `key=value` overrides and validate it strictly."""
    values = read_recipe(path)
    override(values, overrides, str(path))
    return validated(Recipe, values, str(path))


def read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values in a recipe, on top of those of the files that it extends; `extending` are those on the way here."""
    if path.resolve() in extending:
        raise ConfigError(f"{path} extends itself, by way of {', '.join(map(str, extending))}")
    own = read_yaml(path)
    bases = own.pop("extends", [])
    if not isinstance(bases, (str, list)):
        raise ConfigError(f"{path}: extends names a file or a list of files, not {bases!r}")
    values: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        values = _merged(values, read_recipe(path.parent / str(base), (*extending, path.resolve())))
    return _merged(values, own)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; where both have a value, `over`'s."""
    merged = dict(under)
    for key, value in over.items():
        there = under.get(key)
        merged[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return merged
