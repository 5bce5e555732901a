"""`eyas bench`: methods against plain decoding, interleaved."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from eyas.cli.build import open_target, sampling_params
from eyas.cli.display import note, output, row_bar
from eyas.cli.guard import FAILURE
from eyas.cli.options import (
    BatchSize,
    Coupled,
    DrafterFileOptions,
    Limit,
    SamplingOptions,
    TargetOptions,
    Trees,
)

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.target import Target
    from eyas.tree import TreeSpec


def bench(
    target: TargetOptions,
    files: DrafterFileOptions,
    sampling: SamplingOptions,
    prompt_file: Annotated[list[Path], Option(exists=True, dir_okay=False, help="JSON Lines; may be repeated.")],
    draft_model: Annotated[list[str], Option(help="A drafter; may be repeated.")] = [],  # noqa: B006
    tree: Trees = [],  # noqa: B006  # typer copies defaults
    coupled: Coupled = None,
    repeats: Annotated[int, Option(min=1, help="Runs of every prompt with every method; the median counts.")] = 3,
    warmup: Annotated[int, Option(min=0, help="Uncounted runs of a file's first prompt with every method.")] = 1,
    batch_size: BatchSize = 1,
    limit: Limit = None,
    json: Annotated[Path | None, Option("--json", dir_okay=False, help="Write everything to this file.")] = None,
) -> int:
    """Measure plain decoding, and every drafter with every tree, on every prompt file."""
    from eyas.bench.machine import describe_machine
    from eyas.bench.report import DEFINITIONS, lines_of, means, report_dict, table_of
    from eyas.bench.runner import Plan, measure
    from eyas.bench.tasks import read_tasks
    from eyas.errors import UsageError
    from eyas.tree import parse_tree

    if not draft_model and (tree or coupled is not None):
        raise UsageError("--tree and --coupled are about drafting: give --draft-model")
    params = sampling_params(sampling)
    specs = {text: parse_tree(text) for text in tree}
    if json is not None and not json.parent.is_dir():
        raise UsageError(f"--json {json}: there is no directory {json.parent} to write it to; make it first")
    tasks = read_tasks(prompt_file, batch_size, limit)
    loaded = open_target(target.model, target)
    engines = _engines(loaded, target.model, draft_model, specs, files, coupled is not False, batch_size)
    plan = Plan(repeats, warmup)
    results = {}
    with row_bar(sum(len(task.groups) for task in tasks) * repeats * len(engines)) as advance:
        for task in tasks:
            results[task.name] = measure(task, engines, params, plan, advance)
    lines = [line for name, measured in results.items() for line in lines_of(name, measured)]
    errors = [error for task in tasks for error in task.errors]
    console = output()
    console.print(table_of([*lines, *means(lines)], f"{target.model}, {target.dtype}, batch {batch_size}"))
    for definition in DEFINITIONS:
        console.print(definition)
    for error in errors:
        note(f"error: {error}")
    if json is not None:
        settings = {
            "model": target.model,
            "dtype": target.dtype,
            "device": str(loaded.device),
            "drafters": draft_model,
            "batch_size": batch_size,
            "repeats": repeats,
            "warmup": warmup,
            "limit": limit,
            "coupled": coupled is not False,
            "sampling": params.model_dump(mode="json"),
        }
        report = report_dict(describe_machine(), settings, results, errors)
        json.write_text(jsonlib.dumps(report, indent=2) + "\n", encoding="utf-8")
    return FAILURE if errors else 0


def _engines(
    target: Target,
    model: str,
    drafters: list[str],
    specs: dict[str, TreeSpec],
    files: DrafterFileOptions,
    coupled: bool,
    batch_size: int,
) -> dict[str, Engine]:
    """Plain decoding, then every drafter with every tree, all on one target."""
    from eyas.bench.runner import PLAIN
    from eyas.drafters.loading import load_drafter
    from eyas.engine import Engine, Speculation
    from eyas.engine.load import DEFAULT_TREE, tree_for
    from eyas.target import load_tokenizer
    from eyas.tree import parse_tree

    tokenizer = load_tokenizer(model)
    engines = {PLAIN: Engine(target, tokenizer, batch_size=batch_size)}
    for name in drafters:
        drafter = load_drafter(name, target, weights=files.draft_weights, ignore_config_keys=files.ignore_config_key)
        own = drafter.network.config.default_tree or DEFAULT_TREE
        for text, spec in (specs or {own: parse_tree(own)}).items():
            label = text if len(drafters) == 1 else f"{name} {text}"
            speculation = Speculation(drafter, tree_for(drafter, spec), coupled)
            engines[label] = Engine(target, tokenizer, speculation, batch_size=batch_size)
    return engines
