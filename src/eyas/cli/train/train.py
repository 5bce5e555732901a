"""`eyas train`: train what a recipe describes."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from eyas.cli.common.options import recipe_names
from eyas.cli.common.verb import note_if_interrupted
from eyas.errors import ConfigError


def train(
    recipe: Annotated[
        str,
        Argument(
            metavar="RECIPE",
            help="A YAML file, or the name of one that comes with eyas, such as eagle3.",
            autocompletion=recipe_names(),
        ),
    ],
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Override its values.")] = None,
    wandb: Annotated[str | None, Option(metavar="PROJECT", help="Log to this W&B project, too.")] = None,
    mlflow: Annotated[str | None, Option(metavar="EXPERIMENT", help="Log to this MLflow experiment, too.")] = None,
) -> None:
    """Train what a recipe describes: a target or a drafter. If interrupted, the same command resumes.

    With `torchrun --nproc-per-node N -m eyas train ...` N processes train a drafter together (loop.parallel).

    Examples:
        eyas train eagle3 drafter.target=MODEL drafter.store=STORE drafter.output=RUN
        eyas train MY_RECIPE.yaml drafter.loop.steps=500
    """
    from eyas.cli.common.build import hide_progress_bars
    from eyas.config import override, validated
    from eyas.recipes import read_recipe

    values = read_recipe(recipe)
    override(values, overrides or (), recipe)
    if len(values.keys() & {"lm", "drafter"}) != 1:
        raise ConfigError(f"{recipe}: a recipe must have one section, `lm` or `drafter`")
    section = next(iter(values.keys() & {"lm", "drafter"}))
    trackers = {"wandb": wandb, "mlflow": mlflow}
    override(values, [f"{section}.loop.{name}={each}" for name, each in trackers.items() if each], recipe)
    from eyas.train.recipe import Recipe, run_recipe

    hide_progress_bars()
    with note_if_interrupted("nothing was trained since the last saved state, which is kept"):
        run_recipe(validated(Recipe, values, recipe))
