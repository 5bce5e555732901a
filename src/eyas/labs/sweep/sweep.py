"""Runs a sweep: trains trials in parallel, here or on many machines, scores each, and times the best.

Every step leaves its result on disk, so an interrupted sweep resumes when it is started again.

A trial's score is the accept length on prompts that are the same in every trial. On many machines each worker runs
`eyas train` for one trial after another, in the sweep's shared folder.

The process that runs the sweep proposes and scores all trials, so a search learns from all scores, as on one machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from eyas.bench.machine import describe_machine
from eyas.bench.offline.candidates import Candidate, Selection, choose
from eyas.bench.offline.drafters import DrafterBench, Ledger
from eyas.bench.offline.runner import Plan, Task, read_tasks, run_group
from eyas.data.chats.folder import splits, write_prompts
from eyas.data.store import FeatureStore
from eyas.data.tokens.tokenize import TokenRow, tokenize_chat
from eyas.drafters.options import DrafterOptions
from eyas.errors import DataError, EyasError, UsageError
from eyas.files import file_hash, write_json
from eyas.labs.sweep.search import ScoreConfig, Search, SweepConfig
from eyas.labs.sweep.trial import TrainProcess, Trial, Trials
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.data import HELD_OUT_SHARE
from eyas.types import SamplingParams, Stats
from eyas.work import Cluster, Key, Take, Unit, UnitReport


@dataclass
class Scorer:
    """Measures the accept lengths of drafters; the target is loaded when the first one is scored."""

    config: ScoreConfig
    recipe: DrafterTrainConfig
    folder: Path
    """The folder into which prompts taken from held-out chats are written."""

    @cached_property
    def session(self) -> Session:
        """The recipe's target, loaded once for all trials."""
        return Session.open(TargetOptions(self.recipe.target, self.config.dtype, self.config.device))

    @property
    def options(self) -> EngineOptions:
        """How the engines of all trials draft and batch."""
        return EngineOptions(self.config.tree, batch_size=self.config.batch_size)

    @cached_property
    def params(self) -> SamplingParams:
        """Greedy sampling of at most `max_tokens` tokens."""
        return SamplingParams(max_tokens=self.config.max_tokens)

    @cached_property
    def files(self) -> list[Path]:
        """The prompt files; if none are configured, one is written from held-out chats."""
        if self.config.prompt_files:
            return list(dict.fromkeys(self.config.prompt_files))
        path = self.folder / "held_out.jsonl"
        write_prompts(path, held_out_rows(self.recipe, self.session.tokenizer), self.config.prompts)
        return [path]

    @cached_property
    def tasks(self) -> list[Task]:
        """The prompts as batches, one task for each prompt file."""
        return read_tasks(self.files, self.config.batch_size, self.config.prompts)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Task name -> SHA-256 of its prompt file."""
        return {task.name: file_hash(path) for task, path in zip(self.tasks, self.files, strict=True)}

    @cached_property
    def key(self) -> str:
        """A hash of everything except the drafter that a score depends on."""
        settings = self.config.model_dump(mode="json", exclude={"prompt_files"})
        text = json.dumps([settings, self.recipe.target, self.prompts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def score(self, trial: Trial, until: int | None = None) -> dict[str, float]:
        """Task name -> accept length; taken from the trial's `score.json` if nothing it depends on has changed.

        The score at step `until` is in a file of its own, which stays valid when training continues.
        """
        path = trial.folder / ("score.json" if until is None else f"score-{until}.json")
        weights = file_hash(*sorted(trial.drafter.glob("*.safetensors")), trial.drafter / "config.json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        past = until is not None and (trial.steps or 0) > until
        if known.get("key") == self.key and (past or known.get("weights") == weights):
            return {name: float(value) for name, value in known["tasks"].items()}
        found = {task.name: self._decode(trial.drafter, task).accept_length for task in self.tasks}
        content = {"key": self.key, "weights": weights, "tasks": found, "mean": fmean(found.values())}
        write_json(path, content)
        return found

    def _decode(self, drafter: Path, task: Task) -> Stats:
        engine = self.session.fixed_engine(self.session.drafter(DrafterOptions(drafter)), self.options)
        pooled = Stats()
        for group in task.groups:
            run = run_group(engine, group, self.params)
            pooled.merge(run.stats)
            task.errors += [error for error in run.errors if error not in task.errors]
        return pooled


def held_out_rows(recipe: DrafterTrainConfig, tokenizer: Any) -> Sequence[TokenRow]:
    """The rows of the validation split of the recipe's store or chats; DataError if the recipe has neither."""
    if recipe.store is not None:
        return FeatureStore.open(recipe.store).rows("validation")
    if recipe.chats is None:
        raise DataError("the recipe has neither a store nor chats, so there are no held-out prompts")
    share = HELD_OUT_SHARE if recipe.held_out_share is None else recipe.held_out_share
    return [tokenize_chat(tokenizer, chat) for chat in splits(recipe.chats, share)["validation"]]


