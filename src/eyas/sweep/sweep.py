"""A sweep: trials side by side, each decoded when it is trained; speed is measured when the machine is quiet again.

Every step leaves its result on disk, so a sweep that was interrupted and is started again goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
from eyas.sweep.trial import Process, Trial, Trials

POLL_SECONDS = 0.2

Say = Callable[[str], None]


@dataclass
class SweepResult:
    """What became of a trial."""

    trial: Trial
    accept_lengths: dict[str, float] = field(default_factory=dict)
    """By task; empty if it failed."""
    failure: str | None = None
    timed: Candidate | None = None
    """Its tokens/s and speedup, if they were measured."""

    @property
    def accept_length(self) -> float:
        """Mean over tasks: what trials are ranked by."""
        return fmean(self.accept_lengths.values())


class Sweep:
    """`say` gets a line whenever a trial ends."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        self.config, self._say = config, say
        self.trials = Trials(config)
        self.trials.check()
        self.scorer = Scorer(config.score, self.trials.section, config.output)
        self.outcomes: dict[str, SweepResult] = {}
        self._started: set[str] = set()

    def train(self) -> None:
        """Run all trials that are left to run."""
        search = self.trials.search(self._history())
        waiting = self._waiting(search)
        running: dict[int, Process] = {}  # by place: trials side by side have a place each
        try:
            while True:
                while len(running) < self.config.parallel and (trial := next(waiting, None)) is not None:
                    slot = min(set(range(self.config.parallel)) - running.keys())
                    running[slot] = Process(trial, self._environment(slot))
                if not running:
                    return
                for slot in [slot for slot, process in running.items() if process.ended()]:
                    process = running.pop(slot)
                    self._record(search, self._judge(process.trial, process.finish()))
                time.sleep(POLL_SECONDS)
        finally:
            for process in running.values():
                process.stop()

    def time(self, bar: Callable[[int], Any]) -> Selection | None:
        """Measure the speed of the best trials, nothing else running; None if no trial can be measured.

        `bar` makes a context whose value is called after every run, given how many there will be.
        """
        chosen = self.ranked[: self.config.timing.best]
        if not chosen:
            return None
        scorer, timing = self.scorer, self.config.timing
        machine = {name: value for name, value in describe_machine().items() if name != "load_average"}
        settings = {"score": self.config.score.model_dump(mode="json"), "repeats": timing.repeats, "machine": machine}
        bench = DrafterBench(
            {outcome.trial.name: outcome.trial.drafter for outcome in chosen},
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
            self.outcomes[candidate.name].timed = candidate
        return choose(candidates, "accept_length") if candidates else None

    @property
    def ranked(self) -> list[SweepResult]:
        """Trials that gave a drafter, the longest accept length first."""
        good = [outcome for outcome in self.outcomes.values() if outcome.failure is None]
        return sorted(good, key=lambda outcome: -outcome.accept_length)

    @property
    def failed(self) -> list[SweepResult]:
        """The others."""
        return [outcome for outcome in self.outcomes.values() if outcome.failure is not None]

    def _history(self) -> list[tuple[Trial, float]]:
        """Trials of earlier invocations, for a search that learns; scored again if scoring was changed."""
        if self.config.search != "tpe":
            return []
        outcomes = [self._judge(trial, None) for trial in self.trials.earlier() if trial.trained]
        return [(outcome.trial, outcome.accept_length) for outcome in outcomes if outcome.failure is None]

    def _waiting(self, search: Search) -> Iterator[Trial]:
        """Trials to train; those that are trained already are judged on the way."""
        while (values := search.ask()) is not None:
            trial = self.trials.make(values)
            if trial.name in self.outcomes:
                known = self.outcomes[trial.name]
                search.record(values, None if known.failure else known.accept_length)
            elif trial.name in self._started:  # the search repeats itself before it was told
                search.record(values, None)
            elif trial.trained:
                self._record(search, self._judge(trial, None))
            else:
                self._started.add(trial.name)
                yield trial

    def _judge(self, trial: Trial, failure: str | None) -> SweepResult:
        """Decode with the trained drafter, unless training failed."""
        outcome = SweepResult(trial, failure=failure)
        if failure is None:
            try:
                outcome.accept_lengths = self.scorer.score(trial)
            except EyasError as error:
                outcome.failure = str(error)
        self.outcomes[trial.name] = outcome
        result = f"FAILED, {outcome.failure}" if outcome.failure else f"accept length {outcome.accept_length:.3f}"
        self._say(f"trial {trial.name} ({trial.described}): {result}")
        return outcome

    def _record(self, search: Search, outcome: SweepResult) -> None:
        search.record(outcome.trial.proposed, None if outcome.failure else outcome.accept_length)

    def _environment(self, slot: int) -> dict[str, str]:
        """Threads and device of a trial, so that trials side by side don't fight for the same ones."""
        threads = self.config.threads or max(1, (os.cpu_count() or 1) // self.config.parallel)
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if self.config.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.config.devices[slot]
        return environment
