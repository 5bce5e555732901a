"""Prompts to measure on, taken from chats that no training saw.

They are token ids, exactly what comes before the first answer in training, so the chat template, tools and system
prompts are what the drafter knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from eyas.data.tokenize import TokenRow
from eyas.errors import DataError

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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(chosen)
