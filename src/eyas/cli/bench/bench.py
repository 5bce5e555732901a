"""`eyas bench measure`: drafters and trees, or a server, against plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from eyas.cli.bench.endpoint import MeasuredEndpointOptions, check_endpoints, measure_endpoints
from eyas.cli.common.build import check_drafter, check_target, check_tree, open_target, sampling_params
from eyas.cli.common.display import output, row_bar, show_table
from eyas.cli.common.measuring import (
    check_output,
    engines_for,
    finish,
    note_impossible,
    plan_settings,
    settings_of,
    write_report,
)
from eyas.cli.common.options import (
    Coupled,
    Json,
    LoadedDrafterOptions,
    MaybeTargetOptions,
    MeasureOptions,
    ReportFile,
    SamplingOptions,
    Trees,
)
from eyas.cli.common.verb import Given
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.engine.controller import ControllerState


def bench(
    target: MaybeTargetOptions,
    files: LoadedDrafterOptions,
    sampling: SamplingOptions,
    measuring: MeasureOptions,
    servers: MeasuredEndpointOptions,
    given: Given,
    draft_model: Annotated[list[str], Option(help="A drafter; may be repeated.")] = [],  # noqa: B006
    tree: Trees = [],  # noqa: B006  # typer copies defaults
    coupled: Coupled = None,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Measure drafters and trees, or a server, and plain decoding.

    Every prompt of every prompt file is decoded plain and by every drafter with every tree, in turns; with --endpoint,
    by a server. See also: `eyas bench methods` compares methods of drafting, `eyas bench accuracy` scores answers and
    compares them with plain decoding's, `eyas bench checkpoints` picks the best checkpoint of a run, `eyas bench trees`
    the best draft tree of a drafter, `eyas bench serve` measures servers under load, `eyas bench report` writes a page
    about a run.
    """
    if not draft_model and (tree or coupled is not None or files != LoadedDrafterOptions()):
        raise UsageError("--tree, --coupled and how a drafter is loaded are about drafting: give --draft-model")
    check_endpoints(servers, target.model, given)
    params = sampling_params(sampling)
    check_output(output_)
    for text in tree:
        check_tree(text)
    if target.model is not None:
        check_target(target.model, target)
    for name in draft_model:
        check_drafter(name, files)
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.report import lines_of, means, report_dict, table_of
    from eyas.bench.offline.runner import PLAIN, Plan, measure, read_tasks
    from eyas.drafters.loading import open_drafter
    from eyas.engine import Engine
    from eyas.targets import load_tokenizer

    batch_size = measuring.batch_size
    tasks = read_tasks(measuring.prompt_file, batch_size, measuring.limit)
    engines: dict[str, Engine] = {}
    settings, what = plan_settings(measuring, params), f"batch {batch_size}"
    if target.model is not None:
        loaded = open_target(target.model, target)
        tokenizer = load_tokenizer(target.model)
        drafters = {
            name: open_drafter(
                name,
                loaded,
                weights=files.draft_weights,
                ignore_config_keys=files.ignore_config_key,
                tokenizer=tokenizer,
                window=files.draft_window,
                quantize=files.draft_quantize,
            )
            for name in draft_model
        }
        drafted = engines_for(loaded, tokenizer, drafters, tree, coupled is not False, batch_size)
        engines = {PLAIN: Engine(loaded, tokenizer, batch_size=batch_size)}
        engines |= {text if len(drafters) == 1 else f"{name} {text}": one for (name, text), one in drafted.items()}
        settings = settings_of(target.model, loaded, target, measuring, params)
        settings |= {"drafters": draft_model, "coupled": coupled is not False}
        settings |= {} if files.draft_window is None else {"draft_window": files.draft_window}
        settings |= {} if files.draft_quantize is None else {"draft_quantize": files.draft_quantize}
        what = f"{target.model}, {settings['dtype']}, {what}"
    plan = Plan(measuring.repeats, measuring.warmup)
    if servers.endpoint is not None:
        report, table = measure_endpoints(servers, engines, tasks, params, plan, settings, what)
    else:
        results = {}
        with row_bar(sum(len(task.groups) for task in tasks) * plan.repeats * len(engines)) as advance:
            for task in tasks:
                results[task.name] = measure(task, engines, params, plan, advance)
        lines = [line for name, measured in results.items() for line in lines_of(name, measured)]
        table = table_of([*lines, *means(lines)], what)
        errors = [error for task in tasks for error in task.errors]
        report = report_dict(describe_machine(), settings, results, errors)
    snapshots = {name: one.controller.snapshot() for name, one in engines.items() if one.controller is not None}
    if snapshots:
        report["settings"] |= {"chosen": {name: vars(state) for name, state in snapshots.items()}}
    write_report(report, json, output_)
    if servers.endpoint is None:
        note_impossible(lines)
    if not json:
        console = output()
        show_table(console, table)
        for line in (*report["definitions"], *(_mean_shape(name, state) for name, state in snapshots.items())):
            console.print(line)
    return finish(report["machine"], report["errors"])


def _mean_shape(name: str, state: ControllerState) -> str:
    plain = state.plain_rounds / max(1, state.rounds)
    return (
        f"{name} chose on average: depth {state.mean_depth:.1f}, width {state.mean_width:.1f}, "
        f"{state.mean_nodes:.1f} nodes a round; {plain:.0%} of the rounds plain"
    )
