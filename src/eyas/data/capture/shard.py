"""Computes the tensors of one shard: has its rows run through the target in batches of similar length.

Legend: B chats, S positions, N rows, T tokens, F final positions, A taps, Ht hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.data.features import taught, top_rows
from eyas.data.store.encoding import EncodedStates, encode_states, pack_mask
from eyas.data.store.layout import ItemType, ShardLayout, size_of
from eyas.data.store.shard import StoredRow, row_checksum
from eyas.data.tokens.batches import TokenBatch, grouped, padded
from eyas.data.tokens.tokenize import TokenRow
from eyas.targets.trace import Trace

_TYPES: dict[ItemType, torch.dtype] = {
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "F16": torch.float16, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class StateSource(Protocol):
    """Computes the states of chats: a target, or another engine that has the target's weights."""

    @property
    def device(self) -> torch.device:
        """Where its states are."""

    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """The states of right-padded `tokens` [B, S] of `lengths` [B]."""

    def head(self, final: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., Ht]."""


def length_groups(rows: Sequence[TokenRow], budget: int) -> list[list[int]]:
    """Batches of row indices, shortest rows first, of at most `budget` tokens each with padding."""
    lengths = [len(row.tokens) for row in rows]
    return list(grouped(sorted(range(len(rows)), key=lambda i: lengths[i]), lengths, budget))


def shard_tensors(
    source: StateSource, rows: list[TokenRow], layout: ShardLayout, budget: int
) -> Generator[int, None, dict[str, Tensor]]:
    """Yield the tokens of each batch done; return all tensors that `layout.tensors` names, in the order of `rows`."""
    specs = layout.tensors(size_of(rows))
    out = {name: torch.empty(spec.shape, dtype=_TYPES[spec.item]) for name, spec in specs.items()}
    masks = np.concatenate([row.loss_mask for row in rows])
    out["lengths"] = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32)
    out["tokens"] = torch.from_numpy(np.concatenate([row.tokens for row in rows])).to(torch.int32)
    out["loss_mask"] = torch.from_numpy(pack_mask(masks))
    token_starts = _starts([len(row.tokens) for row in rows])
    finals = [len(row.tokens) if layout.final == "all" else int(row.loss_mask[1:].sum()) for row in rows]
    final_starts = _starts(finals)
    checksums = np.zeros(len(rows), dtype=np.uint32)
    for members in length_groups(rows, budget):
        batch = padded([rows[i] for i in members])
        for i, row in zip(members, traced_rows(source, batch, layout), strict=True):
            _put(out, row, token_starts[i], final_starts[i])
            checksums[i] = row_checksum(row, rows[i].loss_mask)
        yield int(batch.lengths.sum())
    out["checksums"] = torch.from_numpy(checksums)
    return out


def traced_rows(source: StateSource, batch: TokenBatch, layout: ShardLayout) -> Iterator[StoredRow]:
    """The features of each row of a batch, encoded for storage, on the CPU."""
    tokens, lengths = batch.tokens.to(source.device), batch.lengths.to(source.device)
    traced = source.trace(tokens, lengths, layout.taps)
    real = torch.arange(tokens.shape[1], device=source.device) < lengths.unsqueeze(1)  # [B, S]
    where = real if layout.final == "all" else taught(batch.loss_mask.to(source.device))
    counts, final_counts = batch.lengths.tolist(), where.sum(1).tolist()
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