POLL_SECONDS = 0.2
"""The interval at which training processes are checked."""

Say = Callable[[str], None]


@dataclass
class SweepResult:
    """The scores of a trial, or the reason why it failed."""

    trial: Trial
    accept_lengths: dict[str, float] = field(default_factory=dict)
    """Task name -> accept length; empty if the trial failed."""
    failure: str | None = None
    """Why the trial failed; None if it has a score."""
    timed: Candidate | None = None
    """Tokens/s and speedup; None if they weren't measured."""
    until: int | None = None
    """The step at which halving stopped the trial; None: it is trained to the end."""

    @property
    def accept_length(self) -> float:
        """The mean over tasks, by which trials are ranked."""
        return fmean(self.accept_lengths.values())


class Sweep:
    """A sweep over the knobs of a recipe, with the results of its trials so far."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        """Check all knobs; ConfigError if the recipe lacks one. `say` gets a line whenever a trial begins or ends."""
        self.config = config
        self._say = say
        self.trials = Trials(config)
        self.trials.check()
        if config.halving is not None:
            self.trials.search(())  # refuses recipes that don't fix the number of steps
        self.scorer = Scorer(config.score, self.trials.section, config.output)
        self.results: dict[str, SweepResult] = {}
        """Trial name -> result, of the trials that have ended."""
        self._started: set[tuple[str, int | None]] = set()

    def train(self) -> None:
        """Train and score all remaining trials, at most `parallel` at a time."""
        search = self.begin()
        running: dict[int, TrainProcess] = {}  # slot -> trial; the slot chooses the device
        try:
            while True:
                while len(running) < self.config.parallel and (trial := self.next_trial(search)) is not None:
                    slot = min(set(range(self.config.parallel)) - running.keys())
                    running[slot] = TrainProcess(trial, self._environment(slot), search.until)
                    self.announce(trial, search.until)
                if not running:
                    return
                for slot in [slot for slot, process in running.items() if process.ended()]:
                    process = running.pop(slot)
                    self.ended(search, process.trial, process.finish(), process.until)
                time.sleep(POLL_SECONDS)
        finally:
            for process in running.values():
                process.stop()

    def begin(self) -> Search:
        """The search, initialized with the results of earlier runs."""
        return self.trials.search(self._history())

    def next_trial(self, search: Search) -> Trial | None:
        """The next trial to train; None if there are no more, or none until others have scores.

        Trials that are already trained up to the step at which they are scored are scored here.
        """
        while (values := search.ask()) is not None:
            trial = self.trials.make(values)
            until = search.until
            known = self.results.get(trial.name)
            if known is not None and known.until == until:
                search.record(values, None if known.failure else known.accept_length)
            elif (trial.name, until) in self._started:  # proposed again before its score was recorded
                search.record(values, None)
            elif trial.trained(until):
                self._record(search, self._judge(trial, None, until))
            else:
                self._started.add((trial.name, until))
                return trial
        return None

    def announce(self, trial: Trial, until: int | None = None) -> None:
        """Report that a trial's training begins."""
        part = "" if until is None else f" up to step {until}"
        self._say(f"trial {trial.name} ({trial.described}): training{part}, see {trial.folder / 'log.txt'}")

    def ended(self, search: Search, trial: Trial, failure: str | None, until: int | None = None) -> None:
        """Score a trial whose training has ended, or note its `failure`, and report the result to the search."""
        self._record(search, self._judge(trial, failure, until))

    def time(self, bar: Callable[[int], Any]) -> Selection | None:
        """Measure the speed of the best trials and choose one; None if no trial has a score.

        `bar`, given the number of runs, returns a context manager whose value is called after every run.
        """
        chosen = [result for result in self.ranked if result.until is None][: self.config.timing.best]
        if not chosen:
            return None
        scorer, timing = self.scorer, self.config.timing
        machine = {name: value for name, value in describe_machine().items() if name != "load_average"}
        settings = {"score": self.config.score.model_dump(mode="json"), "repeats": timing.repeats, "machine": machine}
        bench = DrafterBench(
            {result.trial.name: result.trial.drafter for result in chosen},
            scorer.session,
            scorer.tasks,
            scorer.params,
            Plan(timing.repeats, timing.warmup),
            Ledger(self.config.output / "bench", settings, scorer.prompts),
            scorer.options,
            together=timing.together,
        )
        with bar(bench.work) as advance:
            candidates = bench.run(advance)
        for candidate in candidates:
            self.results[candidate.name].timed = candidate
        return choose(candidates, "accept_length") if candidates else None

    @property
    def ranked(self) -> list[SweepResult]:
        """Results with a score, longest accept length first; ties by name, not by which of them ended first.

        Trials that halving stopped come after those that went on.
        """
        good = [result for result in self.results.values() if result.failure is None]
        return sorted(good, key=lambda r: (-(r.until or math.inf), -r.accept_length, r.trial.name))

    @property
    def failed(self) -> list[SweepResult]:
        """Results of trials whose training or decoding failed, by name."""
        bad = [result for result in self.results.values() if result.failure is not None]
        return sorted(bad, key=lambda result: result.trial.name)

    def _history(self) -> list[tuple[Trial, float]]:
        """Trials of earlier runs with their scores, for TPE; decoded again if the scoring settings changed."""
        if self.config.search != "tpe":
            return []
        results = [self._judge(trial, None) for trial in self.trials.earlier() if trial.trained()]
        return [(result.trial, result.accept_length) for result in results if result.failure is None]

    def _judge(self, trial: Trial, failure: str | None, until: int | None = None) -> SweepResult:
        """Score a trial by decoding with its drafter, unless training ended with a `failure`."""
        result = SweepResult(trial, failure=failure, until=until)
        if failure is None:
            try:
                result.accept_lengths = self.scorer.score(trial, until)
            except EyasError as error:
                result.failure = str(error)
        self.results[trial.name] = result
        score = f"FAILED, {result.failure}" if result.failure else f"accept length {result.accept_length:.3f}"
        self._say(f"trial {trial.name} ({trial.described}): {score}")
        return result

    def _record(self, search: Search, result: SweepResult) -> None:
        search.record(result.trial.proposed, None if result.failure else result.accept_length)

    def _environment(self, slot: int) -> dict[str, str]:
        """Environment variables that give the trial in `slot` its own threads and device."""
        threads = self.config.threads or max(1, (os.cpu_count() or 1) // self.config.parallel)
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if self.config.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.config.devices[slot]
        return environment


class TrialWorker:
    """Trains trials with the cores and devices that its process has."""

    identity: dict[str, Any] = {}  # noqa: RUF012  # an attribute of the protocol; recipes say what trials depend on

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def work(self, take: Take) -> Iterator[UnitReport]:
        """Train trials; the last report on each has the reason for a failure, or None."""
        while units := take(1):
            key, (trial, until) = units[0]
            process = TrainProcess(trial, self._environment, until)
            try:
                while not process.ended():
                    yield UnitReport(key, None, done=False)
                    time.sleep(POLL_SECONDS)
            except GeneratorExit:  # the run was stopped: the next run resumes the trial from its last state
                process.stop()
                raise
            yield UnitReport(key, process.finish())


@dataclass(frozen=True)
class TrialWorkerMaker:
    """Makes a worker on the machine that it runs on."""

    folder: Path
    """The absolute path of the folder with the sweep's trials."""
    environment: dict[str, str]
    """Environment variables of training processes."""

    def __call__(self) -> TrialWorker:
        """Make the worker. Raises UsageError if the sweep's folder isn't shared with this machine."""
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} isn't here: output must be a folder that all machines share")
        return TrialWorker(self.environment)


def train_on(cluster: Cluster, sweep: Sweep, workers: int) -> None:
    """Have workers train all remaining trials, and score each one when it is trained."""
    search = sweep.begin()
    first = sweep.next_trial(search)
    if first is None:
        return
    waiting = deque([first])
    begun = dict[Key, tuple[Trial, int | None]]()

    def take(room: int) -> list[Unit]:
        units: list[Unit] = []
        while len(units) < room and (trial := waiting.popleft() if waiting else sweep.next_trial(search)) is not None:
            sweep.announce(trial, search.until)
            unit = Unit(f"{trial.name}/{search.until}", (trial, search.until))
            begun[unit.key] = unit.content
            units.append(unit)
        return units

    sweep.trials.folder.mkdir(parents=True, exist_ok=True)
    threads = {} if sweep.config.threads is None else {"OMP_NUM_THREADS": str(sweep.config.threads)}
    make = TrialWorkerMaker(sweep.trials.folder.absolute(), {"OMP_WAIT_POLICY": "PASSIVE", **threads})
    with cluster.crew(make, workers=workers, ahead=1) as crew:
        for report in crew.run(take):
            if report.done:
                trial, until = begun[report.key]
                sweep.ended(search, trial, report.value, until)
