"""Chat folders: `train.jsonl`, `validation.jsonl` and `report.json`. Also prompt files made of held-out chats.

The report is written last; a folder without one is incomplete and is refused.
"""

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
    """Write a prompt file of at most `count` held-out rows to measure on, and return how many it holds.

    Prompts are token ids, exactly what precedes the first answer in training, so the chat template, the tools and the
    system prompts are those that the drafter was trained with. Raises DataError if no row has a prompt.
    """
    chosen = spread([row for row in rows if prompt_of(row)], count)
    if not chosen:
        raise DataError("no held-out chat has a prompt: hold out more chats, or give prompt files")
    lines = [json.dumps({"id": row.id, "token_ids": prompt_of(row)}) for row in chosen]
    write_text(path, "".join(line + "\n" for line in lines))
    return len(chosen)
