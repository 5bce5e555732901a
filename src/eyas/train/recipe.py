"""Recipes: YAML files for `eyas train` with one section, `drafter` or `lm`, for the trainer of that name."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import model_validator
from safetensors import SafetensorError

from eyas.config import StrictModel, override, validated
from eyas.errors import CheckpointError
from eyas.files import FileLock
from eyas.recipes import read_recipe
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter
from eyas.train.lm.lm import LmConfig, train_lm

_LOG = logging.getLogger("eyas")


class Recipe(StrictModel):
    """A recipe, which has exactly one of these sections."""

    lm: LmConfig | None = None
    drafter: DrafterTrainConfig | None = None

    @model_validator(mode="after")
    def _one_section(self) -> Recipe:
        if (self.lm is None) == (self.drafter is None):
            raise ValueError("a recipe must have one section, `lm` or `drafter`")
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (a file or a shipped name), apply `key=value` overrides and validate it. Refuses unknown keys."""
    values = read_recipe(path)
    override(values, overrides, str(path))
    return validated(Recipe, values, str(path))


def run_recipe(recipe: Recipe) -> None:
    """Train what a recipe describes. Raises LockedError, CheckpointError and what the trainers raise."""
    section = recipe.lm or recipe.drafter
    assert section is not None
    with _explaining_full_disk(section.output), _alone(section.output):
        if recipe.lm is not None:
            train_lm(recipe.lm)
        if recipe.drafter is not None:
            train_drafter(recipe.drafter)


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Lock a run's folder, because two runs in it would mix their checkpoints. Raises LockedError if it is in use.

    Rank 0 takes the lock for all processes of the run.
    """
    if sys.platform == "win32" or os.environ.get("RANK", "0") != "0":
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(output))
        except OSError as error:  # a file system without locks
            _LOG.warning("can't lock %s (%s): don't start a second run in it", output, error)
        yield


@contextmanager
def _explaining_full_disk(folder: Path) -> Iterator[None]:
    """Turn errors about a full disk, or a limit on the size of files, into CheckpointError with advice."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        number = getattr(error, "errno", None)
        if number not in full and not any(f"os error {each})" in str(error) for each in full):
            raise
        raise CheckpointError(
            f"the disk that holds {folder} is full ({error}); the last saved state is complete: free some space and "
            "run the same command again"
        ) from error
