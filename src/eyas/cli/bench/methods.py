"""`eyas bench methods`: every method of drafting that can run for a target, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from eyas.cli.common.build import check_target, check_tree, open_target, sampling_params
from eyas.cli.common.display import next_step, note, output, row_bar, show_table
from eyas.cli.common.measuring import (
    check_output,
    finish,
    note_impossible,
    read_temperatures,
    settings_of,
    write_report,
)
from eyas.cli.common.options import (
    Coupled,
    Json,
    MaxNewTokens,
    MeasureOptions,
    ReportFile,
    SamplingOptions,
    TargetOptions,
)
from eyas.drafters.methods import read_method
from eyas.errors import UsageError


def methods(
    target: TargetOptions,
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
        list[str], Option(help="The trees of all, or NAME=TREE of one method; may be repeated (default: their own).")
    ] = [],  # noqa: B006
    temperature: Annotated[str, Option(help="Comma-separated; every method at each.")] = "0",
    max_new_tokens: MaxNewTokens = 256,
    seed: Annotated[int, Option(help="The same seed gives the same output, whatever drafts.")] = 0,
    frequency_penalty: Annotated[
        float, Option(help="Keeps small models from repeating one phrase, which is easy to draft.")
    ] = 0.0,
    ignore_config_key: Annotated[
        list[str], Option(help="A key of the drafters' config.json to ignore; may be repeated.")
    ] = [],  # noqa: B006
    coupled: Coupled = None,
    transformers: Annotated[
        bool, Option("--transformers", help="Measure transformers.generate as well, at temperature 0.")
    ] = False,
    plot: Annotated[Path | None, Option(dir_okay=False, help="The figures as a plot, an .svg file.")] = None,
    json: Json = False,
    output_: ReportFile = None,
) -> int:
    """Compare methods of drafting on one target.

    First it says which methods can't run and why. All others and plain decoding answer every prompt of every file at
    every temperature, in turns, under one counter; every answer is compared with plain decoding's.
    """
    from eyas.bench.report.figures import check_plot

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
        if name.partition("+")[0] not in drafters:
            read_method(name)
    trees = dict(_named_tree(text) for text in tree)
    check_target(target.model, target)
    from eyas.bench.machine import describe_machine
    from eyas.bench.offline.external import TransformersBaseline
    from eyas.bench.offline.methods import (
        MethodOpener,
        all_choices,
        named_choices,
        preset_choices,
        with_trees,
        without_drafter,
    )
    from eyas.bench.offline.report import COMPARISON, MethodComparison
    from eyas.bench.offline.runner import PLAIN, Plan, answerer, measure_answerers, read_tasks
    from eyas.bench.report.figures import methods_figure
    from eyas.files import write_bytes
    from eyas.targets import load_tokenizer
    from eyas.tree import is_auto

    if preset is not None:
        choices, skipped = preset_choices(preset, drafters)
    elif method:
        choices, skipped = named_choices(method, drafters), []
    else:
        choices, skipped = all_choices(drafters), []
    choices = with_trees(choices, trees)
    tasks = read_tasks(measuring.prompt_file, measuring.batch_size, measuring.limit)
    loaded = open_target(target.model, target, modules=transformers)
    opener = MethodOpener(
        loaded, target.model, load_tokenizer(target.model), measuring.batch_size, coupled is not False,
        ignore_config_key,
    )  # fmt: skip
    opened, failed = opener.open(choices)
    skipped += failed
    for name, reason in skipped:
        note(f"can't run {name}: {reason}")
    if not method and preset is None and (others := without_drafter(opened)):
        note(f"not compared, as no drafter of the kind is given (--draft-model): {', '.join(others)}")
    if not opened:
        raise UsageError("none of these methods can run here: there is nothing to compare with plain decoding")
    engines = opener.plain() | {one.choice.name: one.engine for one in opened}
    baseline = TransformersBaseline(target.model, engines[PLAIN]) if transformers else None
    plan = Plan(measuring.repeats, measuring.warmup)
    results = {}
    runs = len(heats) * len(engines) + transformers
    with row_bar(sum(len(task.groups) for task in tasks) * plan.repeats * runs) as advance:
        for heat in heats:
            for task in tasks:
                at = params.model_copy(update={"temperature": heat})
                answering = {name: answerer(engine, at) for name, engine in engines.items()}
                if baseline is not None and heat == 0.0:
                    answering["transformers"] = partial(baseline.run_group, params=at)
                results[heat, task.name] = measure_answerers(task, answering, plan, advance)
                for one in opened:
                    one.weigh(loaded)
    errors = list(dict.fromkeys(error for task in tasks for error in task.errors))
    settings = settings_of(target.model, loaded, target, measuring, params)
    settings |= {"temperatures": heats, "preset": preset, "coupled": coupled is not False}
    samples = [
        {
            "task": task.name,
            "prompt": task.groups[0][0].said,
            "answer": opener.tokenizer.decode(results[heats[0], task.name][PLAIN].sample, skip_special_tokens=True),
        }
        for task in tasks
        if results[heats[0], task.name][PLAIN].sample
    ]
    comparison = MethodComparison(opened, skipped, results, settings, describe_machine(), errors, samples)
    content = comparison.as_dict()
    write_report(content, json, output_)
    if plot is not None:
        write_bytes(plot, methods_figure(content))
    note_impossible(one.line for one in comparison.lines)
    if not json:
        console = output()
        show_table(console, comparison.table(f"{target.model}, {settings['dtype']}, batch {measuring.batch_size}"))
        show_table(console, comparison.costs())
        for line in (*COMPARISON, comparison.equality):
            console.print(line)
        console.print(comparison.verdict)
    code = finish(comparison.machine, errors)
    if not errors:
        best = comparison.to_serve
        if best is not None and not is_auto(best.tree):
            note(f"measured with --tree {best.tree}; a server sizes trees by its load: --tree auto measures that")
        next_step("serve", target.model, *comparison.fastest_options)
    return code


def _named_path(text: str) -> tuple[str, str]:
    """The name and the files of a drafter, from `NAME=PATH` or `PATH`, whose folder's name it then is."""
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
