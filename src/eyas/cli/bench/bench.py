"""`eyas bench measure`: drafters and trees, or a server, against plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from eyas.cli.bench.endpoint import MeasuredEndpointOptions, check_endpoints, measure_endpoints
from eyas.cli.common.build import check_drafter, check_target, check_tree, open_target, sampling_params
from eyas.cli.common.display import output, row_bar
from eyas.cli.common.measuring import check_output, finish, plan_settings, settings_of, write_report
from eyas.cli.common.options import (
    Coupled,
    DrafterFileOptions,
    Json,
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
    from eyas.targets import Target
    from eyas.tree import TreeSpec


def bench(
    target: MaybeTargetOptions,
    files: DrafterFileOptions,
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
    by a server. See also: `eyas bench checkpoints` picks the best checkpoint of a run, `eyas bench trees` the best
    draft tree of a drafter, `eyas bench serve` measures servers under load, `eyas bench report` writes a page about a
    run.
    """
    if not draft_model and (tree or coupled is not None):
        raise UsageError("--tree and --coupled are about drafting: give --draft-model")
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
    from eyas.bench.offline.runner import Plan, measure, read_tasks
    from eyas.tree import is_auto, parse_tree

    specs = {text: None if is_auto(text) else parse_tree(text) for text in tree}
    batch_size = measuring.batch_size
    tasks = read_tasks(measuring.prompt_file, batch_size, measuring.limit)
    engines, settings, what = {}, plan_settings(measuring, params), f"batch {batch_size}"
    if target.model is not None:
        loaded = open_target(target.model, target)
        engines = _engines(loaded, target.model, draft_model, specs, files, coupled is not False, batch_size)
        settings = settings_of(target.model, loaded, target, measuring, params)
        settings |= {"drafters": draft_model, "coupled": coupled is not False}
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
    if not json:
        console = output()
        console.print(table)
        for line in (*report["definitions"], *(_mean_shape(name, state) for name, state in snapshots.items())):
            console.print(line)
    return finish(report["machine"], report["errors"])


def _engines(
    target: Target,
    model: str,
    drafters: list[str],
    specs: dict[str, TreeSpec | None],
    files: DrafterFileOptions,
    coupled: bool,
    batch_size: int,
) -> dict[str, Engine]:
    """An engine for plain decoding and for every drafter with every tree, on one target; a None tree is automatic."""
    from eyas.bench.offline.runner import PLAIN
    from eyas.drafters.loading import load_drafter
    from eyas.engine import Engine, Speculation
    from eyas.engine.controller import costs_for, make_controller
    from eyas.engine.load import default_tree, tree_for
    from eyas.targets import load_tokenizer
    from eyas.tree import parse_tree

    tokenizer = load_tokenizer(model)
    engines = {PLAIN: Engine(target, tokenizer, batch_size=batch_size)}
    for name in drafters:
        drafter = load_drafter(name, target, weights=files.draft_weights, ignore_config_keys=files.ignore_config_key)
        own, costs = default_tree(drafter), None
        for text, spec in (specs or {own: parse_tree(own)}).items():
            label = text if len(drafters) == 1 else f"{name} {text}"
            tree, controller = None, None
            if spec is None:
                costs = costs or costs_for(target, drafter, batch_size)
                controller = make_controller(target, drafter, text, batch_size, costs)
            else:
                tree = tree_for(drafter, spec)
            speculation = Speculation(drafter, tree, coupled)
            engines[label] = Engine(target, tokenizer, speculation, batch_size=batch_size, controller=controller)
    return engines


def _mean_shape(name: str, state: ControllerState) -> str:
    plain = state.plain_rounds / max(1, state.rounds)
    return (
        f"{name} chose on average: depth {state.mean_depth:.1f}, width {state.mean_width:.1f}, "
        f"{state.mean_nodes:.1f} nodes a round; {plain:.0%} of the rounds plain"
    )
