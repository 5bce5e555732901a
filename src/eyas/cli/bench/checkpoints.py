"""`eyas bench checkpoints`: every checkpoint of a run on real tasks; which one to serve, and why."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from eyas.cli.common.build import check_device, check_target, open_target, sampling_params
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import next_step, note, output, row_bar, show_table
from eyas.cli.common.measuring import (
    MeasuringMaker,
    check_output,
    finish,
    machine_of,
    measured_on,
    prompt_options,
    runtime_here,
    settings_of,
    warn_of,
    write_report,
)
from eyas.cli.common.options import Coupled, Json, MeasureOptions, ReportFile, RuntimeOptions, SamplingOptions
from eyas.cli.common.verb import keeping
from eyas.errors import UsageError
from eyas.tree.spec import read_tree

if TYPE_CHECKING:
    from eyas.bench.offline.drafters import DrafterBench
    from eyas.bench.offline.trees import TrainingRun, TreeReport


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
        str | None,
        Option(help="One tree for all (default: each drafter's own, then the best of a few for the pick)."),
    ] = None,
    coupled: Coupled = None,
    by: Annotated[
        Literal["accept_length", "speedup"],
        Option(help="What decides. Accept length is counted, so it has no timing noise."),
    ] = "accept_length",
    together: Annotated[int, Option(min=1, help="Checkpoints held in memory and interleaved at a time.")] = 6,
    write: Annotated[bool, Option("--write", help="Copy the pick, with its tree, to RUN/pick.")] = False,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Measure every checkpoint of a training run; pick the best, and a draft tree for it.

    That is the one with the best mean over the prompt files, each measured in turns with plain decoding. Results are
    kept in RUN/bench, checkpoint by checkpoint, and not measured again with the same settings. There, too, are
    checkpoints.json and checkpoints.svg: training metrics, accept length and speedup on one time axis. With --on ray
    each group of prompts is answered with all methods in turn by one worker.

    The pick is then decoded with a few trees, unless one is given: short chains, and a small tree. The fastest becomes
    its own if it is certain to be faster than plain decoding, else `auto`, which drafts only where that pays.
    RUN/bench/trees.json says why; `eyas bench trees` tries many more.
    """
    params = sampling_params(sampling)
    if tree is not None:
        read_tree(tree)
    check_output(output_)
    shared = cluster.check(run)
    check_device(None if shared else runtime.device)
    if model is not None:
        check_target(model, runtime_here(runtime, shared))
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.candidates import choose
    from eyas.bench.offline.drafters import DrafterBench, Ledger
    from eyas.bench.offline.runner import Plan, read_tasks
    from eyas.bench.offline.trees import CheckpointReport, TrainingRun, tree_to_keep, write_default_tree
    from eyas.bench.report.figures import checkpoint_figure
    from eyas.errors import DataError
    from eyas.files import copy_folder, file_hash, write_bytes, write_json
    from eyas.targets import load_tokenizer
    from eyas.targets.fingerprint import fingerprint

    trained = TrainingRun(run)
    drafters = {checkpoint.name: checkpoint.path for checkpoint in trained.checkpoints}
    name = model or _target_of(trained)
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit)
    loaded = open_target(name, runtime_here(runtime, shared))
    settings = settings_of(name, loaded, runtime, measuring, params) | {"tree": tree, "coupled": coupled is not False}
    prompts = {
        task.name: file_hash(path) for task, path in zip(tasks, dict.fromkeys(measuring.prompt_file), strict=True)
    }
    methods = {name: (str(path), tree) for name, path in drafters.items()}
    make = MeasuringMaker(name, runtime, methods, coupled is not False, measuring.batch_size)
    kept = f"the scores of checkpoints measured so far are kept in {run / 'bench'}"
    with ExitStack() as stack:
        workers = stack.enter_context(measured_on(cluster, make, loaded)) if shared else None
        machine = describe_machine() if workers is None else workers.settings
        settings |= {} if workers is None else workers.settings
        target = {"target": fingerprint(loaded.model)}
        key = settings | target | {k: v for k, v in machine.items() if k != "load_average"}
        bench = DrafterBench(
            drafters,
            loaded,
            load_tokenizer(name),
            tasks,
            params,
            Plan(measuring.repeats, measuring.warmup),
            Ledger(run / "bench", key, prompts),
            batch_size=measuring.batch_size,
            coupled=coupled is not False,
            tree=tree,
            together=together,
            measure=workers,
        )
        stack.enter_context(keeping(kept))
        candidates = bench.run(stack.enter_context(row_bar(bench.work)))
    errors = [error for task in tasks for error in dict.fromkeys(task.errors)]
    errors += [f"{checkpoint}: {reason}" for checkpoint, reason in bench.failures.items()]
    if not candidates:
        raise DataError("no checkpoint could be measured: " + "; ".join(errors))
    report = CheckpointReport(trained, choose(candidates, by), settings, machine_of(workers), errors)
    best = drafters[report.choice.best.name]
    trees = _trees(bench, best, settings, cluster if shared else None, make) if tree is None else None
    content = report.as_dict()
    write_json(run / "bench" / "checkpoints.json", content)
    write_bytes(run / "bench" / "checkpoints.svg", checkpoint_figure(trained, content))
    write_report(content, json, output_)
    if not json:
        console = output()
        show_table(console, report.table())
        console.print(f"Pick: {report.choice.reason}")
        if workers is not None:
            console.print(workers.described)
    if trees is not None:
        write_json(run / "bench" / "trees.json", trees.as_dict())
        if not json:
            show_table(console, trees.table())
            console.print(f"Tree: {trees.choice.reason}")
    decided = report.choice if trees is None else trees.choice
    warn_of(decided)
    if write:
        copy_folder(best, run / "pick")
        note(f"copied {best.name} to {run / 'pick'}")
        own = tree_to_keep(decided, tree or decided.best.name)
        write_default_tree(run / "pick", own)
        note(f"its default_tree is {own}")
    code = finish(report.machine, errors)
    options = prompt_options(measuring)
    if write:
        next_step("bench", "methods", name, "--draft-model", run / "pick", "--tree", "auto", *options)
    else:
        next_step("bench", "checkpoints", run, *options, "--write")
    return code


def _trees(
    bench: DrafterBench, picked: Path, settings: Mapping[str, Any], cluster: ClusterOptions | None, make: MeasuringMaker
) -> TreeReport:
    """A few trees for the checkpoint that was picked, measured on the same prompts; with a cluster, by its workers."""
    from eyas.bench.offline.trees import FEW, TreeReport, TreeSweep, grid, tree_engines
    from eyas.drafters.loading import load_drafter

    tried, drafter = grid(*FEW), load_drafter(picked, bench.target)
    engines = tree_engines(bench.target, bench.tokenizer, drafter, tried, bench.batch_size, bench.coupled)
    with ExitStack() as stack:
        workers = None
        if cluster is not None:
            methods: dict[str, tuple[str, str | None]] = {each.name: (str(picked), each.name) for each in tried}
            workers = stack.enter_context(measured_on(cluster, replace(make, methods=methods), bench.target))
        sweep = TreeSweep(engines, tried, bench.tasks, bench.params, bench.plan, finalists=3, measure=workers)
        choice = sweep.run(stack.enter_context(row_bar(sweep.work)))
    return TreeReport(picked.name, tried, sweep.passes, choice, settings, machine_of(workers), [])


def _target_of(run: TrainingRun) -> str:
    target = run.recipe.get("target")
    if not isinstance(target, str):
        raise UsageError(f"{run.path / 'config.yaml'} names no target: give --model")
    return target
