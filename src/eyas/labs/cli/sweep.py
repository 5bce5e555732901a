"""`eyas sweep`: many drafters trained from one recipe, ranked."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from typer import Argument

from eyas.cli.common.build import hide_progress_bars
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import note, output, row_bar
from eyas.cli.common.options import recipe_names
from eyas.cli.common.verb import FAILURE, note_if_interrupted
from eyas.errors import UsageError
from eyas.tables import show_table


def sweep(
    cluster: ClusterOptions,
    file: Annotated[
        str,
        Argument(
            metavar="FILE",
            help="A YAML file (recipe, output, knobs, search), or one that comes with eyas.",
            autocompletion=recipe_names("sweeps"),
        ),
    ],
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Override its values.")] = None,
) -> int:
    """Train a recipe with many settings; rank them (experimental).

    They are ranked by decoded accept length; then the speed of the best is measured.

    Trials are `eyas train` processes with their own folders under OUTPUT/trials; with --on ray they run on the machines
    of a cluster. Run the same command to resume: finished trials are kept, interrupted ones continue, failed ones are
    tried again. OUTPUT/results.json has the results; the plots are next to it.

    Examples:
        eyas sweep eagle3
        eyas sweep SWEEP.yaml output=RUNS/sweep --on ray
    """
    from eyas.config import load_config
    from eyas.labs.sweep.search import SweepConfig
    from eyas.recipes import SWEEPS, find_recipe

    config = load_config(SweepConfig, find_recipe(file, SWEEPS), overrides or ())
    find_recipe(config.recipe)
    shared = cluster.check(config.output)
    if shared and config.devices:
        raise UsageError("with --on the cluster assigns a device to each trial: remove devices, see --gpus-per-worker")
    hide_progress_bars()
    from eyas.bench.machine import describe_machine
    from eyas.files import write_bytes, write_json
    from eyas.labs.sweep.report import knob_figure, report_dict, table_of, trade_figure
    from eyas.labs.sweep.sweep import Sweep

    with ExitStack() as stack:
        machines = stack.enter_context(cluster.connected()) if shared else None
        if machines is not None:
            config = config.model_copy(update={"parallel": cluster.workers or machines.room})
        run = Sweep(config, note)
        stack.enter_context(
            note_if_interrupted(
                f"finished trials and the states of those in progress are kept in {config.output / 'trials'}"
            )
        )
        if machines is None:
            run.train()
        else:
            from eyas.labs.sweep.sweep import train_on

            train_on(machines, run, config.parallel)
        choice = run.time(row_bar)
    report = report_dict(run, choice, describe_machine())
    write_json(config.output / "results.json", report)
    if choice is not None:
        write_bytes(config.output / "knobs.svg", knob_figure(report))
        write_bytes(config.output / "trade.svg", trade_figure(report))
    console = output()
    show_table(console, table_of(run))
    if choice is not None:
        console.print(f"Best: {choice.reason}")
    for outcome in run.failed:
        note(f"error: trial {outcome.trial.name}: {outcome.failure}")
    return FAILURE if run.failed else 0
