"""Steps of a long measurement: run one after another within a budget, each result written immediately.

A file of results belongs to one device and one set of versions. Running the same steps into it again runs only those
that aren't done: steps that were cut off, that failed, or for which there was no time.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from eyas.errors import UsageError
from eyas.files import write_json

Row = dict[str, Any]
"""A row of a section's table: column name -> number or text."""
Status = Literal["done", "failed", "cut", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The measurements of a step, and what is wrong with them: if anything is, the step has failed."""

    rows: Sequence[Row]
    wrong: Sequence[str] = ()
    detail: Any = None
    """Details for the JSON file only."""


@dataclass(frozen=True)
class Step:
    """One measurement, not started if less than `seconds` are left, and cut after `limit` seconds."""

    section: str
    name: str
    measure: Callable[[], Outcome]
    seconds: float = 5.0
    limit: float = 60.0


class Skipped(Exception):  # noqa: N818  # no error
    """Raised by a step that can't be run on this machine, with the reason."""


class OutOfTime(BaseException):
    """The budget is spent. Not an `Exception`, which an engine would take for a request's failure and go on."""


@dataclass
class Results:
    """The results of all steps so far, kept in a JSON file."""

    path: Path
    identity: Mapping[str, Any]
    """The facts that results in one file share: device, versions, sizes."""
    steps: dict[str, Row] = field(default_factory=dict)
    """`section/name` -> section, name, status, seconds and rows or error."""

    @staticmethod
    def open(path: Path, identity: Mapping[str, Any]) -> Results:
        """The results in a file, or none if there is no such file. UsageError if its identity is another."""
        results = Results(path, identity)
        if path.is_file():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["identity"] != identity:
                changed = [key for key in identity if held["identity"].get(key) != identity[key]]
                raise UsageError(f"{path} has results of another {', '.join(changed)}: choose another output")
            results.steps = held["steps"]
        return results

    def done(self, step: Step) -> bool:
        """Whether a step has been run and nothing was wrong."""
        return self.status(step) == "done"

    def entry(self, step: Step) -> Row | None:
        """The recorded result of a step; None if it has not been run."""
        return self.steps.get(_key(step))

    def status(self, step: Step) -> Status | None:
        """How a step ended the last time; None if it has not been run."""
        entry = self.entry(step)
        return None if entry is None else entry["status"]

    def record(self, step: Step, status: Status, seconds: float, **more: Any) -> None:
        """Write a step's result to the file, replacing an earlier one."""
        entry = {"section": step.section, "name": step.name, "status": status, "seconds": round(seconds, 1), **more}
        self.steps[_key(step)] = entry
        write_json(self.path, {"identity": dict(self.identity), "steps": self.steps})


def _key(step: Step) -> str:
    return f"{step.section}/{step.name}"


def run_steps(steps: Sequence[Step], results: Results, budget: float) -> None:
    """Run the steps that aren't done yet, in order, for at most `budget` seconds."""
    ends = time.monotonic() + budget
    for step in steps:
        left = ends - time.monotonic()
        if results.done(step) or left < step.seconds:
            continue
        print(f"{_key(step)} ...", end=" ", flush=True)
        _run(step, results, left)
        print(results.steps[_key(step)]["status"], results.steps[_key(step)]["seconds"], "s", flush=True)


def _run(step: Step, results: Results, left: float) -> None:
    began = time.monotonic()

    def record(status: Status, **more: Any) -> None:
        results.record(step, status, time.monotonic() - began, **more)

    try:
        with limited(min(left, step.limit)):
            outcome = step.measure()
    except OutOfTime:
        record("cut", error=f"cut after {min(left, step.limit):.0f} s")
    except Skipped as reason:
        record("skipped", error=str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a step raises, the next ones still run
        last = traceback.format_exc().splitlines()[-12:]
        record("failed", error=f"{type(error).__name__}: {error}", traceback=last)
    else:
        more = {} if outcome.detail is None else {"detail": outcome.detail}
        if outcome.wrong:
            record("failed", error="; ".join(outcome.wrong), rows=list(outcome.rows), **more)
        else:
            record("done", rows=list(outcome.rows), **more)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once `seconds` have passed. Main thread only."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
