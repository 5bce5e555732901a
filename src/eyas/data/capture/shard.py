"""The rows that a capture stores, the plan of its shards, and the computation of one shard.

Chats become token rows; those without an answer to learn from are dropped. The shard plan is a pure function of rows
and layout, so that every process of a capture arrives at the same plan.

Legend: B chats, S positions, N rows, T tokens, F final positions, A taps, Ht hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.data.chats.folder import splits
from eyas.data.features import taught, top_rows
from eyas.data.store.layout import EncodedStates, ItemType, RowTotals, ShardLayout, encode_states, pack_mask, size_of
from eyas.data.store.manifest import StoredRow, row_checksum
from eyas.data.tokens.batches import TokenBatch, cut_row, grouped, learnable, padded
from eyas.data.tokens.tokenize import TokenRow, tokenize_chat
from eyas.errors import DataError
from eyas.targets.target import Trace


@dataclass
class CaptureRows:
    """Rows of every split, in the order of the chats, and what was dropped."""

    rows: dict[str, list[TokenRow]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    """Chats of each split that were longer than `longest`."""
    lost: dict[str, int] = field(default_factory=dict)
    """Tokens of each split that were cut off those chats."""
    longest: int = 0
    """Maximum tokens of a row: the requested length or the target's context; without either, the longest chat's."""
    reasons: list[str] = field(default_factory=list)
    """One line for each chat that couldn't be tokenized."""


