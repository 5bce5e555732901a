"""`eyas bench checkpoints`: every checkpoint of a run on real tasks; which one to serve, and why."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

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
    within,
    write_report,
)
from eyas.cli.common.options import (
    Coupled,
    Json,
    MeasureOptions,
    Minutes,
    ReportFile,
    RuntimeOptions,
    SamplingOptions,
    as_arguments,
)
from eyas.cli.common.verb import note_if_interrupted
from eyas.drafters.options import DrafterOptions
from eyas.errors import DataError, UsageError
from eyas.options import EngineOptions, check_device
from eyas.tables import show_table
from eyas.tree.spec import read_tree

if TYPE_CHECKING:
    from eyas.bench.offline.budget import Size
    from eyas.bench.offline.candidates import Selection
    from eyas.bench.offline.drafters import DrafterBench
    from eyas.bench.offline.trees import CheckpointReport, TrainingRun, TreeReport
    from eyas.bench.offline.workers import CrewMeasure, MeasuringMaker
    from eyas.session import Session


def checkpoints(
    run: Annotated[
        Path, Argument(metavar="RUN", exists=True, file_okay=False, help="A folder that `eyas train` wrote.")
    ],
    runtime: RuntimeOptions,
    sampling: SamplingOptions,
    measuring: MeasureOptions,
    cluster: ClusterOptions,
    model: Annotated[str | None, Option(help="The target (default: the one the run's recipe names).")] = None,
    tree: Annotated[
        str | None, Option(help="One tree for all (default: each drafter's own, then the best of a few for the pick).")
    ] = None,
    coupled: Coupled = None,
    by: Annotated[
        Literal["accept_length", "speedup"],
        Option(help="The deciding metric. Accept length is counted, so it has no timing noise."),
    ] = "accept_length",
    minutes: Minutes = None,
    together: Annotated[int, Option(min=1, help="Checkpoints held in memory and measured interleaved.")] = 6,
    write: Annotated[bool, Option("--write", help="Copy the pick, with its tree, to RUN/pick.")] = False,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Measure a run's checkpoints; pick the best and its tree.

    The best has the highest mean over the prompt files, each interleaved with plain decoding. Results are kept in
    RUN/bench, checkpoint by checkpoint, and not measured again with the same settings. checkpoints.json and
    checkpoints.svg there show training metrics, accept length and speedup on one time axis. With --on ray, one worker
    answers each group of prompts with all methods in turn.

    The pick is then decoded with a few trees, unless one is given: short chains, and a small tree. The fastest becomes
    its default if it is certain to be faster than plain decoding, else `auto` does, which drafts only where that pays
    off. RUN/bench/trees.json says why; `eyas bench trees` tries many more.

    Examples:
        eyas bench checkpoints RUN --prompt-file prompts.jsonl
        eyas bench checkpoints RUN --prompt-file prompts.jsonl --limit 4 --repeats 1
    """
    params = sampling_params(sampling)
    if tree is not None:
        read_tree(tree)
    check_output(output_)
    shared = cluster.check(run)
    if shared and minutes is not None:
        raise UsageError("--minutes goes by this machine's speed: leave out --on, or give --limit and --repeats")
    check_device(None if shared else runtime.device)
    if model is not None:
        target_here(runtime.of(model), shared).check()
    from eyas.bench.offline.candidates import choose
    from eyas.bench.offline.drafters import DrafterBench, Ledger
    from eyas.bench.offline.runner import Plan, read_tasks
    from eyas.bench.offline.trees import CheckpointReport, TrainingRun
    from eyas.bench.offline.workers import MeasuringMaker
    from eyas.files import file_hash

    trained = TrainingRun(run)
    drafters = {checkpoint.name: checkpoint.path for checkpoint in trained.checkpoints}
    target = runtime.of(model or _target_of(trained))
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    session = open_session(target_here(target, shared))
    options = EngineOptions(tree, coupled is not False, batch_size=measuring.batch_size)
    measuring, kept = within(
        minutes,
        measuring,
        partial(session.engine, None, replace(options, tree=None)),
        params,
        tasks,
        partial(_runs, tasks=len(tasks), searches=tree is None, together=together),
        len(drafters),
    )
    if kept < len(drafters):
        promising = trained.best(kept)
        drafters = {name: path for name, path in drafters.items() if name in promising}
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    settings = settings_of(target, session.target, measuring, params) | {"tree": tree, "coupled": options.coupled}
    prompts = {task.name: file_hash(task.file) for task in tasks}
    make = MeasuringMaker(target, {name: (DrafterOptions(path), tree) for name, path in drafters.items()}, options)
    with ExitStack() as stack:
        workers = stack.enter_context(measured_on(cluster, make, session.target)) if shared else None
        settings |= {} if workers is None else workers.settings
        ledger = Ledger(run / "bench", _key(settings, session, workers), prompts)
        plan = Plan(measuring.repeats, measuring.warmup)
        bench = DrafterBench(
            drafters, session, tasks, params, plan, ledger, options, together=together, measure=workers
        )
        stack.enter_context(
            note_if_interrupted(f"the scores of checkpoints measured so far are kept in {run / 'bench'}")
        )
        candidates = bench.run(stack.enter_context(row_bar(bench.work)))
    errors = [error for task in tasks for error in dict.fromkeys(task.errors)]
    errors += [f"{checkpoint}: {reason}" for checkpoint, reason in bench.failures.items()]
    if not candidates:
        raise DataError("no checkpoint could be measured: " + "; ".join(errors))
    report = CheckpointReport(trained, choose(candidates, by), settings, machine_of(workers), errors)
    best = drafters[report.choice.best.name]
    trees = _trees(bench, best, settings, cluster if shared else None, make) if tree is None else None
    _write(report, trees, json, output_)
    if not json:
        _show(report, trees, workers)
    decided = report.choice if trees is None else trees.choice
    warn_if_doubtful(decided)
    if write:
        _write_pick(best, run / "pick", decided, tree)
    code = finish(report.machine, errors)
    prompt_files = prompt_options(measuring)
    if write:
        next_step(
            "bench", "methods", target.model, *as_arguments(runtime), "--draft-model", run / "pick", *prompt_files
        )
    else:
        next_step("bench", "checkpoints", run, *as_arguments(runtime), *prompt_files, "--write")
    return code


