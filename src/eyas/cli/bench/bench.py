"""`eyas bench measure`: drafters and trees, or a server, against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from eyas.cli.bench.endpoints import (
    BASELINE,
    ENDPOINT,
    MeasuredEndpointOptions,
    check_endpoints,
    endpoint_sides,
    open_endpoints,
)
from eyas.cli.common.aliases import DRAFTER_OR_AUTO_HELP
from eyas.cli.common.build import check_tree, open_session, sampling_params
from eyas.cli.common.display import output, row_bar
from eyas.cli.common.measuring import check_output, finish, note_impossible, plan_settings, settings_of, write_report
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
from eyas.cli.common.verb import GivenOptions
from eyas.errors import UsageError
from eyas.options import EngineOptions
from eyas.tables import show_table

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.bench.offline.external import Method
    from eyas.bench.offline.runner import Plan, Task
    from eyas.drafters.options import DrafterOptions
    from eyas.engine import Engine
    from eyas.engine.controller import ControllerState
    from eyas.session import Session
    from eyas.types import SamplingParams


def bench(
    target: MaybeTargetOptions,
    files: LoadedDrafterOptions,
    sampling: SamplingOptions,
    measuring: MeasureOptions,
    servers: MeasuredEndpointOptions,
    given: GivenOptions,
    draft_model: Annotated[list[str], Option(help=f"A drafter: {DRAFTER_OR_AUTO_HELP}; may be repeated.")] = [],  # noqa: B006
    method: Annotated[
        list[str],
        Option(
            help="ngram, suffix, lookahead, mtp: draft without a drafter; else the kind that the drafter must be, or "
            "with a lookup as in eagle3+suffix or +suffix; may be repeated (default: what each drafter is)."
        ),
    ] = [],  # noqa: B006
    tree: Trees = [],  # noqa: B006  # typer copies defaults
    coupled: Coupled = None,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Measure drafters and trees, or a server, and plain decoding.

    Every prompt of every prompt file is decoded plain and by every drafter with every tree, interleaved; with
    --endpoint, by a server. See also: `eyas bench methods` compares drafting methods, `eyas bench accuracy` scores
    answers and compares them with plain decoding's, `eyas bench checkpoints` picks the best checkpoint of a run,
    `eyas bench trees` the best draft tree of a drafter, `eyas bench serve` measures servers under load,
    `eyas bench report` writes a page about a run.

    Examples:
        eyas bench --model MODEL --draft-model DRAFTER --prompt-file prompts.jsonl
        eyas bench FILE.gguf --draft-model DRAFTER --tree chain:3 --tree auto --prompt-file prompts.jsonl
    """
    if not draft_model and not method and (tree or coupled is not None or files != LoadedDrafterOptions()):
        raise UsageError(
            "--tree, --coupled and how a drafter is loaded are about drafting: give --draft-model or --method"
        )
    check_endpoints(servers, target.model, given)
    params = sampling_params(sampling)
    check_output(output_)
    for text in tree:
        check_tree(text)
    loading = None if target.model is None else target.of(target.model)
    if loading is not None:
        loading.check()
    drafters = _drafters(files, draft_model, method)
    for each in drafters.values():
        each.check()
    from eyas.bench.offline.runner import Plan, read_tasks

    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    engines: dict[str, Engine] = {}
    settings = plan_settings(measuring, params)
    what = f"batch {measuring.batch_size}"
    if loading is not None:
        session = open_session(loading)
        shared = EngineOptions(coupled=coupled is not False, batch_size=measuring.batch_size)
        engines = _engines(session, drafters, tree, shared)
        settings = settings_of(loading, session.target, measuring, params)
        settings |= {"drafters": draft_model, "methods": method, "coupled": shared.coupled}
        settings |= {name: value for name, value in vars(files).items() if name in _RUN_OPTIONS and value is not None}
        what = f"{target.model}, {settings['weights']}, {what}"
    plan = Plan(measuring.repeats, measuring.warmup)
    if servers.endpoint is not None:
        report, table = measure_endpoints(servers, engines, tasks, params, plan, settings, what)
    else:
        report, table = _measure_engines(engines, tasks, params, plan, settings, what)
    snapshots = {name: one.controller.snapshot() for name, one in engines.items() if one.controller is not None}
    if snapshots:
        report["settings"] |= {"chosen": {name: vars(state) for name, state in snapshots.items()}}
    write_report(report, json, output_)
    if not json:
        console = output()
        show_table(console, table)
        for line in (*report["definitions"], *(_mean_shape(name, state) for name, state in snapshots.items())):
            console.print(line)
    return finish(report["machine"], report["errors"])


