"""`eyas pipeline`: from chats to the fastest way to serve a model, each step by the verb that does it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer import Argument, Option

from eyas.cli.common.aliases import ModelArgument
from eyas.cli.common.display import next_step, note
from eyas.cli.common.verb import keeping
from eyas.errors import StoppedError, UsageError


@dataclass(frozen=True)
class PipelineTarget:
    """The model that gets a drafter."""

    ALIASES: ClassVar[type[ModelArgument]] = ModelArgument
    model: Annotated[str, Option("--model", "--model-path", help="The same as MODEL.")] = field(kw_only=True)


@dataclass(frozen=True)
class StepOptions:
    """Options of the steps, apart from their files."""

    synthesize: Annotated[
        int | None, Option(min=1, help="Also have the model make up this many chats, as one more source.")
    ] = None
    exclude: Annotated[
        list[Path], Option(exists=True, dir_okay=False, help="Prompts of an evaluation, to be left out of the chats.")
    ] = field(default_factory=list)
    samples: Annotated[int | None, Option(min=1, help="Number of chats (default: all that the shares allow).")] = None
    held_out_share: Annotated[float | None, Option(min=0, max=0.99, help="As for eyas data prepare.")] = None
    max_length: Annotated[int | None, Option(min=2, help="Leave out chats with more tokens.")] = None
    temperature: Annotated[
        float, Option(min=0, help="Sampling temperature of the answers: use the one that you serve with.")
    ] = 0
    max_new_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens per answer to train on.")] = None
    draft_model: Annotated[str | None, Option(help="A drafter that you already have: the same answers, faster.")] = None
    recipe: Annotated[str, Option(help="As for eyas train.")] = "eagle3"
    set_: Annotated[list[str], Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe.")] = field(
        default_factory=list
    )
    prompts: Annotated[int, Option(min=1, max=32, help="Held-out prompts to measure on.")] = 12
    measured_tokens: Annotated[int, Option(min=1, help="Maximum tokens per measured answer.")] = 128
    repeats: Annotated[int, Option(min=1, help="Measured runs of every prompt; the median counts.")] = 3
    on: Annotated[str | None, Option(help="ray or ray:ADDRESS: share the work on a cluster where possible.")] = None
    workers: Annotated[int | None, Option(min=1, help="With --on: number of workers.")] = None

    @property
    def shared(self) -> list[str]:
        """The options about a cluster."""
        workers = [] if self.workers is None else ["--workers", str(self.workers)]
        return [] if self.on is None else ["--on", self.on, *workers]


class Step(NamedTuple):
    """A step: its words on the command line, and the file that it writes last."""

    words: list[str]
    result: Path


def pipeline(
    target: PipelineTarget,
    sources: Annotated[
        list[str], Argument(metavar="SOURCE", help="Chats, as for eyas data prepare: files, data sets, or `stdlib`.")
    ],
    options: StepOptions,
    output: Annotated[Path, Option("--output", "-o", file_okay=False, help="The folder for everything.")],
) -> int:
    """Go from chats to the fastest way to serve a model.

    Prepares the chats, has the model answer them, stores its hidden states, trains, picks checkpoint and tree, compares
    the drafter with plain decoding and with methods that need no training, and says how to serve the fastest. Finished
    steps aren't repeated, and an interrupted one resumes. The result is OUTPUT/report.html.

    Examples:
        eyas pipeline MODEL my_chats.jsonl --output RUNS
        eyas pipeline smollm2 stdlib --output RUNS --samples 400 --recipe pipeline
    """
    if options.workers is not None and options.on is None:
        raise UsageError("--workers has no effect without --on")
    output.mkdir(parents=True, exist_ok=True)
    kept = f"what was done is kept in {output}"
    with keeping(kept):
        for step in steps(target.model, sources, options, output):
            if step.result.exists():
                note(f"already done: {step.result}")
                continue
            typer.echo(f"$ {shlex.join(['eyas', *step.words])}")
            code = _run(step.words, kept)
            if code:
                note(f"error: that ended with exit code {code}; the same command resumes from here")
                return code
    compared = json.loads((output / "run" / "bench" / "methods.json").read_text(encoding="utf-8"))
    typer.echo(f"{output / 'report.html'} is ready. {compared['verdict']}")
    next_step("serve", target.model, *compared["serve"])
    return 0


def steps(model: str, sources: list[str], options: StepOptions, folder: Path) -> Iterator[Step]:
    """All steps in order; each reads the files of the ones before."""
    made_up, chats, answers, store, run = (
        folder / name for name in ("made_up.jsonl", "chats", "answers", "store", "run")
    )
    if options.synthesize is not None:
        sources = [*sources, str(made_up)]
        yield _step(
            made_up, "data", "synthesize", "--model", model, "--chats", options.synthesize, "--output", made_up,
            "--batch-size", 64,
        )  # fmt: skip
    excluded = [word for path in options.exclude for word in ("--exclude", path)]
    yield _step(
        chats / "report.json", "data", "prepare", *sources, "--model", model, "--output", chats,
        *_given(options, "held_out_share", "samples", "max_length"), *excluded,
    )  # fmt: skip
    yield _step(
        answers / "report.json", "data", "regenerate", "--model", model, "--chats", chats, "--output", answers,
        "--batch-size", 64, "--temperature", options.temperature, *_given(options, "max_new_tokens", "draft_model"),
        *options.shared,
    )  # fmt: skip
    yield _step(
        store / "manifest.json", "data", "capture", "--model", model, "--chats", answers, "--output", store,
        *options.shared,
    )  # fmt: skip
    settings = {"target": model, "store": store, "output": run}
    named = (f"drafter.{key}={value}" for key, value in settings.items())
    yield _step(run / "drafter" / "config.json", "train", options.recipe, *named, *options.set_)
    measuring = (
        "--prompt-file", run / "prompts.jsonl", "--limit", options.prompts, "--repeats", options.repeats,
        "--max-new-tokens", options.measured_tokens,
    )  # fmt: skip
    yield _step(run / "pick" / "config.json", "bench", "checkpoints", run, *measuring, "--write", *options.shared)
    compared = run / "bench" / "methods.json"
    methods = [word for name in ("pick", "pick+suffix", "ngram", "suffix") for word in ("--method", name)]
    yield _step(
        compared, "bench", "methods", model, "--draft-model", run / "pick", *methods, "--tree", "auto", *measuring,
        "--output", compared,
    )  # fmt: skip
    report = folder / "report.html"
    yield _step(report, "bench", "report", run, "--output", report, "--chats", chats, "--chats", answers)


def _step(result: Path, *words: Any) -> Step:
    return Step(list(map(str, words)), result)


def _given(options: StepOptions, *names: str) -> list[str]:
    """The options among `names` that have a value, as typed."""
    values = {name: getattr(options, name) for name in names}
    return [
        word for name, value in values.items() if value is not None for word in (f"--{name.replace('_', '-')}", value)
    ]


def _run(words: list[str], kept: str) -> int:
    """Run `eyas WORDS` and return its exit code; a signal is passed on once, and the step ends as it would alone.

    The step runs in its own session, because a terminal's Ctrl-C reaches every process of a session, and a second
    signal would keep training from saving its state.
    """
    stopped = 0
    process = subprocess.Popen([sys.executable, "-m", "eyas", *words], start_new_session=True)

    def pass_on(number: int, _: Any) -> None:
        nonlocal stopped
        stopped = number
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise StoppedError(f"stopped: {kept}", stopped)
    return code
