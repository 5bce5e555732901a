"""`eyas pipeline`: from chats to the fastest way to serve a model, each step by the verb that does it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import typer
from typer import Argument, Option

from eyas.cli.common.aliases import ModelArgument, option_name
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import next_step, note
from eyas.cli.common.display import output as screen
from eyas.cli.common.verb import note_if_interrupted
from eyas.errors import DataError, StoppedError, UsageError
from eyas.plan.pipeline import ASSUMED_LENGTH, CHATS_AT_ONCE, MEASURED, Outlook, chats_within
from eyas.runtime import duration
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.plan.costs import ModelSize
    from eyas.plan.devices import Machine
    from eyas.train.drafter.config import DrafterTrainConfig


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

    @property
    def name(self) -> str:
        """Its verb: `data prepare`, `train`."""
        return self.words[0] if self.words[0] == "train" else " ".join(self.words[:2])


def pipeline(
    target: PipelineTarget,
    sources: Annotated[
        list[str], Argument(metavar="SOURCE", help="Chats, as for eyas data prepare: files, data sets, or `stdlib`.")
    ],
    options: StepOptions,
    output: Annotated[Path, Option("--output", "-o", file_okay=False, help="The folder for everything.")],
    minutes: Annotated[
        float | None,
        Option(min=1, help="A budget: sizes the number of chats, unless --samples is given, and what is measured."),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check all settings, show the steps and about how long they take, and stop.")
    ] = False,
) -> int:
    """Go from chats to the fastest way to serve a model.

    Prepares the chats, has the model answer them, stores its hidden states, trains, picks checkpoint and tree, compares
    the drafter with plain decoding and with methods that need no training, and says how to serve the fastest. The
    settings of all steps are checked before the first one runs. Finished steps aren't repeated, and an interrupted one
    resumes. The result is OUTPUT/report.html.

    Examples:
        eyas pipeline MODEL my_chats.jsonl --output RUNS
        eyas pipeline smollm2 stdlib --output RUNS --samples 400 --recipe pipeline
        eyas pipeline MODEL my_chats.jsonl --output RUNS --minutes 90 --dry-run
    """
    if options.workers is not None and options.on is None:
        raise UsageError("--workers has no effect without --on")
    checked = check(target.model, sources, options, output)
    record = Record(output / "steps.json")
    options, outlook = _sized(options, minutes, checked, record, output)
    planned = list(steps(target.model, sources, options, output, checked.capture))
    for step in planned:
        record.check(step)
    _announce(planned, outlook, options, minutes, "steps" if checked.recipe.loop.epochs is None else "epochs")
    if dry_run:
        return 0
    output.mkdir(parents=True, exist_ok=True)
    kept = f"what was done is kept in {output}"
    began = time.monotonic()
    with note_if_interrupted(kept):
        for number, step in enumerate(planned):
            if step.result.exists():
                note(f"already done: {step.result}")
                continue
            left = [each.name for each in planned[number:] if not each.result.exists()]
            words = step.words
            if minutes is not None and step.name in MEASURED and "--on" not in words:
                share = (60 * minutes - (time.monotonic() - began)) / len([name for name in left if name in MEASURED])
                words = [*words, "--minutes", f"{max(1.0, share / 60):.1f}"]
            typer.echo(f"$ {shlex.join(['eyas', *words])}")
            note(f"step {number + 1} of {len(planned)}; about {duration(outlook.left(left))} left")
            start = time.monotonic()
            code = _run(words, kept)
            if code:
                note(
                    f"error: step {number + 1}, eyas {step.name}, ended with exit code {code}: see above for what to "
                    f"correct. {kept[0].upper()}{kept[1:]}, and finished steps aren't repeated"
                )
                return code
            outlook.took[step.name] = time.monotonic() - start
            record.add(step)
            if step.name == "data prepare":
                outlook = Outlook(checked.seconds(options, _counted(step.result)), minutes, outlook.took)
    compared = json.loads((output / "run" / "bench" / "methods.json").read_text(encoding="utf-8"))
    typer.echo(f"{output / 'report.html'} is ready. {compared['verdict']}")
    next_step("serve", target.model, *compared["serve"])
    return 0


def _sized(
    options: StepOptions, minutes: float | None, checked: Checked, record: Record, output: Path
) -> tuple[StepOptions, Outlook]:
    """The options with the number of chats that fits the budget, unless it is given, and how long all steps take."""
    counted = output / "chats" / "report.json"
    if counted.exists():
        options = replace(options, samples=options.samples or record.samples)
        return options, Outlook(checked.seconds(options, _counted(counted)), minutes)
    length = min(ASSUMED_LENGTH, options.max_length or ASSUMED_LENGTH)
    if options.samples is None and minutes is not None:
        samples = chats_within(minutes, lambda number: checked.seconds(options, Chats(number, length)))
        options = replace(options, samples=samples)
    known = {} if options.samples is None else checked.seconds(options, Chats(options.samples, length))
    return options, Outlook(known, minutes)


def _announce(
    planned: list[Step], outlook: Outlook, options: StepOptions, minutes: float | None, duration_of_training: str
) -> None:
    """Show the steps, and about how long each takes; `duration_of_training` is the recipe's key for it."""
    from rich.table import Table

    table = Table("step", "command", title="What will be done")
    finished = [step.result.exists() for step in planned]
    if outlook.seconds or any(finished):
        table.add_column("about", justify="right")
    for number, (step, done) in enumerate(zip(planned, finished, strict=True), start=1):
        about = "done" if done else duration(outlook.left([step.name])) if outlook.seconds else ""
        table.add_row(str(number), shlex.join(["eyas", *step.words]), *([about] if len(table.columns) > 2 else []))
    show_table(screen(), table)
    left = outlook.left([step.name for step, done in zip(planned, finished, strict=True) if not done])
    if not outlook.seconds:
        note("how long it takes is estimated once the chats are counted (--samples N: at once)")
        return
    whole = "left" if any(finished) else "in all"
    note(f"about {duration(left)} {whole}, a rough estimate for this machine; it is corrected as steps finish")
    if minutes is not None and left > 60 * minutes:
        note(
            f"warning: that is more than --minutes {minutes:g}: give fewer --samples, or "
            f"--set drafter.loop.{duration_of_training}=N"
        )
    elif minutes is not None and options.samples is not None:
        note(f"{options.samples:,} chats, for --minutes {minutes:g}; measuring takes what is left of them")


