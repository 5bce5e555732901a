"""`eyas train`: train what a recipe describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from eyas.cli.common.verb import keeping


def train(
    recipe: Annotated[Path, Argument(metavar="RECIPE", exists=True, dir_okay=False, help="A YAML file; see recipes/.")],
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Replace values of it.")] = None,
) -> None:
    """Train what a recipe describes: a target or a drafter. Interrupted, the same command goes on.

    With `torchrun --nproc-per-node N -m eyas train ...` N processes train a drafter together (loop.parallel).
    """
    from eyas.cli.common.build import quiet
    from eyas.train.recipe import run_recipe

    quiet()
    with keeping("nothing was trained since the last saved state, which is kept"):
        run_recipe(str(recipe), overrides or ())
