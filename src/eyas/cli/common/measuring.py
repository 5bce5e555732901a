"""What the measuring verbs share: checks before anything runs, settings for reports, warnings at the end."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import note
from eyas.cli.common.options import MeasureOptions
from eyas.cli.common.verb import FAILURE
from eyas.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from eyas.bench.offline.budget import Size
    from eyas.bench.offline.candidates import Selection
    from eyas.bench.offline.report import MethodLine
    from eyas.bench.offline.runner import Task
    from eyas.bench.offline.workers import CrewMeasure, MeasuringMaker
    from eyas.engine import Engine
    from eyas.options import TargetOptions
    from eyas.targets import Target
    from eyas.types import SamplingParams


def check_output(path: Path | None) -> None:
    """Raise UsageError for a file that can't be written."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no directory {path.parent} to write it to; make it first")


def settings_of(
    options: TargetOptions, loaded: Target, measuring: MeasureOptions, params: SamplingParams
) -> dict[str, Any]:
    """The settings of a measurement, apart from drafters and trees."""
    return {
        "model": options.model,
        **loaded.precision,
        "device": str(loaded.device),
        "attention": options.attention,
        "compile": options.compiled,
        "enforce_eager": options.eager,
        "kernels": options.kernels,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        **plan_settings(measuring, params),
    }


@contextmanager
def measured_on(cluster: ClusterOptions, make: MeasuringMaker, target: Target) -> Iterator[CrewMeasure]:
    """Yield the measuring function of a cluster's workers. Raises ClusterError if their model isn't `target`."""
    from eyas.bench.offline.workers import CrewMeasure
    from eyas.targets.fingerprint import fingerprint

    with cluster.connected() as machines, machines.crew(make, workers=cluster.workers, ahead=1) as crew:
        found = dict(crew.identity())
        if found.pop("target") != fingerprint(target.model):
            name = make.target.model
            raise ClusterError(f"the workers' {name} has other weights than this machine's: use the same files")
        each = {"cpus_per_worker": cluster.cpus_per_worker or 1, "gpus_per_worker": cluster.gpus_per_worker}
        yield CrewMeasure(crew, {**found, "on": "ray", **each})


def target_here(target: TargetOptions, shared: bool) -> TargetOptions:
    """How this process loads a target: on its CPU if workers compute, since it then only inspects the target."""
    return (
        replace(target, device="cpu", quantize=None, compiled=False, eager=False, kv_cache_dtype="auto", kernels=None)
        if shared
        else target
    )


def machine_of(workers: CrewMeasure | None) -> dict[str, Any]:
    """The description of this machine, and of the workers' machines if they measured."""
    from eyas.bench.machine import describe_machine

    return describe_machine() | ({} if workers is None else {"workers": workers.machines})


def plan_settings(measuring: MeasureOptions, params: SamplingParams) -> dict[str, Any]:
    """The settings of a measurement that don't depend on the target."""
    return {
        "batch_size": measuring.batch_size,
        "repeats": measuring.repeats,
        "warmup": measuring.warmup,
        "limit": measuring.limit,
        "by_category": measuring.by_category,
        "sampling": params.model_dump(mode="json"),
    }


def within(
    minutes: float | None,
    measuring: MeasureOptions,
    engine: Callable[[], Engine],
    params: SamplingParams,
    tasks: Sequence[Task],
    runs: Callable[[Size], int],
    candidates: int = 1,
) -> tuple[MeasureOptions, int]:
    """The options and the number of candidates that fit a budget; all of them without one.

    `engine` makes the one that decodes plainly; `runs` counts the runs of a group of prompts.
    """
    from eyas.bench.offline.budget import Size, largest, seconds_of_run

    if minutes is None or not any(task.groups for task in tasks):
        return measuring, candidates
    most = Size(measuring.repeats, max(len(task.groups) for task in tasks), candidates)
    each = seconds_of_run(engine(), tasks, params)
    size = largest(most, runs, 60 * minutes / each)
    note(
        f"--minutes {minutes:g}, at {each:.1f} s per run: {size.repeats} of {most.repeats} repeats, {size.groups} of "
        f"{most.groups} groups of prompts per file"
        + (f", {size.candidates} of {candidates} checkpoints" if candidates > 1 else "")
    )
    return replace(measuring, repeats=size.repeats, limit=size.groups * measuring.batch_size), size.candidates


def prompt_options(measuring: MeasureOptions) -> list[str]:
    """The options that name the same prompt files for another verb."""
    words = [word for path in measuring.prompt_file for word in ("--prompt-file", str(path))]
    return [*words, "--by-category"] if measuring.by_category else words


def write_report(content: dict[str, Any], json: bool, path: Path | None) -> None:
    """Write the report to standard output, to a file, or both, as requested."""
    from eyas.files import write_json

    if path is not None:
        write_json(path, content)
    if json:
        typer.echo(jsonlib.dumps(content, ensure_ascii=False))


def note_impossible(lines: Iterable[MethodLine]) -> None:
    """Warn about every speedup that can't be true."""
    for line in lines:
        if line.impossible is not None:
            note(f"warning: {line.impossible}")


def finish(machine: Mapping[str, Any], errors: Sequence[str]) -> int:
    """Report a busy machine and rows that failed; returns the exit code."""
    from eyas.runtime import busy

    if (warning := busy(machine)) is not None:
        note(f"warning: {warning}")
    for error in errors:
        note(f"error: {error}")
    return FAILURE if errors else 0


def warn_if_doubtful(choice: Selection) -> None:
    """Warn about a pick that isn't certain to be faster than plain decoding, and say how to use it anyway."""
    if choice.doubt is not None:
        note(
            f"warning: {choice.doubt}. It can still be used with --tree auto, which drafts only where that pays off "
            "(the default of `eyas serve`). `eyas bench methods` shows whether a method without training is faster"
        )


def plain_numbers(text: str, option: str) -> list[float]:
    """A comma-separated list of at least one number of any value."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r}: write numbers with commas between them") from None


def read_temperatures(text: str, option: str) -> list[float]:
    """A comma-separated list of temperatures."""
    found = plain_numbers(text, option)
    if not all(0 <= temperature < math.inf for temperature in found):
        raise UsageError(f"{option} {text}: a temperature is a number, at least 0")
    return found


def numbers(text: str, option: str) -> list[float]:
    """A comma-separated list of numbers above 0; an empty text is an empty list."""
    found = plain_numbers(text, option) if text.strip() else []
    if not all(0 < number < math.inf for number in found):
        raise UsageError(f"{option} {text!r}: write numbers above 0, with commas between them")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of whole numbers of at least 1; an empty text is an empty list."""
    try:
        found = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise UsageError(f"{option} {text!r}: write whole numbers, at least 1, with commas between them")
    return found
