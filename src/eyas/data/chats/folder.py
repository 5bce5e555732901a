"""Chat folders: `train.jsonl`, `validation.jsonl` and `report.json`. Also prompt files made from held-out chats.

The report is written last; a folder without one is incomplete and is refused.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError, RowError
from eyas.files import write_json, write_text
from eyas.text.chats import Chat, before_first_question, greets, held_out, read_chats

SHOWN = 3
"""Dropped rows that the report names for each reason."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

DEFINITIONS = (
    "rows: read from the source. candidates: rows left after the checks of layout, content, evaluations and exact "
    "duplicates.",
    "chats: written to the folder. dropped: rows and candidates left out, by reason. not needed: candidates that the "
    "blend's shares or the number of samples left over; they were not checked for near-duplicates.",
    "turns: messages. answers: assistant turns after the first question. unanswered: chats that end with a question, "
    "kept for regeneration.",
    "length: tokens of a chat as the target's template renders it; without a target, characters of its messages.",
    "answer tokens: tokens that the assistant generates, including the end token.",
)


class SourceTally:
    """Counts for one source: rows, candidates, chats, and dropped rows by reason."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = self.candidates = self.chats = self.cut = self.tried = 0
        self.greetings = 0
        """Chats whose first answer, before any question, was left out."""
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
    def greetings(self) -> int:
        """The number of chats that the assistant begins, not counting system messages."""
        return self._counts["greetings"]

    @property
    def chats(self) -> int:
        """The number of chats in the split."""
        return self._counts["chats"]

    def add(self, chat: Chat) -> None:
        """Count a chat that was written to the split."""
        roles = Counter(message.role for message in chat.messages)
        first = before_first_question(chat.messages)
        self._counts.update(
            chats=1,
            turns=len(chat.messages),
            answers=sum(message.role == "assistant" for message in chat.messages[first:]),
            unanswered=int(chat.messages[-1].role != "assistant"),
            greetings=int(greets(chat.messages)),
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


SPLITS = ("train", "validation")
REPORT = "report.json"


@dataclass(frozen=True)
class ChatSplit:
    """The chats of one split; every iteration reads the file again."""

    path: Path
    held_out_share: float | None = None
    """The validation share of a file that holds both splits; None if the whole file is this split."""
    validation: bool = False

    def __iter__(self) -> Iterator[Chat]:
        for chat in read_chats(self.path):
            if self.held_out_share is None or held_out(chat.id, self.held_out_share) == self.validation:
                yield chat


def splits(path: Path, held_out_share: float = 0.02) -> dict[str, Iterable[Chat]]:
    """The splits `train` and `validation` of a chat folder, or of one file of chats split by id at `held_out_share`.

    Raises DataError if there is no such path, or if the folder has no report because its writer was interrupted.
    """
    if path.is_dir():
        read_report(path)
        return {name: ChatSplit(split_file(path, name)) for name in SPLITS}
    if not path.exists():
        raise DataError(f"there is no {path}: give a chat folder (made by `eyas data prepare`) or a .jsonl file")
    return {name: ChatSplit(path, held_out_share, name == "validation") for name in SPLITS}


def split_file(folder: Path, name: str) -> Path:
    """The path of the file that holds the split `name`."""
    return folder / f"{name}.jsonl"


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a chat folder; DataError if the folder is incomplete."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {REPORT}: it is not a chat folder, or writing it was interrupted: run that command again"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"can't read {folder / REPORT}: {error}") from error
    if not isinstance(report, dict):
        raise DataError(f"{folder / REPORT} is not a report: a report is a JSON object")
    missing = [name for name in SPLITS if not split_file(folder, name).is_file()]
    if missing:
        raise DataError(f"{folder} has a {REPORT} but no {missing[0]}.jsonl: make the folder again")
    return report


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write the report, which marks a chat folder as complete; call it after all other files are written."""
    write_json(folder / REPORT, report, ensure_ascii=False)


ItemT = TypeVar("ItemT")


def prompt_of(row: TokenRow) -> tuple[int, ...]:
    """The tokens before the first answer; empty if there is no answer, or nothing before it."""
    return tuple(row.tokens[: int(row.loss_mask.argmax())].tolist()) if row.loss_mask.any() else ()


def spread(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """At most `count` of the items, evenly spaced."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def write_prompts(path: Path, rows: Iterable[TokenRow], count: int) -> int:
    """Write a prompt file of at most `count` held-out rows to measure on, and return the number of rows.

    Prompts are token ids, exactly what precedes the first answer in training, so they have the chat template, tools and
    system prompts that the drafter was trained with. Raises DataError if no row has a prompt.
    """
    chosen = spread([row for row in rows if prompt_of(row)], count)
    if not chosen:
        raise DataError("no held-out chat has a prompt: hold out more chats, or give prompt files")
    lines = [json.dumps({"id": row.id, "token_ids": prompt_of(row)}) for row in chosen]
    write_text(path, "".join(line + "\n" for line in lines))
    return len(chosen)