def _counted(report: Path) -> Chats:
    """The size of a finished chat folder. Raises DataError for one that training would refuse, hours later."""
    splits = json.loads(report.read_text(encoding="utf-8"))["splits"]
    if empty := [name for name, split in splits.items() if not split["chats"]]:
        raise DataError(
            f"{report.parent} has no chats for {' and '.join(empty)}: remove it, and give more chats or another "
            "--held-out-share"
        )
    chats = sum(split["chats"] for split in splits.values())
    return Chats(chats, sum(split["length"]["total"] for split in splits.values()) // chats)


class Chats(NamedTuple):
    """A number of chats, and their mean length in tokens."""

    number: int
    length: int


@dataclass(frozen=True)
class Checked:
    """What the checks found out about model and recipe."""

    recipe: DrafterTrainConfig
    taps: tuple[int, ...]
    size: ModelSize
    machine: Machine
    capture: list[str]
    """Options of `eyas data capture` for what the recipe's drafter reads."""

    def seconds(self, options: StepOptions, chats: Chats) -> dict[str, float]:
        """Step -> seconds, roughly."""
        from eyas.plan.costs import Workload
        from eyas.plan.pipeline import LOADING_SECONDS, Measuring, Validating, distinct_tokens, seconds_of_steps

        validation, drafted = self.recipe.validation, self.recipe.shape.draft_vocab_size
        half = chats.length // 2
        answer = half if options.max_new_tokens is None else min(half, options.max_new_tokens)
        length = chats.length - half + answer
        if drafted == "auto":
            drafted = distinct_tokens(chats.number * answer, self.size.vocab)
        by_muon = self.recipe.loop.optimizer.kind != "adamw"
        work = Workload(
            chats.number,
            length,
            answer / length,
            epochs=self._epochs(chats.number * length),
            unroll=self.recipe.loss.unroll,
            draft_vocab=drafted or self.size.vocab,
            muon_tokens=self._step_tokens(chats.number * length) if by_muon else None,
        )
        measuring = Measuring(options.prompts, options.measured_tokens, options.repeats)
        validating = Validating(validation.prompts if validation.decode else 0, validation.max_tokens)
        width = self.recipe.shape.intermediate_size or self.size.intermediate
        drafter = self.size._replace(intermediate=width)
        found = seconds_of_steps(drafter, work, len(self.taps), self.machine, measuring, validating)
        if options.synthesize is not None:
            made_up = found["data regenerate"] - LOADING_SECONDS
            found["data synthesize"] = LOADING_SECONDS + made_up * options.synthesize / chats.number
        return found

    def _epochs(self, tokens: int) -> float:
        """How often training passes over chats of so many tokens."""
        loop = self.recipe.loop
        return (loop.epochs or 0.0) if loop.steps is None else loop.steps * self._step_tokens(tokens) / tokens

    def _step_tokens(self, tokens: int) -> float:
        """How many of the `tokens` of all chats a training step has, estimated."""
        from eyas.train.drafter.settings import MIN_BATCHES, PADDED

        batch = self.recipe.batch_tokens
        return self.recipe.loop.accumulate * (tokens / MIN_BATCHES if batch == "auto" else batch) / PADDED


def check(model: str, sources: list[str], options: StepOptions, folder: Path) -> Checked:
    """Check the settings of all steps, before anything is written. Raises the errors that the steps would."""
    from eyas.config import validated
    from eyas.data.chats.config import PrepareConfig
    from eyas.data.chats.sources import parse_source
    from eyas.drafters.options import DrafterOptions
    from eyas.hub import find_target
    from eyas.text.prompts import read_prompts

    files = find_target(model)
    values = {
        "sources": [parse_source(text) for text in sources], "output": folder / "chats", "model": model,
        "samples": options.samples, "held_out_share": options.held_out_share, "exclude": options.exclude,
        "max_length": options.max_length,
    }  # fmt: skip
    validated(PrepareConfig, values, "the command line")
    for path in options.exclude:
        read_prompts(path)
    if options.draft_model is not None:
        DrafterOptions(options.draft_model).check()
    ClusterOptions(options.on, options.workers).check(folder)
    from eyas.bench.report.figures import canvas

    with canvas(1, 1, 1.0, 1.0):  # the last step draws
        pass
    from eyas.cli.common.build import hide_progress_bars
    from eyas.data.store.layout import capture_parameters
    from eyas.plan.costs import model_size
    from eyas.plan.devices import this_machine
    from eyas.targets.loading import read_config
    from eyas.train.drafter.train import check_run
    from eyas.train.recipe import load_recipe

    hide_progress_bars()
    recipe = load_recipe(options.recipe, [*settings(model, folder), *options.set_]).drafter
    if recipe is None:
        raise UsageError(f"--recipe {options.recipe} trains a language model: give the recipe of a drafter")
    for key, value in (("target", model), ("store", folder / "store"), ("output", folder / "run")):
        if str(getattr(recipe, key)) != str(value):
            raise UsageError(
                f"--set drafter.{key}={getattr(recipe, key)}: eyas pipeline sets that itself; leave it out"
            )
    taps = check_run(recipe)
    config = read_config(files)
    layers = config.get_text_config().num_hidden_layers
    asked = taps if recipe.shape.taps is not None else [k for k in taps if k > layers]  # others are stored by default
    capture = [part for name, value in capture_parameters(asked, layers).items() for part in (option_name(name), value)]
    return Checked(recipe, taps, model_size(config), this_machine(), capture)


class Record:
    """The steps that were finished, and their commands, in a file of the output folder.

    A finished step isn't repeated, so a command that asks for another one is refused rather than ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[str, list[str]] = {}
        if path.is_file():
            self._done = json.loads(path.read_text(encoding="utf-8"))

    @property
    def samples(self) -> int | None:
        """The number of chats that a finished step was given."""
        words = self._done.get("data prepare", [])
        return int(words[words.index("--samples") + 1]) if "--samples" in words else None

    def check(self, step: Step) -> None:
        """Raise UsageError if a finished step ran with other words."""
        before = self._done.get(step.name)
        if before is None or before == step.words or not step.result.exists():
            return
        raise UsageError(
            f"{step.result} was made by another command:\n  eyas {shlex.join(before)}\nnot by\n"
            f"  eyas {shlex.join(step.words)}\nGive the same options, or another --output; or remove "
            f"{step.result.parent} and what was made from it"
        )

    def add(self, step: Step) -> None:
        """Record a finished step."""
        from eyas.files import write_json

        self._done[step.name] = step.words
        write_json(self._path, self._done)


def settings(model: str, folder: Path) -> list[str]:
    """The recipe's settings that follow from the other steps, as KEY=VALUE."""
    named = {"target": model, "store": folder / "store", "output": folder / "run"}
    return [f"drafter.{key}={value}" for key, value in named.items()]


def steps(
    model: str, sources: list[str], options: StepOptions, folder: Path, capture: Sequence[str] = ()
) -> Iterator[Step]:
    """All steps in order; each reads the files of the ones before. `capture`: options for what the drafter reads."""
    made_up, chats, answers, store, run = (
        folder / name for name in ("made_up.jsonl", "chats", "answers", "store", "run")
    )
    if options.synthesize is not None:
        sources = [*sources, str(made_up)]
        yield _step(
            made_up,
            "data",
            "synthesize",
            "--model",
            model,
            "--chats",
            options.synthesize,
            "--output",
            made_up,
            "--batch-size",
            CHATS_AT_ONCE,
        )
    excluded = [word for path in options.exclude for word in ("--exclude", path)]
    yield _step(
        chats / "report.json",
        "data",
        "prepare",
        *sources,
        "--model",
        model,
        "--output",
        chats,
        *_given(options, "held_out_share", "samples", "max_length"),
        *excluded,
    )
    yield _step(
        answers / "report.json",
        "data",
        "regenerate",
        "--model",
        model,
        "--chats",
        chats,
        "--output",
        answers,
        "--batch-size",
        CHATS_AT_ONCE,
        "--temperature",
        options.temperature,
        *_given(options, "max_new_tokens", "draft_model"),
        *options.shared,
    )
    yield _step(
        store / "manifest.json",
        "data",
        "capture",
        "--model",
        model,
        "--chats",
        answers,
        "--output",
        store,
        *capture,
        *options.shared,
    )
    yield _step(run / "drafter" / "config.json", "train", options.recipe, *settings(model, folder), *options.set_)
    measuring = (
        "--prompt-file",
        run / "prompts.jsonl",
        "--limit",
        options.prompts,
        "--repeats",
        options.repeats,
        "--max-new-tokens",
        options.measured_tokens,
    )
    yield _step(run / "pick" / "config.json", "bench", "checkpoints", run, *measuring, "--write", *options.shared)
    compared = run / "bench" / "methods.json"
    methods = [word for name in ("pick", "pick+suffix", "ngram", "suffix") for word in ("--method", name)]
    yield _step(
        compared, "bench", "methods", model, "--draft-model", run / "pick", *methods, *measuring, "--output", compared
    )
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