def _drafters(files: LoadedDrafterOptions, sources: Sequence[str], methods: Sequence[str]) -> dict[str, DrafterOptions]:
    """What drafts, by name: every drafter as it is, or with each of the methods. Raises UsageError."""
    from eyas.bench.offline.methods import named_choices, unused_drafters

    if not methods:
        return {source: files.of(source) for source in sources}
    named = {Path(source).name: source for source in sources}
    choices = named_choices(methods, named)
    if unused := unused_drafters(choices, named):
        raise UsageError(
            f"--draft-model {named[unused[0]]}: no --method uses it; add --method {unused[0]}, or leave it out"
        )
    return {choice.name: files.of(choice.source, choice.method) for choice in choices}


_RUN_OPTIONS = ("draft_window", "draft_quantize")
"""Options for how a drafter runs; a report names those that are given."""


def _engines(
    session: Session, drafters: Mapping[str, DrafterOptions], trees: Sequence[str], options: EngineOptions
) -> dict[str, Engine]:
    """Plain decoding, and every drafter with every tree; with several drafters, a name has both."""
    from eyas.bench.offline.methods import engines_for
    from eyas.bench.offline.runner import PLAIN

    drafted = engines_for(session, {name: session.drafter(each) for name, each in drafters.items()}, trees, options)
    named = {text if len(drafters) == 1 else f"{name} {text}": one for (name, text), one in drafted.items()}
    return {PLAIN: session.engine(None, options)} | named


def _measure_engines(
    engines: Mapping[str, Engine],
    tasks: Sequence[Task],
    params: SamplingParams,
    plan: Plan,
    settings: Mapping[str, Any],
    what: str,
) -> tuple[dict[str, Any], Table]:
    """Measure the engines of this process: the report and its table."""
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.report import DEFINITIONS, document, lines_of, means, table_of
    from eyas.bench.offline.runner import measure

    results = {}
    with row_bar(sum(len(task.groups) for task in tasks) * plan.repeats * len(engines)) as advance:
        for task in tasks:
            results[task.name] = measure(task, engines, params, plan, advance)
    lines = [line for name, measured in results.items() for line in lines_of(name, measured)]
    note_impossible(lines)
    counts = {task: {name: one.stats.as_dict() for name, one in found.items()} for task, found in results.items()}
    errors = [error for task in tasks for error in task.errors]
    report = document(describe_machine(), settings, DEFINITIONS, lines, counts, errors)
    return report, table_of([*lines, *means(lines)], what)


def _mean_shape(name: str, state: ControllerState) -> str:
    plain = state.plain_rounds / max(1, state.rounds)
    return (
        f"{name} chose on average: depth {state.mean_depth:.1f}, width {state.mean_width:.1f}, "
        f"{state.mean_nodes:.1f} nodes per round; {plain:.0%} of the rounds plain"
    )


def measure_endpoints(
    options: MeasuredEndpointOptions,
    engines: Mapping[str, Engine],
    tasks: Sequence[Task],
    params: SamplingParams,
    plan: Plan,
    settings: Mapping[str, Any],
    what: str,
) -> tuple[dict[str, Any], Table]:
    """Measure the server, its baseline and the engines here: the report and its table. Raises EndpointError."""
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.external import (
        DEFINITIONS,
        external_errors,
        external_lines,
        measure_external,
        run_engine_as_client,
    )
    from eyas.bench.offline.report import document, means, table_of
    from eyas.bench.offline.runner import PLAIN
    from eyas.targets import load_tokenizer

    sides = endpoint_sides(options)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    if tokenizer is None and engines:
        tokenizer = engines[PLAIN].tokenizer
    baseline = PLAIN if engines else next((name for name in sides if name == BASELINE), None)
    results = {}
    with open_endpoints(options, sides, params, tokenizer) as servers:
        methods: dict[str, Method] = {
            name: partial(run_engine_as_client, one, params=params) for name, one in engines.items()
        }
        methods |= {name: server.run for name, server in servers.items()}
        with row_bar(sum(len(task.groups) for task in tasks) * plan.repeats * len(methods)) as advance:
            for task in tasks:
                results[task.name] = measure_external(task, methods, baseline, plan, advance)
        sent = {name: server.sends_ids for name, server in servers.items()}
    lines = [line for task, found in results.items() for line in external_lines(task, found, baseline)]
    kept = {**settings, "baseline": baseline, "token_ids": sent}
    kept |= {"servers": {name: side.settings() for name, side in sides.items()}}
    counts = {task: {name: one.as_dict() for name, one in found.items()} for task, found in results.items()}
    errors = [*(error for task in tasks for error in task.errors), *external_errors(results)]
    report = document(describe_machine(), kept, DEFINITIONS, lines, counts, errors)
    return report, table_of([*lines, *means(lines)], f"{sides[ENDPOINT].url}, {what}")
