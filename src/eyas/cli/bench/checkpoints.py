"""`eyas bench checkpoints`: every checkpoint of a run on real tasks; which one to serve, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from eyas.cli.common.build import check_device, check_target, open_target, sampling_params
from eyas.cli.common.display import note, output, row_bar
from eyas.cli.common.measuring import check_output, finish, settings_of, write_report
from eyas.cli.common.options import Coupled, Json, MeasureOptions, ReportFile, RuntimeOptions, SamplingOptions
from eyas.errors import UsageError
from eyas.tree.spec import read_tree

if TYPE_CHECKING:
    from eyas.bench.offline.checkpoints import TrainingRun


def checkpoints(
    run: Annotated[
        Path, Argument(metavar="RUN", exists=True, file_okay=False, help="A folder that `eyas train` wrote.")
    ],
    runtime: RuntimeOptions,
    sampling: SamplingOptions,
    measuring: MeasureOptions,
    model: Annotated[str | None, Option(help="The target (default: the one the run's recipe names).")] = None,
    tree: Annotated[str | None, Option(help="One tree for all (default: each drafter's own).")] = None,
    coupled: Coupled = None,
    by: Annotated[
        Literal["accept_length", "speedup"],
        Option(help="What decides. Accept length is counted, so it has no timing noise."),
    ] = "accept_length",
    together: Annotated[int, Option(min=1, help="Checkpoints in memory, and interleaved, at a time.")] = 6,
    write: Annotated[bool, Option("--write", help="Copy the pick to RUN/pick.")] = False,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Measure every checkpoint of a training run and pick the best.

    That is the one with the best mean over the prompt files, each measured in turns with plain decoding. Results are
    kept in RUN/bench, checkpoint by checkpoint, and not measured again with the same settings. There, too, are
    checkpoints.json and checkpoints.svg: training metrics, accept length and speedup on one time axis.
    """
    params = sampling_params(sampling)
    if tree is not None:
        read_tree(tree)
    check_output(output_)
    check_device(runtime.device)
    if model is not None:
        check_target(model, runtime)
    from eyas.bench.ledger import Ledger
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.candidates import choose
    from eyas.bench.offline.checkpoints import CheckpointReport, TrainingRun
    from eyas.bench.offline.drafters import DrafterBench
    from eyas.bench.offline.runner import Plan, read_tasks
    from eyas.bench.report.figures import checkpoint_figure
    from eyas.errors import DataError
    from eyas.files import copy_folder, file_hash, write_bytes, write_json
    from eyas.targets import load_tokenizer
    from eyas.targets.fingerprint import fingerprint

    trained = TrainingRun(run)
    drafters = {checkpoint.name: checkpoint.path for checkpoint in trained.checkpoints}
    name = model or _target_of(trained)
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit)
    loaded = open_target(name, runtime)
    settings = settings_of(name, loaded, runtime, measuring, params) | {"tree": tree, "coupled": coupled is not False}
    machine = describe_machine()
    key = settings | {"target": fingerprint(loaded.model)} | {k: v for k, v in machine.items() if k != "load_average"}
    prompts = {
        task.name: file_hash(path) for task, path in zip(tasks, dict.fromkeys(measuring.prompt_file), strict=True)
    }
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
    )
    with row_bar(bench.work) as advance:
        candidates = bench.run(advance)
    errors = [error for task in tasks for error in dict.fromkeys(task.errors)]
    errors += [f"{checkpoint}: {reason}" for checkpoint, reason in bench.failures.items()]
    if not candidates:
        raise DataError("no checkpoint could be measured: " + "; ".join(errors))
    report = CheckpointReport(trained, choose(candidates, by), settings, describe_machine(), errors)
    content = report.as_dict()
    write_json(run / "bench" / "checkpoints.json", content)
    write_bytes(run / "bench" / "checkpoints.svg", checkpoint_figure(trained, content))
    write_report(content, json, output_)
    if not json:
        console = output()
        console.print(report.table())
        console.print(f"Pick: {report.choice.reason}")
    if write:
        copy_folder(drafters[report.choice.best.name], run / "pick")
        note(f"copied {report.choice.best.name} to {run / 'pick'}")
    return finish(report.machine, errors)


def _target_of(run: TrainingRun) -> str:
    target = run.recipe.get("target")
    if not isinstance(target, str):
        raise UsageError(f"{run.path / 'config.yaml'} names no target: give --model")
    return target
