"""What the measuring verbs share: checks before anything runs, settings for reports, warnings at the end."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import note
from eyas.cli.common.options import MeasureOptions, RuntimeOptions
from eyas.cli.common.verb import FAILURE
from eyas.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from eyas.bench.offline.candidates import Selection
    from eyas.bench.offline.report import MethodLine
    from eyas.bench.offline.workers import CrewMeasure, GroupWorker
    from eyas.drafters.base import Drafter
    from eyas.engine import Engine
    from eyas.targets import Target
    from eyas.types import SamplingParams

RuntimeT = TypeVar("RuntimeT", bound=RuntimeOptions)


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
        "enforce_eager": runtime.enforce_eager,
        "quantize": runtime.quantize,
        **plan_settings(measuring, params),
    }


@dataclass(frozen=True)
class MeasuringMaker:
    """Makes the worker of a measurement on its machine: the target, and an engine for each method."""

    model: str
    runtime: RuntimeOptions
    methods: Mapping[str, tuple[str, str | None]]
    """Method -> its drafter and its tree; None: the drafter's own tree."""
    coupled: bool
    batch_size: int
    weights: str | None = None
    ignore_config_keys: tuple[str, ...] = ()
    window: str | None = None
    quantize: str | None = None

    def __call__(self) -> GroupWorker:
        """Load the target; drafters are loaded when they are first needed."""
        from functools import lru_cache

        from eyas.bench.offline.runner import PLAIN
        from eyas.bench.offline.workers import GroupWorker
        from eyas.cli.common.build import open_target
        from eyas.drafters.loading import load_drafter
        from eyas.engine import Engine, Speculation
        from eyas.engine.load import tree_for
        from eyas.targets import load_tokenizer
        from eyas.targets.fingerprint import fingerprint
        from eyas.tree import parse_tree

        target, tokenizer = open_target(self.model, self.runtime), load_tokenizer(self.model)

        @lru_cache(maxsize=1)  # trees share a drafter; of several drafters each is loaded once by its engine
        def drafter(path: str) -> Drafter:
            return load_drafter(
                path, target, weights=self.weights, ignore_config_keys=self.ignore_config_keys, window=self.window,
                quantize=self.quantize,
            )  # fmt: skip

        def engine(name: str) -> Engine:
            if name == PLAIN:
                return Engine(target, tokenizer, batch_size=self.batch_size)
            path, tree = self.methods[name]
            spec = tree_for(drafter(path), None if tree is None else parse_tree(tree))
            return Engine(target, tokenizer, Speculation(drafter(path), spec, self.coupled), batch_size=self.batch_size)

        dtype = str(target.dtype).removeprefix("torch.")
        return GroupWorker({"target": fingerprint(target.model), "dtype": dtype, "device": target.device.type}, engine)


@contextmanager
def measured_on(cluster: ClusterOptions, make: MeasuringMaker, target: Target) -> Iterator[CrewMeasure]:
    """What measures with the workers of a cluster. ClusterError if these have another model than `target`."""
    from eyas.bench.offline.workers import CrewMeasure
    from eyas.cluster.crew import Crew
    from eyas.targets.fingerprint import fingerprint

    with cluster.executor() as executor, Crew(executor, make, workers=cluster.workers, ahead=1) as crew:
        found = dict(crew.identity())
        if found.pop("target") != fingerprint(target.model):
            raise ClusterError(f"the workers' {make.model} has other weights than this machine's: use the same files")
        each = {"cpus_per_worker": cluster.cpus_per_worker or 1, "gpus_per_worker": cluster.gpus_per_worker}
        yield CrewMeasure(crew, {**found, "on": "ray", **each})


def runtime_here(runtime: RuntimeT, shared: bool) -> RuntimeT:
    """How this process loads a target: on its CPU if workers compute, since it only looks at it then."""
    return replace(runtime, device="cpu", quantize=None, compile=False, enforce_eager=False) if shared else runtime


def machine_of(workers: CrewMeasure | None) -> dict[str, Any]:
    """The machine that measured: this one, or those of the workers."""
    from eyas.bench.machine import describe_machine

    return describe_machine() | ({} if workers is None else {"workers": workers.machines})


def plan_settings(measuring: MeasureOptions, params: SamplingParams) -> dict[str, Any]:
    """The settings of a measurement that don't depend on the target."""
    return {
        "batch_size": measuring.batch_size,
        "repeats": measuring.repeats,
        "warmup": measuring.warmup,
        "limit": measuring.limit,
        "sampling": params.model_dump(mode="json"),
    }


def prompt_options(measuring: MeasureOptions) -> list[str]:
    """The options that name the same prompt files for another verb."""
    return [word for path in measuring.prompt_file for word in ("--prompt-file", str(path))]


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
    """Write the report to standard output, to a file, or both, as asked."""
    from eyas.files import write_json

    if path is not None:
        write_json(path, content)
    if json:
        typer.echo(jsonlib.dumps(content, ensure_ascii=False))


def note_impossible(lines: Iterable[MethodLine]) -> None:
    """Warn of every speedup that can't be true."""
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


def warn_of(choice: Selection) -> None:
    """Warn of a pick that isn't certain to be faster than plain decoding, and say what to do with it."""
    if choice.doubt is not None:
        note(
            f"warning: {choice.doubt}. It can be used all the same with --tree auto, which drafts only where that pays "
            "(`eyas serve` does so anyway). `eyas bench methods` tells whether a method without training is faster"
        )


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
