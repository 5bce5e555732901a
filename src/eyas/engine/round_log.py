"""A log of rounds for debugging: `EYAS_TRACE=FILE` makes every engine add a JSON line for each of its rounds.

A line has the times of the round's parts and, for each row, the draft tree, the accepted path and the emitted tokens:
what `run_round` returned. Tokens are users' texts, so only the file's owner may read it, and rows of private requests
have only counts. `docs/debugging.md` follows a request through these lines.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from eyas.engine.round import RoundOutput
from eyas.engine.sequence import SequenceState
from eyas.errors import UsageError
from eyas.types import DraftRound

VARIABLE = "EYAS_TRACE"
"""Environment variable with the file that rounds are added to."""
_LOG = logging.getLogger("eyas")
_ENGINES = count()
"""Numbers the engines of this process, because they may share a file."""


class RoundLog:
    """Adds the rounds of one engine to a file, until that fails."""

    def __init__(self, file: str) -> None:
        """Raises UsageError if the file can't be opened."""
        self._file = file
        try:
            self._append("")
        except OSError as error:
            raise UsageError(f"{VARIABLE}: can't write {file}: {error.strerror}") from error
        self._engine = next(_ENGINES)
        self._failed = False

    @classmethod
    def from_environment(cls) -> RoundLog | None:
        """The log that `EYAS_TRACE` asks for; None if it isn't set. Raises UsageError."""
        file = os.environ.get(VARIABLE)
        return cls(file) if file else None

    def add(
        self, number: int, sequences: Sequence[SequenceState], output: RoundOutput, drafts: Mapping[int, DraftRound]
    ) -> None:
        """Add a round: its rows' `sequences` before they take its tokens, and the trees in `drafts` by row."""
        if self._failed:
            return
        line = {
            "engine": self._engine,
            "round": number,
            "draft_ms": _milliseconds(output.draft_seconds),
            "pass_ms": _milliseconds(output.pass_seconds),
            "observe_ms": _milliseconds(output.observe_seconds),
            "pass_tokens": output.pass_tokens,
            "rows": [_row(row, sequence, output, drafts.get(row)) for row, sequence in enumerate(sequences)],
        }
        try:
            self._append(f"{json.dumps(line)}\n")
        except OSError as error:  # the answers matter more than their trace
            _LOG.warning("%s: rounds are no longer written: %s", VARIABLE, error.strerror)
            self._failed = True

    def _append(self, text: str) -> None:
        with open(self._file, "a", encoding="utf-8", opener=_for_its_owner) as file:
            file.write(text)


def _for_its_owner(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _row(row: int, sequence: SequenceState, output: RoundOutput, draft: DraftRound | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "request": sequence.index,
        "slot": sequence.slot,
        "context": len(sequence.request.prompt) + len(sequence.tokens),
        "nodes": output.nodes[row],
        "accepted": output.accepted[row],
    }
    if sequence.request.private:
        return found
    if draft is not None:
        logprob = [round(value, 3) for value in draft.logprob]
        found["draft"] = {"tokens": draft.tokens, "parents": draft.parents, "logprob": logprob, "path": draft.path}
    return {**found, "root": sequence.root, "tokens": output.tokens[row]}


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
