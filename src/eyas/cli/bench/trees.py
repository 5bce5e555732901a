"""`eyas bench trees`: the best draft tree for a drafter on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from eyas.cli.common.aliases import DRAFTER_HELP
from eyas.cli.common.build import open_session, sampling_params
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import next_step, note, output, row_bar
from eyas.cli.common.measuring import (
    check_output,
    finish,
    machine_of,
    measured_on,
    prompt_options,
    settings_of,
    target_here,
    warn_if_doubtful,
    whole_numbers,
    write_report,
)
from eyas.cli.common.options import (
    Coupled,
    Json,
    LoadedDrafterOptions,
    MeasureOptions,
    ReportFile,
    SamplingOptions,
    TargetPanel,
    as_arguments,
)
from eyas.errors import UsageError
from eyas.options import EngineOptions
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.bench.offline.trees import TreeReport
    from eyas.bench.offline.workers import CrewMeasure


def trees(
    target: TargetPanel,
    files: LoadedDrafterOptions,
    sampling: SamplingOptions,
    measuring: MeasureOptions,
    cluster: ClusterOptions,
    draft_model: Annotated[str, Option(help=f"The drafter: {DRAFTER_HELP}.")],
    tree_depth: Annotated[str, Option(help="Levels of dynamic trees to try.")] = "3,5,7",
    tree_top_k: Annotated[str, Option(help="Beams of dynamic trees to try.")] = "4,8",
    tree_nodes: Annotated[str, Option(help="Nodes of dynamic trees to try.")] = "4,8,15,24,32,60",
    chain: Annotated[str, Option(help="Chains to try; '' for none.")] = "1,2,3,5",
    coarse: Annotated[int, Option(min=1, help="Prompts per file in the first pass, each run once.")] = 2,
    finalists: Annotated[int, Option(min=1, help="Trees in the last pass, which runs every prompt.")] = 4,
    by: Annotated[
        Literal["tokens_per_second", "speedup", "accept_length"], Option(help="The deciding metric.")
    ] = "tokens_per_second",
    coupled: Coupled = None,
    write: Annotated[bool, Option("--write", help="Set default_tree in the drafter's config.json.")] = False,
    plot: Annotated[Path | None, Option(dir_okay=False, help="Heat map, an .svg file.")] = None,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Find the best draft tree for a drafter on this machine.

    All trees are tried on a few prompts, the best third on more, the finalists on every prompt with all repeats;
    everything is interleaved with plain decoding. The finalists' figures come from the last pass alone. With --on ray,
    one worker answers each group of prompts with all trees in turn.

    Examples:
        eyas bench trees MODEL --draft-model DRAFTER --prompt-file prompts.jsonl
        eyas bench trees FILE.gguf --draft-model DRAFTER --prompt-file prompts.jsonl --limit 8 --write
    """
    from eyas.bench.report.figures import check_plot, tree_figure
    from eyas.files import write_bytes

    params = sampling_params(sampling)
    check_output(output_)
    check_plot(plot)
    given = {"--tree-depth": tree_depth, "--tree-top-k": tree_top_k, "--tree-nodes": tree_nodes, "--chain": chain}
    sizes = [whole_numbers(text, option) for option, text in given.items()]
    shared = cluster.check(Path(draft_model))
    named = target.of(target.model)
    drafter = files.of(draft_model)
    here = target_here(named, shared)
    here.check()
    if write and not Path(draft_model).is_dir():
        raise UsageError(f"--write changes config.json of a local directory, and {draft_model} isn't one")
    drafter.check()
    from eyas.drafters.small_lm.drafter import holds_language_model

    if write and holds_language_model(Path(draft_model)):
        raise UsageError(f"--write sets a drafter's own tree, and {draft_model} is a language model: leave it out")
    from eyas.bench.offline.runner import Plan, read_tasks
    from eyas.bench.offline.trees import TreeReport, TreeSweep, grid, tree_engines, tree_to_keep, write_default_tree
    from eyas.bench.offline.workers import MeasuringMaker

    tried = grid(*sizes)
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    session = open_session(here)
    options = EngineOptions(coupled=coupled is not False, batch_size=measuring.batch_size)
    engines = tree_engines(session, session.drafter(drafter), tried, options)
    settings = settings_of(named, session.target, measuring, params) | {"coupled": options.coupled}
    make = MeasuringMaker(named, {each.name: (drafter, each.name) for each in tried}, options)
    with ExitStack() as stack:
        workers = stack.enter_context(measured_on(cluster, make, session.target)) if shared else None
        settings |= {} if workers is None else workers.settings
        plan = Plan(measuring.repeats, measuring.warmup)
        sweep = TreeSweep(engines, tried, tasks, params, plan, by, coarse=coarse, finalists=finalists, measure=workers)
        choice = sweep.run(stack.enter_context(row_bar(sweep.work)))
    errors = [error for task in tasks for error in task.errors]
    report = TreeReport(draft_model, tried, sweep.passes, choice, settings, machine_of(workers), errors)
    write_report(report.as_dict(), json, output_)
    if plot is not None:
        write_bytes(plot, tree_figure(report.as_dict()))
    if not json:
        _show(report, workers)
    warn_if_doubtful(choice)
    if write:
        kept = tree_to_keep(choice, choice.best.name)
        write_default_tree(Path(draft_model), kept)
        note(f"default_tree of {draft_model} is now {kept}")
    code = finish(report.machine, errors)
    best = () if write else ("--tree", f"{Path(draft_model).name}={choice.best.name}")  # --write keeps it in the files
    runs = [*as_arguments(target), *as_arguments(files)]
    next_step("bench", "methods", target.model, *runs, "--draft-model", draft_model, *best, *prompt_options(measuring))
    return code


def _show(report: TreeReport, workers: CrewMeasure | None) -> None:
    """Print the table, the pick and the reason for it."""
    console = output()
    show_table(console, report.table())
    if len(report.passes) > 1:
        console.print(
            "Rows with fewer prompts per file were measured in an earlier pass, which dropped them: only rows with the "
            "same number are comparable."
        )
    console.print(f"Pick: {report.choice.reason}")
    if workers is not None:
        console.print(workers.described)
