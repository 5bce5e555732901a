"""Counts for the report of a chat folder: rows kept and dropped by source and reason, and figures of each split."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from eyas.errors import RowError
from eyas.text.chats import Chat

SHOWN = 3
"""The number of rows that the report names for every reason."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

DEFINITIONS = (
    "rows: read from the source. candidates: rows left after the checks of layout, content, evaluations and exact "
    "duplicates.",
    "chats: written to the folder. dropped: rows and candidates left out, by reason. not needed: candidates that the "
    "blend's shares or --samples left over; they were not checked for near-duplicates.",
    "turns: messages. answers: assistant turns. unanswered: chats that end with a question, kept for regeneration.",
    "length: tokens of a chat as the target's template renders it; without --model, characters of its messages.",
    "answer tokens: tokens that the assistant generates, including the end token.",
)


class SourceTally:
    """Counts for one source: rows, candidates, chats, and dropped rows by reason."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = self.candidates = self.chats = self.cut = self.tried = 0
        self._dropped: Counter[str] = Counter()
        self._first: dict[str, list[str]] = {}

    @property
    def not_needed(self) -> int:
        """The candidates that the blend left over."""
        return self.candidates - self.tried

    def drop(self, where: str, error: RowError) -> None:
        """Count a dropped row; `where` is its file and line."""
        self._dropped[error.reason] += 1
        first = self._first.setdefault(error.reason, [])
        if len(first) < SHOWN:
            first.append(f"{where}: {error.detail}")

    def reasons(self) -> list[str]:
        """One line for each reason, most frequent first, naming the first row dropped for it."""
        return [
            f"{self.name}: {count} x {reason} ({self._first[reason][0]})"
            for reason, count in self._dropped.most_common()
        ]

    def as_dict(self, share: float | None, chats: int) -> dict[str, Any]:
        """The entry in the report. `share` is the source's configured share of the blend, which has `chats` chats."""
        return {
            "name": self.name,
            "rows": self.rows,
            "candidates": self.candidates,
            "chats": self.chats,
            "cut": self.cut,
            "not_needed": self.not_needed,
            "share_asked": None if share is None else round(share, 4),
            "share": round(self.chats / chats, 4) if chats else 0.0,
            "dropped": {
                reason: {"count": count, "first": self._first[reason]} for reason, count in self._dropped.most_common()
            },
        }


class SplitTally:
    """Counts and lengths of the chats in one split."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lengths = array("Q")
        self.answer_tokens: set[int] = set()

    @property
    def begun_by_assistant(self) -> int:
        """The number of chats whose first turn, system messages apart, is the assistant's."""
        return self._counts["begun_by_assistant"]

    @property
    def chats(self) -> int:
        """The number of chats in the split."""
        return self._counts["chats"]

    def add(self, chat: Chat) -> None:
        """Count a chat that was written to the split."""
        said = [message.role for message in chat.messages]
        roles = Counter(said)
        self._counts.update(
            chats=1,
            turns=len(chat.messages),
            answers=roles["assistant"],
            unanswered=int(chat.messages[-1].role != "assistant"),
            begun_by_assistant=int(next((r for r in said if r not in ("system", "developer")), "") == "assistant"),
            with_tools=int(bool(chat.tools) or roles["tool"] > 0),
            with_reasoning=int(any(message.reasoning_content for message in chat.messages)),
        )
        if chat.tokens is None:
            self._lengths.append(sum(len(message.content or "") for message in chat.messages))
            return
        self._lengths.append(len(chat.tokens))
        for start, stop in chat.answers or ():
            self._counts["answer_tokens"] += stop - start
            self.answer_tokens.update(chat.tokens[start:stop])

    def as_dict(self) -> dict[str, Any]:
        """The entry in the report; lengths are in tokens, or in characters if there is no target."""
        names = ("chats", "turns", "answers", "unanswered", "with_tools", "with_reasoning")
        total = sum(self._lengths)
        values = np.quantile(np.asarray(self._lengths), QUANTILES, method="nearest") if self._lengths else []
        made: dict[str, Any] = {name: self._counts[name] for name in names}
        made["length"] = {
            "total": total,
            "quantiles": {f"{q:g}": int(value) for q, value in zip(QUANTILES, values, strict=False)},
        }
        if self._counts["answer_tokens"]:
            made["answer_tokens"] = self._counts["answer_tokens"]
            made["answer_share"] = round(self._counts["answer_tokens"] / total, 4)
            made["distinct_answer_tokens"] = len(self.answer_tokens)
        return made
