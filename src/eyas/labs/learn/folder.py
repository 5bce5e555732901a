"""The folder that server, learner and commands share. Each file has one purpose; all but the events are replaced whole.

- `learn.json`: which target and drafter it belongs to, written by the first server
- `state.json`: which generation is to be served, set by server, learner or command; changed under a lock
- `events.jsonl`: one line per event
- `generations/NNNN/`: drafters, each with `card.json`: counts of the data it was trained on
- `traffic/`: rows of traffic; `reference/`: rows that never change, to notice forgetting
- `run/`: the learner's work in progress
- `busy`: touched by the server while it works
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from eyas.config import StrictModel
from eyas.data.store.layout import ShardLayout
from eyas.data.store.manifest import CapturedTarget
from eyas.errors import DataError, UsageError
from eyas.files import FileLock, copy_folder, file_hash, write_text, writing_folder

KEPT_GENERATIONS = 5
"""Number of generations to keep in addition to the first and those in use."""
IDLE_SECONDS = 1.0
"""Seconds since the server's last step after which the machine counts as idle."""


class LearnSettings(StrictModel):
    """The target and drafter that a folder belongs to. Another pair needs another folder."""

    model: str
    """The target as it was given to the server."""
    drafter: str
    """A hash of the first drafter's files."""
    target: CapturedTarget
    layout: ShardLayout
    salt: str
    """Salt of the clients' digests, so that they mean nothing elsewhere."""


class LearnState(StrictModel):
    """Which generation serves, and whether the learner may change that."""

    wanted: int = 0
    """The generation that is to be served."""
    settled: int = 0
    """The last generation that passed its trial; it serves while `wanted` is on trial."""
    pinned: bool = False
    """Whether the learner must not change `wanted`."""
    refused: dict[int, str] = Field(default_factory=dict)
    """Generations that were reverted, and why."""
    # the second name is what 0.3.0 wrote
    learned: str = Field(default="", validation_alias=AliasChoices("learned", "learnt"))  # codespell:ignore
    """The newest shard of traffic that the learner has tried to learn from."""


class Card(StrictModel):
    """What a generation was made from, in counts: no text, no names."""

    number: int
    parent: int | None = None
    made: float
    """Seconds since the epoch."""
    traffic_rows: int = 0
    traffic_tokens: int = 0
    store_rows: int = 0
    """Rows of the original store that were mixed in."""
    steps: int = 0
    seconds: float = 0.0
    gate: dict[str, float] = Field(default_factory=dict)
    """The results of the test before promotion."""


