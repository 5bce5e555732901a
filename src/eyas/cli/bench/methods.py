"""`eyas bench methods`: every method of drafting that can run for a target, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from eyas.cli.common.build import check_tree, open_session, sampling_params
from eyas.cli.common.display import next_step, note, output, row_bar
from eyas.cli.common.measuring import (
    check_output,
    finish,
    note_impossible,
    prompt_options,
    read_temperatures,
    settings_of,
    within,
    write_report,
)
from eyas.cli.common.options import (
    Coupled,
    Json,
    LoadedDrafterOptions,
    MaxNewTokens,
    MeasureOptions,
    Minutes,
    ReportFile,
    SamplingOptions,
    TargetPanel,
    as_arguments,
)
from eyas.drafters.options import read_method
from eyas.errors import UsageError
from eyas.options import EngineOptions
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.bench.offline.methods import MethodChoice, MethodOpener, OpenedMethod, Skipped
    from eyas.bench.offline.report import MethodComparison
    from eyas.bench.offline.runner import MethodResult, Plan, Task
    from eyas.types import SamplingParams


def methods(
    target: TargetPanel,
    files: LoadedDrafterOptions,
    measuring: MeasureOptions,
    method: Annotated[
        list[str],
        Option(
            help="A method without weights, a drafter's name or kind, or two as A+B; may be repeated (default: all)."
        ),
    ] = [],  # noqa: B006  # typer copies defaults
    draft_model: Annotated[
        list[str], Option(help="A drafter, or NAME=PATH to name it (default: its folder's name); may be repeated.")
    ] = [],  # noqa: B006
    preset: Annotated[
        Literal["seeds"] | None,
        Option(help="seeds: each method of EAGLE's own comparisons, with the tree that its paper uses."),
    ] = None,
    tree: Annotated[
        list[str],
        Option(help="A tree for all, or NAME=TREE for one method; may be repeated (default: a fixed one, and auto)."),
    ] = [],  # noqa: B006
    temperature: Annotated[str, Option(help="Comma-separated; every method runs at each.")] = "0",
    max_new_tokens: MaxNewTokens = 256,
    seed: Annotated[int, Option(help="The same seed gives the same output with every method.")] = 0,
    frequency_penalty: Annotated[
        float, Option(help="Keeps small models from repeating one phrase, which is easy to draft.")
    ] = 0.0,
    minutes: Minutes = None,
    coupled: Coupled = None,
    transformers: Annotated[
        bool, Option("--transformers", help="Measure transformers.generate as well, at temperature 0.")
    ] = False,
    plot: Annotated[Path | None, Option(dir_okay=False, help="Plot of the figures, an .svg file.")] = None,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Compare drafting methods on one target.

    First it says which methods can't run and why. All others and plain decoding answer every prompt of every file at
    every temperature, interleaved, with the same counter; every answer is compared with plain decoding's. Each method
    runs with a tree of one size (its own, or a chain) and, as `NAME auto`, with trees that are as large as pays off.

    Examples:
        eyas bench methods MODEL --draft-model DRAFTER --prompt-file prompts.jsonl
        eyas bench methods FILE.gguf --method ngram --method suffix --prompt-file prompts.jsonl --temperature 0,1
    """
    from eyas.bench.report.figures import check_plot, methods_figure
    from eyas.files import write_bytes

    heats = read_temperatures(temperature, "--temperature")
    params = sampling_params(
        SamplingOptions(max_new_tokens=max_new_tokens, seed=seed, frequency_penalty=frequency_penalty)
    )
    check_output(output_)
    check_plot(plot)
    drafters = dict(_named_path(text) for text in draft_model)
    if len(drafters) != len(draft_model):
        raise UsageError("two drafters have the same name: give them as NAME=PATH")
    if transformers and (0.0 not in heats or frequency_penalty):
        raise UsageError("--transformers measures greedy answers: it needs --temperature 0 and no --frequency-penalty")
    if preset is not None and method:
        raise UsageError(f"--preset {preset} says which methods: leave out --method")
    for name in method:
        if name != "none" and name.partition("+")[0] not in drafters:
            read_method(name)
    trees = dict(_named_tree(text) for text in tree)
    loading = target.of(target.model)
    loading.check()
    for source in drafters.values():
        files.of(source).check()
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.methods import MethodOpener, unused_drafters
    from eyas.bench.offline.report import MethodComparison
    from eyas.bench.offline.runner import Plan, read_tasks

    choices, skipped = _choices(method, preset, drafters, trees)
    if unused := unused_drafters(choices, drafters):
        given = "no --method" if preset is None else f"no method of the preset {preset}"
        advice = f"add --method {unused[0]}" if preset is None else "give it as NAME=PATH with the name of one"
        raise UsageError(f"--draft-model {drafters[unused[0]]}: {given} uses {unused[0]}; {advice}, or leave it out")
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    session = open_session(loading, modules=transformers)
    options = EngineOptions(coupled=coupled is not False, batch_size=measuring.batch_size)
    opener = MethodOpener(session, options, files.of(None))
    opened, failed = opener.open(choices, compare_auto=preset is None)
    skipped += failed
    _report_missing(opened, skipped, everything=not method and preset is None)
    each = (len(opened) + 1) * len(heats) * len(tasks)
    plain = partial(session.engine, None, options)
    measuring, _ = within(minutes, measuring, plain, params, tasks, lambda size: each * size.groups * size.repeats)
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit, measuring.by_category)
    plan = Plan(measuring.repeats, measuring.warmup)
    sampled = {heat: params.model_copy(update={"temperature": heat}) for heat in heats}
    results = _measure(opener, opened, tasks, sampled, plan, transformers)
    errors = list(dict.fromkeys(error for task in tasks for error in task.errors))
    settings = settings_of(loading, session.target, measuring, params)
    settings |= {"drafters": [*drafters.values()], "temperatures": heats, "preset": preset, "coupled": options.coupled}
    samples = _samples(session.tokenizer, tasks, {task.name: results[heats[0], task.name] for task in tasks})
    comparison = MethodComparison(opened, skipped, results, settings, describe_machine(), errors, samples)
    write_report(comparison.as_dict(), json, output_)
    if plot is not None:
        write_bytes(plot, methods_figure(comparison.as_dict()))
    note_impossible(one.line for one in comparison.lines)
    if not json:
        _show(comparison, f"{target.model}, {settings['weights']}, batch {measuring.batch_size}")
    code = finish(comparison.machine, errors)
    runs = [*as_arguments(target), *as_arguments(files)]
    if any(one.wrong is not None for one in comparison.standings):
        asked = [("--method", name) for name in method] + [("--draft-model", text) for text in draft_model]
        asked += [("--tree", text) for text in tree]
        again = [word for pair in asked for word in pair]
        repeats = ("--repeats", 2 * measuring.repeats)
        next_step("bench", "methods", target.model, *runs, *again, *prompt_options(measuring), *repeats)
    elif not errors:
        next_step("serve", target.model, *runs, *comparison.serve_options)
    return code


