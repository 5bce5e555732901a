"""A chat folder: `train.jsonl`, `validation.jsonl`, and `report.json`, written last: without it, nothing is trusted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError
from eyas.files import write_json, write_text
from eyas.text.chats import Chat, held_out, read_chats

SPLITS = ("train", "validation")
REPORT = "report.json"


@dataclass(frozen=True)
class ChatSplit:
    """The chats of one split, read anew by every loop."""

    path: Path
    held_out_share: float | None = None
    """Of a file that holds both splits; None: the whole file is this split."""
    validation: bool = False

    def __iter__(self) -> Iterator[Chat]:
        for chat in read_chats(self.path):
            if self.held_out_share is None or held_out(chat.id, self.held_out_share) == self.validation:
                yield chat


def splits(path: Path, held_out_share: float = 0.02) -> dict[str, Iterable[Chat]]:
    """`train` and `validation` of a chat folder, or of a single file of chats split by id with `held_out_share`.

    Raises DataError if there is no such file, or the folder has no report: whatever wrote it was interrupted.
    """
    if path.is_dir():
        read_report(path)
        return {name: ChatSplit(split_file(path, name)) for name in SPLITS}
    if not path.exists():
        raise DataError(f"there are no chats at {path}: give a chat folder (`eyas data prepare`) or a .jsonl file")
    return {name: ChatSplit(path, held_out_share, name == "validation") for name in SPLITS}


def split_file(folder: Path, name: str) -> Path:
    """The file of a split."""
    return folder / f"{name}.jsonl"


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a chat folder; DataError if the folder is not whole."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {REPORT}: it is no chat folder, or writing it was interrupted; run that command again"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"can't read {folder / REPORT}: {error}") from error
    if not isinstance(report, dict):
        raise DataError(f"{folder / REPORT} is not a report: it must be a JSON object")
    missing = [name for name in SPLITS if not split_file(folder, name).is_file()]
    if missing:
        raise DataError(f"{folder} has a {REPORT} but no {missing[0]}.jsonl; make the folder anew")
    return report


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Declare a chat folder whole: the last file, in one step."""
    write_json(folder / REPORT, report, ensure_ascii=False)


# Prompts to measure on, taken from chats that no training saw.
#
# They are token ids, exactly what comes before the first answer in training, so the chat template, tools and system
# prompts are what the drafter knows.


ItemT = TypeVar("ItemT")


def prompt_of(row: TokenRow) -> tuple[int, ...]:
    """The tokens before the first answer; none if there is no answer, or nothing before it."""
    return tuple(row.tokens[: int(row.loss_mask.argmax())].tolist()) if row.loss_mask.any() else ()


def spread(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """At most `count` of them, at equal distances."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def write_prompts(path: Path, rows: Iterable[TokenRow], count: int) -> int:
    """A prompt file of at most `count` rows that have a prompt; returns how many. DataError if there are none."""
    chosen = spread([row for row in rows if prompt_of(row)], count)
    if not chosen:
        raise DataError("no held-out chat has a prompt to answer: hold out more chats, or give prompt files")
    lines = [json.dumps({"id": row.id, "token_ids": prompt_of(row)}) for row in chosen]
    write_text(path, "".join(line + "\n" for line in lines))
    return len(chosen)
