"""`eyas sweep`: many drafters trained from one recipe, ranked."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from eyas.cli.common.build import quiet
from eyas.cli.common.display import note, output, row_bar
from eyas.cli.common.verb import FAILURE


def sweep(
    file: Annotated[
        str, Argument(metavar="FILE", help="A YAML file (recipe, output, knobs, search), or one that comes with eyas.")
    ],
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Replace values of it.")] = None,
) -> int:
    """Train a recipe with many settings and rank the drafters.

    They are ranked by decoded accept length; then the speed of the best is measured.

    Trials are `eyas train` processes with folders of their own under OUTPUT/trials. Run it again to resume: finished
    trials are kept, interrupted ones go on, failed ones are tried again. OUTPUT/results.json has the results, plots lie
    beside it.
    """
    from eyas.config import load_config
    from eyas.recipes import SWEEPS, find_recipe
    from eyas.sweep.config import SweepConfig

    config = load_config(SweepConfig, find_recipe(file, SWEEPS), overrides or ())
    find_recipe(config.recipe)
    quiet()
    from eyas.bench.machine import describe_machine
    from eyas.files import write_bytes, write_json
    from eyas.sweep.report import knob_figure, report_dict, table_of, trade_figure
    from eyas.sweep.sweep import Sweep

    run = Sweep(config, note)
    run.train()
    choice = run.time(row_bar)
    report = report_dict(run, choice, describe_machine())
    write_json(config.output / "results.json", report)
    if choice is not None:
        write_bytes(config.output / "knobs.svg", knob_figure(report))
        write_bytes(config.output / "trade.svg", trade_figure(report))
    console = output()
    console.print(table_of(run))
    if choice is not None:
        console.print(f"Best: {choice.reason}")
    for outcome in run.failed:
        note(f"error: trial {outcome.trial.name}: {outcome.failure}")
    return FAILURE if run.failed else 0
