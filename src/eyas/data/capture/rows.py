"""The rows that a capture stores, and the plan of its shards.

Chats become token rows; those without an answer to learn from are dropped. The shard plan is a pure function of rows
and layout, so that every process of a capture arrives at the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eyas.data.chats.folder import splits
from eyas.data.store.layout import RowTotals, ShardLayout, size_of
from eyas.data.tokens.batches import cut_row, learnable
from eyas.data.tokens.tokenize import TokenRow, tokenize_chat
from eyas.errors import DataError


@dataclass
class CaptureRows:
    """Rows of every split, in the order of the chats, and what was dropped."""

    rows: dict[str, list[TokenRow]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    """Chats of each split with more tokens than rows have."""
    lost: dict[str, int] = field(default_factory=dict)
    """Tokens of each split that are cut off them."""
    longest: int = 0
    """The most tokens of a row: what was asked for or the target's context; without either those of the longest."""
    reasons: list[str] = field(default_factory=list)
    """One line for each chat that couldn't be tokenized."""


def read_rows(
    tokenizer: Any, chats: Path, held_out_share: float, longest: int | None, vocab: int, context: int | None = None
) -> CaptureRows:
    """Tokenize a chat folder or file and cut every row to `longest` tokens, if that is given.

    Chats that can't be tokenized, or have no answer token to learn from, are dropped and counted. Raises DataError if
    no training row is left, or if a row would have more tokens than the target's `context`.
    """
    found = CaptureRows()
    whole_lengths: list[int] = []
    for split, members in splits(chats, held_out_share).items():
        kept: list[TokenRow] = []
        dropped = cut = lost = 0
        for chat in members:
            try:
                whole = tokenize_chat(tokenizer, chat)
                row = whole if longest is None else cut_row(whole, longest)
                _check_ids(row, vocab)
            except DataError as error:
                found.reasons.append(str(error))
                dropped += 1
                continue
            whole_lengths.append(len(whole.tokens))
            cut += len(row.tokens) < len(whole.tokens)
            lost += len(whole.tokens) - len(row.tokens)
            if learnable(row):
                kept.append(row)
            else:
                dropped += 1
        found.rows[split], found.dropped[split] = kept, dropped
        found.cut[split], found.lost[split] = cut, lost
    if context is not None and (longest is None or longest > context):
        _check_context(whole_lengths, context, chats)
    limits = [limit for limit in (longest, context) if limit is not None]
    found.longest = min(limits) if limits else max(whole_lengths, default=0)
    if not found.rows["train"]:
        why = f"; the first of them: {found.reasons[0]}" if found.reasons else ""
        raise DataError(
            f"{chats} has no training chat with an answer token within its first {found.longest} tokens "
            f"({found.dropped['train']} were dropped{why})"
        )
    return found


def _check_context(lengths: Sequence[int], context: int, chats: Path) -> None:
    """Raise DataError if any chat has more tokens than the target's context: what is beyond would be lost."""
    beyond = [length for length in lengths if length > context]
    if beyond:
        raise DataError(
            f"{len(beyond):,} of the {len(lengths):,} chats in {chats} have more tokens than the target's context of "
            f"{context:,}, the longest {max(beyond):,}. To leave them out, or to cut them after an answer: `eyas data "
            f"prepare --max-length {context}`, with --too-long cut. To store the first {context:,} tokens of each: "
            f"--max-length {context}"
        )


def _check_ids(row: TokenRow, vocab: int) -> None:
    if len(row.tokens) and not 0 <= int(row.tokens.min()) <= int(row.tokens.max()) < vocab:
        raise DataError(
            f"chat {row.id}: token {int(row.tokens.max())} is outside the target's vocabulary of {vocab}: its tokens "
            "were made with another tokenizer"
        )


class ShardPlan(NamedTuple):
    """A shard to make from the consecutive rows [first, stop) of a split."""

    file: str
    split: str
    first: int
    stop: int
    size: RowTotals


def cut_shards(splits: dict[str, list[TokenRow]], layout: ShardLayout, most_bytes: int) -> list[ShardPlan]:
    """Plan shards of at most `most_bytes` of data, split by split; a larger row gets a shard of its own."""
    return [plan for split, rows in splits.items() for plan in _cut(split, rows, layout, most_bytes)]


def _cut(split: str, rows: Sequence[TokenRow], layout: ShardLayout, most_bytes: int) -> Iterator[ShardPlan]:
    first, total = 0, RowTotals(0, 0, 0)
    number = 0
    for i, row in enumerate(rows):
        grown = RowTotals(*(a + b for a, b in zip(total, size_of([row]), strict=True)))
        if i > first and layout.data_bytes(grown) > most_bytes:
            yield ShardPlan(_name(split, number), split, first, i, total)
            number, first, grown = number + 1, i, size_of([row])
        total = grown
    if first < len(rows):
        yield ShardPlan(_name(split, number), split, first, len(rows), total)


def _name(split: str, number: int) -> str:
    return f"{split}-{number:05}.safetensors"
