"""`eyas bench serve`: servers under load, side by side."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from eyas.cli.common.build import sampling_params
from eyas.cli.common.display import note, output, row_bar
from eyas.cli.common.measuring import check_output, finish, numbers, whole_numbers, write_report
from eyas.cli.common.options import Json, Limit, PromptFiles, ReportFile, SamplingOptions
from eyas.errors import UsageError
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.bench.serving.client import Load
    from eyas.bench.serving.report import ServeReport
    from eyas.bench.serving.servers import ServerProcess, Side


@dataclass(frozen=True)
class SideOptions:
    """The servers that are compared, running already or started here."""

    PANEL: ClassVar[str] = "Servers"
    side: Annotated[
        list[str],
        Option(help="NAME=URL[,speculate=false][,model=NAME]: a server that is already running; may be repeated."),
    ] = field(default_factory=list)
    endpoint: Annotated[str | None, Option(help="Another server: the same as --side endpoint=URL.")] = None
    model: Annotated[str | None, Option(help="Start servers for this target: `plain`, without a drafter.")] = None
    draft_model: Annotated[str | None, Option(help="With --model: start one with this drafter for each --tree.")] = None
    tree: Annotated[list[str], Option(help="auto, auto:chain, or a fixed tree; may be repeated (default: auto).")] = (
        field(default_factory=list)
    )
    off: Annotated[
        bool, Option("--off", help="Add a side `off`: the first server with a drafter, told not to speculate.")
    ] = False
    serve_option: Annotated[
        list[str], Option(help="An option for the command line of every server started, e.g. --dtype=bfloat16.")
    ] = field(default_factory=list)
    baseline: Annotated[str | None, Option(help="The side that others are compared with (default: the first).")] = None
    api_key: Annotated[
        str | None, Option(envvar="EYAS_API_KEY", show_envvar=True, help="API key to send to every side.")
    ] = None


@dataclass(frozen=True)
class LoadOptions:
    """How many requests are sent, and how they arrive."""

    PANEL: ClassVar[str] = "Load"
    concurrency: Annotated[str, Option(help="Concurrent clients, e.g. 1,4,16; each waits for its answer.")] = ""
    rate: Annotated[str, Option(help="Requests per second at random moments (Poisson), e.g. 0.5,2.")] = ""
    requests: Annotated[int, Option(min=1, help="Minimum requests per run.")] = 16
    per_client: Annotated[float, Option(min=1, help="Minimum requests per client, in a closed loop.")] = 2.0
    repeats: Annotated[int, Option(min=1, help="Runs of every load with every side; the median counts.")] = 3
    warmup: Annotated[int, Option(min=0, help="Uncounted requests by each client, for each load and side.")] = 1
    order_seed: Annotated[int, Option(min=0, help="Seed of the order of prompts and of arrivals.")] = 0
    timeout: Annotated[float, Option(min=1, help="Seconds for a whole answer.")] = 600.0


def serve(
    sides: SideOptions,
    loads: LoadOptions,
    sampling: SamplingOptions,
    prompt_file: PromptFiles,
    limit: Limit = None,
    tokenizer: Annotated[
        str | None, Option(help="Apply this model's chat template here and send token ids (same prompts everywhere).")
    ] = None,
    json: Json = False,
    output_: ReportFile = None,
    markdown: Annotated[bool, Option("--markdown", help="Write the table as Markdown.")] = False,
    plot: Annotated[Path | None, Option(dir_okay=False, help="Plots by load, an .svg file.")] = None,
) -> int:
    """Measure servers under load, side by side.

    Throughput, latency and accept length by load, and where speculation stops paying. Any OpenAI-compatible server can
    be a side. Give --ignore-eos for equal work: every answer is --max-new-tokens long.

    Examples:
        eyas bench serve --model MODEL --draft-model DRAFTER --prompt-file prompts.jsonl --concurrency 1,4,16
        eyas bench serve --endpoint http://localhost:8000/v1 --prompt-file prompts.jsonl --rate 2,8
    """
    import asyncio

    from eyas.bench.report.figures import check_plot

    if json and markdown:
        raise UsageError("--json and --markdown are two forms of the report: give one of them")
    params = sampling_params(sampling)
    check_output(output_)
    check_plot(plot)
    levels = _levels(loads)
    running = _running(sides)
    servers = _servers(sides)
    from eyas.bench.machine import describe_machine
    from eyas.bench.report.figures import serve_figure
    from eyas.bench.serving.client import Client, read_items
    from eyas.bench.serving.report import ServeReport, lines_of
    from eyas.bench.serving.run import ServePlan, measure_sides
    from eyas.bench.serving.servers import IdleMeter, check_names
    from eyas.files import write_bytes

    plan = ServePlan(loads.repeats, loads.requests, loads.per_client, loads.warmup, loads.order_seed)
    items = read_items(prompt_file, limit, loads.order_seed, _tokenizer(tokenizer))
    again = max(0, plan.total(levels) - len(items))
    names = [*servers, *(["off"] if sides.off else []), *(side.name for side in running)]
    baseline = sides.baseline or names[0]
    check_names(names, baseline)
    with ExitStack() as stack:
        started = {name: stack.enter_context(_starting(name, server)) for name, server in servers.items()}
        compared = [*_started(started, sides), *running]
        behind = started | ({"off": started[_speculating(sides)[0]]} if sides.off else {})
        idle = IdleMeter(behind)
        with row_bar(len(levels) * plan.repeats * len(compared)) as advance:
            connect = partial(Client, params=params, timeout=loads.timeout, api_key=sides.api_key)
            measuring = measure_sides(compared, levels, items, connect, plan, around=idle, advance=advance)
            results = asyncio.run(measuring)
    settings = {
        "sides": {side.name: side.settings() for side in compared},
        "servers": {name: server.command for name, server in servers.items()},
        "prompts": [path.name for path in prompt_file],
        "limit": limit,
        "plan": vars(plan),
        "repeated_requests": again,
        "sampling": params.model_dump(mode="json"),
    }
    report = ServeReport(baseline, lines_of(results, baseline), settings, describe_machine(), idle.shares())
    write_report(report.as_dict(), json, output_)
    if plot is not None:
        write_bytes(plot, serve_figure(report.as_dict()))
    if not json:
        _show(report, f"{len(items)} prompts", markdown)
    if again:
        note(
            f"warning: {again} of {again + len(items)} requests to a side repeat a prompt that it has answered: prefix "
            "caches and methods that learn from finished answers (suffix) gain from that; use more prompts or less load"
        )
    for name, share in report.idle.items():
        if share > 0.02:
            note(f"warning: the server {name!r} used {share:.0%} of a core while another side was measured")
    return finish(report.machine, report.errors())


def _show(report: ServeReport, title: str, markdown: bool) -> None:
    """Print the table, as Markdown if requested, and the conclusions from it."""
    from eyas.bench.serving.report import DEFINITIONS, markdown_of, table_of

    console = output()
    if markdown:
        console.print(markdown_of(report))
    else:
        show_table(console, table_of(report, title))
    for sentence in (*report.verdicts(), *DEFINITIONS):
        console.print(sentence)


def _levels(options: LoadOptions) -> list[Load]:
    if bool(options.concurrency) == bool(options.rate):
        raise UsageError("say how requests arrive: --concurrency 1,4,16 for clients at once, or --rate 0.5,2 a second")
    clients = whole_numbers(options.concurrency, "--concurrency")
    rates = numbers(options.rate, "--rate")
    from eyas.bench.serving.client import Load

    levels = [*(Load("closed", n) for n in clients), *(Load("open", r) for r in rates)]
    return list(dict.fromkeys(levels))


def _running(options: SideOptions) -> list[Side]:
    """The sides whose servers are already running."""
    from eyas.bench.serving.servers import parse_side

    running = [parse_side(text) for text in options.side]
    if options.endpoint is not None:
        running.append(parse_side(options.endpoint, "endpoint"))
    if not running and options.model is None:
        raise UsageError("no server to measure: give --side NAME=URL, --endpoint URL, or --model to start some")
    return running


def _speculating(options: SideOptions) -> list[str]:
    """The trees of the servers with a drafter, which name their sides."""
    return list(dict.fromkeys(options.tree or ["auto"])) if options.draft_model is not None else []


def _servers(options: SideOptions) -> dict[str, ServerProcess]:
    """The servers to start, by the name of their side; none is started yet."""
    from eyas.bench.serving.servers import eyas_server

    speculating = _speculating(options)
    if options.model is None and (options.draft_model is not None or options.serve_option):
        raise UsageError("--draft-model and --serve-option are about servers started here: give --model")
    if not speculating and (options.tree or options.off):
        raise UsageError("--tree and --off are about a drafter: give --draft-model")
    if options.model is None:
        return {}
    common = ["--model", options.model, *options.serve_option]
    drafting = [*common, "--draft-model", str(options.draft_model)]
    trees = {tree: eyas_server(tree, [*drafting, "--tree", tree]) for tree in speculating}
    return {"plain": eyas_server("plain", [*common, "--method", "none"]), **trees}


def _starting(name: str, server: ServerProcess) -> ServerProcess:
    """Report that a server is about to be started: loading a model and measuring costs takes a while."""
    note(f"starting the server {name!r}")
    return server


def _started(servers: dict[str, ServerProcess], options: SideOptions) -> list[Side]:
    """The sides whose servers were started here."""
    from eyas.bench.serving.servers import Side

    sides = [Side(name, server.url) for name, server in servers.items()]
    if options.off:
        sides.append(Side("off", servers[_speculating(options)[0]].url, speculate=False))
    return sides


def _tokenizer(name: str | None) -> object:
    if name is None:
        return None
    from eyas.targets import load_tokenizer

    return load_tokenizer(name)