def _runs(size: Size, *, tasks: int, searches: bool, together: int) -> int:
    """Runs of a group of prompts that measuring checkpoints of this size takes, and the search for a tree after it."""
    from eyas.bench.offline.trees import FEW_TREES, FINALISTS, grid, sweep_runs

    plain = -(-size.candidates // together)  # interleaved with every batch of checkpoints
    total = (size.candidates + plain) * tasks * size.groups * size.repeats
    if searches:
        total += sweep_runs(len(grid(*FEW_TREES)), [size.groups] * tasks, size.repeats, coarse=2, finalists=FINALISTS)
    return total


def _key(settings: Mapping[str, Any], session: Session, workers: CrewMeasure | None) -> dict[str, Any]:
    """What a score depends on apart from the drafter and the prompts."""
    from eyas.bench.machine import describe_machine
    from eyas.targets.fingerprint import fingerprint

    machine = describe_machine() if workers is None else workers.settings
    kept = {name: value for name, value in machine.items() if name != "load_average"}
    return {**settings, "target": fingerprint(session.target.model), **kept}


def _write(report: CheckpointReport, trees: TreeReport | None, json: bool, path: Path | None) -> None:
    """Write the reports into the run's folder, and the one on checkpoints wherever it was requested."""
    from eyas.bench.report.figures import checkpoint_figure
    from eyas.files import write_bytes, write_json

    content = report.as_dict()
    folder = report.run.path / "bench"
    write_json(folder / "checkpoints.json", content)
    write_bytes(folder / "checkpoints.svg", checkpoint_figure(report.run, content))
    write_report(content, json, path)
    if trees is not None:
        write_json(folder / "trees.json", trees.as_dict())


def _show(report: CheckpointReport, trees: TreeReport | None, workers: CrewMeasure | None) -> None:
    """Print the tables, the picks and the reasons for them."""
    console = output()
    show_table(console, report.table())
    console.print(f"Pick: {report.choice.reason}")
    if workers is not None:
        console.print(workers.described)
    if trees is not None:
        show_table(console, trees.table())
        console.print(f"Tree: {trees.choice.reason}")


def _write_pick(best: Path, folder: Path, decided: Selection, tree: str | None) -> None:
    """Copy the picked checkpoint, with the given tree, or else the one that was decided on."""
    from eyas.bench.offline.trees import tree_to_keep, write_default_tree
    from eyas.files import copy_folder

    copy_folder(best, folder)
    note(f"copied {best.name} to {folder}")
    own = tree_to_keep(decided, tree or decided.best.name)
    write_default_tree(folder, own)
    note(f"its default_tree is {own}")


def _trees(
    bench: DrafterBench, picked: Path, settings: Mapping[str, Any], cluster: ClusterOptions | None, make: MeasuringMaker
) -> TreeReport:
    """Measure a few trees for the picked checkpoint on the same prompts; with a cluster, its workers measure."""
    from eyas.bench.offline.trees import FEW_TREES, FINALISTS, TreeReport, TreeSweep, grid, tree_engines

    tried = grid(*FEW_TREES)
    drafter = DrafterOptions(picked)
    engines = tree_engines(bench.session, bench.session.drafter(drafter), tried, bench.options)
    with ExitStack() as stack:
        workers = None
        if cluster is not None:
            methods: dict[str, tuple[DrafterOptions, str | None]] = {one.name: (drafter, one.name) for one in tried}
            each = replace(make, methods=methods)
            workers = stack.enter_context(measured_on(cluster, each, bench.session.target))
        sweep = TreeSweep(engines, tried, bench.tasks, bench.params, bench.plan, finalists=FINALISTS, measure=workers)
        choice = sweep.run(stack.enter_context(row_bar(sweep.work)))
    return TreeReport(picked.name, tried, sweep.passes, choice, settings, machine_of(workers), [])


def _target_of(run: TrainingRun) -> str:
    target = run.recipe.get("target")
    if not isinstance(target, str):
        raise UsageError(f"{run.path / 'config.yaml'} names no target: give --model")
    return target