class LearnFolder:
    """An existing folder of this kind. Raises UsageError if it is another pair's, DataError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.traffic = path / "traffic"
        self.reference = path / "reference"
        self.run = path / "run"
        self._state = path / "state.json"
        self._events = path / "events.jsonl"
        self._busy = path / "busy"

    @classmethod
    def prepare(cls, path: Path, drafter: Path, wanted: LearnSettings) -> LearnFolder:
        """The folder at `path`, created for this pair if there is none. Raises UsageError if it is another pair's."""
        made = cls(path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with made.locked():
            if not (path / "learn.json").is_file():
                copy_folder(drafter, made.generation(0))
                _write(made.generation(0) / "card.json", Card(number=0, made=time.time()))
                made.traffic.mkdir(exist_ok=True)
                _write(path / "learn.json", wanted)
        found = made.settings
        for name in ("drafter", "target", "layout"):
            if getattr(found, name) != getattr(wanted, name):
                raise UsageError(f"{path} learns for another {name}: give `learn=` another folder, or that {name}")
        return made

    @property
    def settings(self) -> LearnSettings:
        """Which target and drafter it belongs to, as the first server wrote it."""
        return _read(self.path / "learn.json", LearnSettings)

    # State

    @property
    def state(self) -> LearnState:
        """The state as the file has it now."""
        return _read(self._state, LearnState) if self._state.is_file() else LearnState()

    def change(self, how: Callable[[LearnState], LearnState | None], event: str, **facts: Any) -> LearnState:
        """Replace the state by the result of `how`, and note the event; if that is None, nothing changes or is noted.

        Changes of all processes are serialized.
        """
        with self.locked():
            before = self.state
            after = how(before)
            if after is None:
                return before
            if after != before:
                _write(self._state, after)
            self.note(event, **facts)
            return after

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for, and hold, the lock under which the state is changed."""
        with FileLock(self.path / "lock", wait=True):
            yield

    def note(self, event: str, **facts: Any) -> None:
        """Append a line to the events in a single write."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        descriptor = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first; a line that a full disk cut short is left out."""
        found = []
        for line in self._events.read_text(encoding="utf-8").splitlines() if self._events.is_file() else ():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def overview(self) -> dict[str, Any]:
        """All that `eyas learn status` and the playground show, as JSON: counts and events, never text."""
        return {
            "state": self.state.model_dump(),
            "generations": [self.card(number).model_dump() for number in self.numbers()],
            "traffic_bytes": sum(path.stat().st_size for path in self.traffic.glob("*.safetensors")),
            "events": self.events(),
        }

    # Generations

    def generation(self, number: int) -> Path:
        """The folder of a generation, which may not exist yet."""
        return self.path / "generations" / f"{number:04}"

    def numbers(self) -> list[int]:
        """The numbers of all existing generations, oldest first."""
        folder = self.path / "generations"
        return sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal()) if folder.is_dir() else []

    def card(self, number: int) -> Card:
        """What a generation was made from."""
        return _read(self.generation(number) / "card.json", Card)

    def add(self, drafter: Path, card: Card) -> int:
        """Copy a drafter's folder as the next generation, with its number in the `card`; returns the number."""
        with self.locked():
            number = max([*self.numbers(), *self.state.refused, 0]) + 1
            with writing_folder(self.generation(number)) as folder:
                shutil.copytree(drafter, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
                text = card.model_copy(update={"number": number}).model_dump_json(indent=2)
                (folder / "card.json").write_text(text + "\n", encoding="utf-8")
            state = self.state
            used = {0, number, state.wanted, state.settled}
            for old in [one for one in self.numbers() if one not in used][:-KEPT_GENERATIONS]:
                shutil.rmtree(self.generation(old))
        return number

    # Load

    def mark_busy(self) -> None:
        """Signal that the server is at work; a disk that can't be written to is ignored."""
        with suppress(OSError):
            try:
                os.utime(self._busy)
            except FileNotFoundError:
                self._busy.touch()

    @property
    def busy(self) -> bool:
        """Whether the server was at work a moment ago."""
        try:
            return time.time() - self._busy.stat().st_mtime < IDLE_SECONDS
        except OSError:
            return False


def new_settings(
    model: str, drafter: Path, target: CapturedTarget, taps: tuple[int, ...], sizes: tuple[int, int]
) -> LearnSettings:
    """The settings for a drafter that reads `taps` of a target; `sizes` are the target's width and vocabulary.

    The state after the final norm is kept where an answer token follows, or everywhere if the drafter reads it.
    """
    final = target.layers + 1
    reads = final in taps
    if reads and taps[-1] != final:
        raise UsageError(f"a drafter that reads taps {list(taps)} can't learn here: the final state must be the last")
    weights = sorted(drafter.glob("*.safetensors"))
    if not weights:
        raise UsageError(f"{drafter} holds no *.safetensors: a drafter in another form can't learn, export it first")
    return LearnSettings(
        model=os.path.abspath(model) if Path(model).exists() else model,
        drafter=file_hash(*weights),
        target=target,
        layout=ShardLayout(
            hidden=sizes[0],
            vocab=sizes[1],
            taps=tuple(tap for tap in taps if tap != final),
            final="all" if reads else "answers",
        ),
        salt=secrets.token_hex(16),
    )


ModelT = TypeVar("ModelT", bound=BaseModel)


def _write(path: Path, model: BaseModel) -> None:
    write_text(path, model.model_dump_json(indent=2) + "\n")


def _read(path: Path, model: type[ModelT]) -> ModelT:
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
