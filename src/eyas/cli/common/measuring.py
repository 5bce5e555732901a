"""What the measuring verbs share: checks before anything runs, settings for reports, warnings at the end."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli.common.display import note
from eyas.cli.common.options import MeasureOptions, RuntimeOptions
from eyas.cli.common.verb import FAILURE
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.bench.offline.candidates import Selection
    from eyas.drafters.base import Drafter
    from eyas.engine import Engine
    from eyas.targets import Target
    from eyas.types import SamplingParams


def check_output(path: Path | None) -> None:
    """Raise UsageError for a file that can't be written."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no directory {path.parent} to write it to; make it first")


def settings_of(
    model: str, loaded: Target, runtime: RuntimeOptions, measuring: MeasureOptions, params: SamplingParams
) -> dict[str, Any]:
    """What a measurement was taken with, apart from drafters and trees."""
    return {
        "model": model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "attention": runtime.attention,
        "compile": runtime.compile,
        "quantize": runtime.quantize,
        **plan_settings(measuring, params),
    }


def plan_settings(measuring: MeasureOptions, params: SamplingParams) -> dict[str, Any]:
    """The settings of a measurement that don't depend on the target."""
    return {
        "batch_size": measuring.batch_size,
        "repeats": measuring.repeats,
        "warmup": measuring.warmup,
        "limit": measuring.limit,
        "sampling": params.model_dump(mode="json"),
    }


def engines_for(
    target: Target,
    tokenizer: Any,
    drafters: Mapping[str, Drafter],
    trees: Sequence[str],
    coupled: bool,
    batch_size: int,
) -> dict[tuple[str, str], Engine]:
    """An engine for every drafter, by its name, with every tree, by its text, on one target; no trees = its own."""
    from eyas.bench.offline.methods import drafting_engine
    from eyas.engine.controller import costs_for
    from eyas.engine.load import default_tree
    from eyas.tree import is_auto

    engines = {}
    for name, drafter in drafters.items():
        costs = costs_for(target, drafter, batch_size) if any(map(is_auto, trees)) else None
        for text in trees or [default_tree(drafter)]:
            engines[name, text] = drafting_engine(target, tokenizer, drafter, text, batch_size, coupled, costs)
    return engines


def write_report(content: dict[str, Any], json: bool, path: Path | None) -> None:
    """Write the report to standard output, to a file, or both: wherever it was asked for."""
    from eyas.files import write_json

    if path is not None:
        write_json(path, content)
    if json:
        typer.echo(jsonlib.dumps(content, ensure_ascii=False))


def finish(machine: Mapping[str, Any], errors: Sequence[str]) -> int:
    """Report a busy machine and rows that failed; returns the exit code."""
    from eyas.runtime import busy

    if (warning := busy(machine)) is not None:
        note(f"warning: {warning}")
    for error in errors:
        note(f"error: {error}")
    return FAILURE if errors else 0


def may_write(choice: Selection, force: bool) -> list[str]:
    """Whether the pick of a choice is written: the errors that say why not; with `force` they are warnings."""
    if choice.doubt is None:
        return []
    if force:
        note(f"warning: {choice.doubt}")
        return []
    return [f"the pick was not written: {choice.doubt}. --force writes it all the same"]


def plain_numbers(text: str, option: str) -> list[float]:
    """A comma-separated list of at least one number, whatever they are."""
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
    try:
        found = [float(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        found = [0.0]
    if not all(0 < number < math.inf for number in found):
        raise UsageError(f"{option} {text!r}: write numbers above 0, with commas between them")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of numbers of at least 1; an empty text is an empty list."""
    try:
        found = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise UsageError(f"{option} {text!r}: write whole numbers, at least 1, with commas between them")
    return found