def _choices(
    methods: Sequence[str], preset: str | None, drafters: Mapping[str, str], trees: Mapping[str | None, str]
) -> tuple[list[MethodChoice], list[Skipped]]:
    """The requested methods with their trees, and the methods of a preset that lack a drafter."""
    from eyas.bench.offline.methods import all_choices, named_choices, preset_choices, with_trees

    skipped: list[Skipped] = []
    if preset is not None:
        choices, skipped = preset_choices(preset, drafters)
    else:
        choices = named_choices(methods, drafters) if methods else all_choices(drafters)
    return with_trees(choices, trees), skipped


def _report_missing(opened: Sequence[OpenedMethod], skipped: Sequence[Skipped], everything: bool) -> None:
    """Name the methods that can't run and, if `everything` was requested, those without a drafter.

    Raises UsageError if none is left.
    """
    from eyas.bench.offline.methods import without_drafter

    for name, reason in skipped:
        note(f"can't run {name}: {reason}")
    if everything and (others := without_drafter(opened)):
        note(f"not compared, because no drafter of the kind is given (--draft-model): {', '.join(others)}")
    if not opened:
        raise UsageError("none of these methods can run here: there is nothing to compare with plain decoding")


def _measure(
    opener: MethodOpener,
    opened: Sequence[OpenedMethod],
    tasks: Sequence[Task],
    sampled: Mapping[float, SamplingParams],
    plan: Plan,
    transformers: bool,
) -> dict[tuple[float, str], dict[str, MethodResult]]:
    """Measure every method on every task at every temperature, interleaved with plain decoding."""
    from eyas.bench.offline.external import TransformersBaseline
    from eyas.bench.offline.runner import PLAIN, answerer, measure_answerers

    engines = opener.plain() | {one.choice.name: one.engine for one in opened}
    baseline = TransformersBaseline(str(opener.session.model), engines[PLAIN]) if transformers else None
    results = {}
    runs = len(sampled) * len(engines) + transformers
    with row_bar(sum(len(task.groups) for task in tasks) * plan.repeats * runs) as advance:
        for heat, params in sampled.items():
            for task in tasks:
                answering = {name: answerer(engine, params) for name, engine in engines.items()}
                if baseline is not None and heat == 0.0:
                    answering["transformers"] = partial(baseline.run_group, params=params)
                results[heat, task.name] = measure_answerers(task, answering, plan, advance)
                for one in opened:
                    one.measure_memory(opener.session.target)
    return results


def _samples(
    tokenizer: Any, tasks: Sequence[Task], results: Mapping[str, Mapping[str, MethodResult]]
) -> list[dict[str, str | None]]:
    """Plain decoding's answer to the first prompt of every task."""
    from eyas.bench.offline.runner import PLAIN
    from eyas.text.prompts import question_of

    first = {task.name: results[task.name][PLAIN].sample for task in tasks}
    return [
        {
            "task": task.name,
            "prompt": question_of(task.groups[0][0], tokenizer),
            "answer": tokenizer.decode(first[task.name], skip_special_tokens=True),
        }
        for task in tasks
        if first[task.name]
    ]


def _show(comparison: MethodComparison, title: str) -> None:
    """Print the tables, the definitions of their figures, and the verdict."""
    from eyas.bench.offline.report import COMPARISON

    console = output()
    show_table(console, comparison.table(title))
    show_table(console, comparison.costs())
    for line in (*COMPARISON, comparison.equality, comparison.verdict):
        console.print(line)


def _named_path(text: str) -> tuple[str, str]:
    """A drafter's name and path, from `NAME=PATH`, or from `PATH`, whose folder then gives the name."""
    name, equals, path = text.partition("=")
    if not equals:
        return Path(text).name, text
    if not name or not path:
        raise UsageError(f"--draft-model {text}: write NAME=PATH, or the path alone")
    return name, path


def _named_tree(text: str) -> tuple[str | None, str]:
    """A method's name (None = all) and its tree, from `NAME=TREE` or `TREE`."""
    name, equals, tree = text.rpartition("=")
    check_tree(tree)
    return (name if equals else None), tree
