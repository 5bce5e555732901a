"""Runs a sweep: trains trials in parallel, scores each when it is trained, and times the best once all are done.

Every step leaves its result on disk, so an interrupted sweep resumes when it is started again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from eyas.bench.ledger import Ledger
from eyas.bench.machine import describe_machine
from eyas.bench.offline.candidates import Candidate, Selection, choose
from eyas.bench.offline.drafters import DrafterBench
from eyas.bench.offline.runner import Plan
from eyas.errors import EyasError
from eyas.sweep.config import SweepConfig
from eyas.sweep.score import Scorer
from eyas.sweep.search import Search
from eyas.sweep.trial import TrainProcess, Trial, Trials

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
    """The step at which halving has stopped it; None: it is trained to the end."""

    @property
    def accept_length(self) -> float:
        """The mean over tasks, by which trials are ranked."""
        return fmean(self.accept_lengths.values())


class Sweep:
    """A sweep over the knobs of a recipe, with the results of its trials so far."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        """Check all knobs; ConfigError if the recipe lacks one. `say` gets a line when a trial begins or ends."""
        self.config, self._say = config, say
        self.trials = Trials(config)
        self.trials.check()
        if config.halving is not None:
            self.trials.search(())  # which refuses recipes that leave their steps open
        self.scorer = Scorer(config.score, self.trials.section, config.output)
        self.results: dict[str, SweepResult] = {}
        """Trial name -> result, of the trials that have ended."""
        self._started: set[tuple[str, int | None]] = set()

    def train(self) -> None:
        """Train and score all trials that are left, at most `parallel` at a time."""
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
        """The search, with what it learns from earlier runs."""
        return self.trials.search(self._history())

    def next_trial(self, search: Search) -> Trial | None:
        """The next trial to train; None if none is left, or none before others have scores.

        Those that are trained already, up to the step at which they are scored, are scored in passing.
        """
        while (values := search.ask()) is not None:
            trial, until = self.trials.make(values), search.until
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
        """Say that a trial's training begins."""
        part = "" if until is None else f" up to step {until}"
        self._say(f"trial {trial.name} ({trial.described}): training{part}, see {trial.folder / 'log.txt'}")

    def ended(self, search: Search, trial: Trial, failure: str | None, until: int | None = None) -> None:
        """Score a trial whose training has ended, unless with a `failure`, and let the search know."""
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
            scorer.target,
            scorer.tokenizer,
            scorer.tasks,
            scorer.params,
            Plan(timing.repeats, timing.warmup),
            Ledger(self.config.output / "bench", settings, scorer.prompts),
            batch_size=self.config.score.batch_size,
            tree=self.config.score.tree,
            together=timing.together,
        )
        with bar(bench.work) as advance:
            candidates = bench.run(advance)
        for candidate in candidates:
            self.results[candidate.name].timed = candidate
        return choose(candidates, "accept_length") if candidates else None

    @property
    def ranked(self) -> list[SweepResult]:
        """Results with a score, longest accept length first; equals by name, not by which of them ended first.

        Those that halving has stopped come after those that went on.
        """
        good = [result for result in self.results.values() if result.failure is None]
        return sorted(good, key=lambda r: (-(r.until or math.inf), -r.accept_length, r.trial.name))

    @property
    def failed(self) -> list[SweepResult]:
        """Results of trials whose training or decoding failed, by name."""
        bad = [result for result in self.results.values() if result.failure is not None]
        return sorted(bad, key=lambda result: result.trial.name)

    def _history(self) -> list[tuple[Trial, float]]:
        """Trials of earlier runs with their scores, for TPE; decoded again if the settings of scoring changed."""
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
