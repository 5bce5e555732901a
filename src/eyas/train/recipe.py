"""Recipes: YAML files for `eyas train` with one section, `drafter` or `lm`, for the trainer of that name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import model_validator

from eyas.config import StrictModel, override, validated
from eyas.files import FileLock
from eyas.recipes import read_recipe
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.lm.lm import LmConfig, train_lm
from eyas.train.loop.loop import explaining_full_disk

_LOG = logging.getLogger("eyas")


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train what a recipe, a file or a name, describes, with `key=value` overrides. Raises ConfigError."""
    recipe = load_recipe(path, overrides)
    section = recipe.lm or recipe.drafter
    assert section is not None
    with explaining_full_disk(section.output), _alone(section.output):
        if recipe.lm is not None:
            train_lm(recipe.lm)
        if recipe.drafter is not None:
            train_drafter(recipe.drafter)


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Lock a run's folder: two runs in one would mix their checkpoints. LockedError if there is another.

    The first of a run's processes does it for all.
    """
    if sys.platform == "win32" or os.environ.get("RANK", "0") != "0":
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(output))
        except OSError as error:  # a file system without locks
            _LOG.warning("can't lock %s (%s): start no second run in it", output, error)
        yield


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