def read_rows(
    tokenizer: Any, chats: Path, held_out_share: float, longest: int | None, vocab: int, context: int | None = None
) -> CaptureRows:
    """Tokenize a chat folder or file and, if `longest` is given, cut every row to that many tokens.

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
        found.rows[split] = kept
        found.dropped[split] = dropped
        found.cut[split] = cut
        found.lost[split] = lost
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
    """Raise DataError if any chat has more tokens than the target's context: the rest would be lost."""
    beyond = [length for length in lengths if length > context]
    if beyond:
        raise DataError(
            f"{len(beyond):,} of the {len(lengths):,} chats in {chats} have more tokens than the target's context of "
            f"{context:,}, the longest {max(beyond):,}. To drop them, prepare them with `max_length={context}`; "
            f"to cut them after an answer, add `too_long=cut`. To store the first {context:,} tokens of each, capture "
            f"with `max_length={context}`"
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
    first = 0
    total = RowTotals(0, 0, 0)
    number = 0
    for i, row in enumerate(rows):
        grown = RowTotals(*(a + b for a, b in zip(total, size_of([row]), strict=True)))
        if i > first and layout.data_bytes(grown) > most_bytes:
            yield ShardPlan(_name(split, number), split, first, i, total)
            number += 1
            first = i
            grown = size_of([row])
        total = grown
    if first < len(rows):
        yield ShardPlan(_name(split, number), split, first, len(rows), total)


def _name(split: str, number: int) -> str:
    return f"{split}-{number:05}.safetensors"


_TYPES: dict[ItemType, torch.dtype] = {
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "F16": torch.float16, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class StateSource(Protocol):
    """Computes the states of chats: a target, or another engine that has the target's weights."""

    @property
    def device(self) -> torch.device:
        """The device on which states are computed and returned."""

    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """The states of right-padded `tokens` [B, S] of `lengths` [B]."""

    def head(self, final: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., Ht]."""


def length_groups(rows: Sequence[TokenRow], budget: int) -> list[list[int]]:
    """Batches of row indices, shortest rows first, of at most `budget` tokens each, padding included."""
    lengths = [len(row.tokens) for row in rows]
    return list(grouped(sorted(range(len(rows)), key=lambda i: lengths[i]), lengths, budget))


def shard_tensors(
    source: StateSource, rows: list[TokenRow], layout: ShardLayout, budget: int
) -> Generator[int, None, dict[str, Tensor]]:
    """Yield the token count of each finished batch; return all tensors in `layout.tensors`, in the order of `rows`."""
    made = ShardTensors(rows, layout)
    for members in length_groups(rows, budget):
        batch = padded([rows[i] for i in members])
        for i, row in zip(members, traced_rows(source, batch, layout), strict=True):
            made.put(i, row)
        yield int(batch.lengths.sum())
    return made.finish()


class ShardTensors:
    """The tensors of a shard, to be filled row by row in any order."""

    def __init__(self, rows: list[TokenRow], layout: ShardLayout) -> None:
        specs = layout.tensors(size_of(rows))
        self._rows = rows
        self._out = {name: torch.empty(spec.shape, dtype=_TYPES[spec.item]) for name, spec in specs.items()}
        masks = np.concatenate([row.loss_mask for row in rows])
        self._out["lengths"] = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32)
        self._out["tokens"] = torch.from_numpy(np.concatenate([row.tokens for row in rows])).to(torch.int32)
        self._out["loss_mask"] = torch.from_numpy(pack_mask(masks))
        self._token_starts = _starts([len(row.tokens) for row in rows])
        finals = [len(row.tokens) if layout.final == "all" else int(row.loss_mask[1:].sum()) for row in rows]
        self._final_starts = _starts(finals)
        self._checksums = np.zeros(len(rows), dtype=np.uint32)

    def put(self, index: int, row: StoredRow) -> None:
        """Fill in the features of the row at `index`."""
        _put(self._out, row, self._token_starts[index], self._final_starts[index])
        self._checksums[index] = row_checksum(row, self._rows[index].loss_mask)

    def finish(self) -> dict[str, Tensor]:
        """All tensors that the layout names, once every row has been put."""
        return self._out | {"checksums": torch.from_numpy(self._checksums)}


def traced_rows(source: StateSource, batch: TokenBatch, layout: ShardLayout) -> Iterator[StoredRow]:
    """The features of each row of a batch, encoded for storage, on the CPU."""
    tokens = batch.tokens.to(source.device)
    lengths = batch.lengths.to(source.device)
    traced = source.trace(tokens, lengths, layout.taps)
    real = torch.arange(tokens.shape[1], device=source.device) < lengths.unsqueeze(1)  # [B, S]
    where = real if layout.final == "all" else taught(batch.loss_mask.to(source.device))
    counts = batch.lengths.tolist()
    final_counts = where.sum(1).tolist()
    states = traced.final[where]  # [F, Ht] of all rows, end to end
    taps = _split(encode_states(traced.taps[real], layout.states), counts) if layout.taps else None
    final = top = None
    if layout.top is None:
        final = _split(encode_states(states, layout.states), final_counts)
    else:
        best = top_rows(source.head, states, layout.vocab, layout.top)
        ids = best.ids.cpu().to(torch.uint16 if layout.vocab <= 2**16 else torch.int32)
        parts = (ids, best.logprobs.to(torch.float16).cpu(), best.tail.cpu())
        top = list(zip(*(torch.split(part, final_counts) for part in parts), strict=True))
    for b, count in enumerate(counts):
        yield StoredRow(
            batch.tokens[b, :count].to(torch.int32),
            None if taps is None else taps[b],
            None if final is None else final[b],
            None if top is None else top[b],
        )


def _split(encoded: EncodedStates, counts: list[int]) -> list[EncodedStates]:
    values = torch.split(encoded.values.cpu(), counts)
    if encoded.exponents is None:
        return [EncodedStates(part, None) for part in values]
    exponents = torch.split(encoded.exponents.cpu(), counts)
    return [EncodedStates(part, scale) for part, scale in zip(values, exponents, strict=True)]


def _put(out: Mapping[str, Tensor], row: StoredRow, start: int, final_start: int) -> None:
    """Copy a row's features to their positions in the shard's tensors."""
    copies: list[tuple[str, int, Tensor]] = []
    for name, states, begin in (("taps", row.taps, start), ("final", row.final, final_start)):
        if states is not None:
            copies.append((name, begin, states.values))
            if states.exponents is not None:
                copies.append((f"{name}_exponents", begin, states.exponents))
    if row.top is not None:
        names = ("top_ids", "top_logprobs", "tail")
        copies += [(name, final_start, part) for name, part in zip(names, row.top, strict=True)]
    for name, begin, values in copies:
        out[name][begin : begin + len(values)].copy_(values)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
