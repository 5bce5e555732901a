"""The rows a capture is of: chats as token rows, without those that teach nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.batches import cut_row, learnable
from eyas.data.folder import splits
from eyas.data.tokenize import TokenRow, tokenize_chat
from eyas.errors import DataError


@dataclass
class CaptureRows:
    """Rows of every split, in the order of the chats."""

    rows: dict[str, list[TokenRow]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    """Why chats couldn't be tokenized, one line each."""


def read_rows(tokenizer: Any, chats: Path, held_out_share: float, longest: int, vocab: int) -> CaptureRows:
    """Tokenize a chat folder or file and cut every row to `longest` tokens.

    A chat that can't be tokenized, or has no answer token to learn from, is dropped and counted. Raises DataError
    if no training row is left.
    """
    found = CaptureRows()
    for split, members in splits(chats, held_out_share).items():
        kept: list[TokenRow] = []
        dropped = 0
        for chat in members:
            try:
                row = cut_row(tokenize_chat(tokenizer, chat), longest)
                _check_ids(row, vocab)
            except DataError as error:
                found.reasons.append(str(error))
                dropped += 1
                continue
            if learnable(row):
                kept.append(row)
            else:
                dropped += 1
        found.rows[split], found.dropped[split] = kept, dropped
    if not found.rows["train"]:
        why = f"; the first of them: {found.reasons[0]}" if found.reasons else ""
        raise DataError(
            f"{chats} has no training chat with an answer token within its first {longest} tokens "
            f"({found.dropped['train']} were dropped{why})"
        )
    return found


def _check_ids(row: TokenRow, vocab: int) -> None:
    if len(row.tokens) and not 0 <= int(row.tokens.min()) <= int(row.tokens.max()) < vocab:
        raise DataError(
            f"chat {row.id}: token {int(row.tokens.max())} is outside the target's vocabulary of {vocab}: its tokens "
            "were made with another tokenizer"
        )
