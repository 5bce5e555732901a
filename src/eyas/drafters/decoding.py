"""A draft network at decoding time: true pairs are kept in the slot cache, guesses live in its staging columns.

Every kind decodes here; one without attention has a cache without layers.

Shapes: R rows, Q pairs, W frontier nodes, F staged guesses so far, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.layers import Attend
from eyas.drafters.network import DraftNetwork
from eyas.errors import UsageError
from eyas.targets.attention import RaggedLayout, grouped_attention, visible
from eyas.targets.slots import Saved, SlotCache, mapped_copy, mapped_zeros
from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Coupling

_CHUNK = 512
"""Most deferred pairs read in one pass."""


class NetworkPairs(NamedTuple):
    """Pairs copied out of a slot: first those that were read, then those that weren't."""

    read: int
    columns: Saved
    kept: tuple[Tensor, Tensor] | None  # tokens [1, n], taps [1, n, A, Ht]

    @property
    def unread(self) -> int:
        return 0 if self.kept is None else self.kept[0].shape[1]


class NetworkDrafter:
    """Pairs (state at i, token i + 1) predict token i + 2; `taps` are boundaries of the target."""

    def __init__(self, network: DraftNetwork, taps: tuple[int, ...]) -> None:
        self.network = network
        self.taps = taps
        self._ids = network.target_ids
        self.resize(0)

    @property
    def slots(self) -> int:
        return self._cache.slots

    def resize(self, slots: int) -> None:
        dtype, device = self.network.dtype, self._ids.device
        self._cache = SlotCache(self.network.kv_shapes, slots, dtype, device)
        self._pending = PendingPairs(slots)
        # the state at each slot's last read pair: as it is fed back, and as the head reads it
        self._fed = torch.zeros(slots, self.network.config.hidden_size, dtype=dtype, device=device)
        self._normed = torch.zeros_like(self._fed)

    def reshape(self, slots: int, columns: int) -> None:
        self._cache.reshape(slots, columns)
        self._pending.reshape(slots)
        more = max(0, slots - self._fed.shape[0])
        self._fed, self._normed = (F.pad(state[:slots], (0, 0, 0, more)) for state in (self._fed, self._normed))

    def length(self, slot: int) -> int:
        return self._cache.lengths[slot] + self._pending.lengths[slot]

    def unread(self, slot: int) -> int:
        return self._pending.lengths[slot]

    @torch.inference_mode()
    def save(self, slot: int, start: int, stop: int) -> NetworkPairs:
        read = self._cache.lengths[slot]
        between = min(max(read, start), stop)
        columns = self._cache.copy_out(slot, start, between)
        kept = None if between == stop else self._pending.copy_out(slot, between - read, stop - read)
        return NetworkPairs(between - start, columns, kept)

    @torch.inference_mode()
    def load(self, slot: int, saved: NetworkPairs, count: int) -> None:
        read = min(count, saved.read)
        if read:
            if self._pending.lengths[slot]:
                raise UsageError("pairs that were read can't follow pairs that weren't")
            self._cache.copy_in(slot, saved.columns, read)
        if saved.kept is not None and count > read:
            tokens, taps = saved.kept
            self._pending.append(range(slot, slot + 1), tokens, taps, [count - read])

    @torch.inference_mode()
    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._catch_up(rows, [count > 0 for count in counts])
        self._learn(rows, next_tokens, taps, counts)

    @torch.inference_mode()
    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._pending.append(rows, next_tokens, taps, counts)

    @torch.inference_mode()
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else list(drafting)
        self._catch_up(rows, wanted)
        # a one-token prompt: there is no state to draft from yet
        alive = [want and self._cache.lengths[slot] > 0 for want, slot in zip(wanted, rows, strict=True)]
        if not any(alive):
            return DraftTree.empty(len(rows), self._ids.device)
        slots = slice(rows.start, rows.stop)
        lengths = self._lengths(rows)
        start = column = self._cache.start(rows)
        fed, normed = self._fed[slots].unsqueeze(1), self._normed[slots].unsqueeze(1)  # [R, 1, H]
        committed = torch.arange(start, device=lengths.device) < lengths.unsqueeze(1)  # [R, start]
        guessed = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=lengths.device)  # [R, W, F]
        growth = spec.start(len(rows), lengths.device, None if all(alive) else alive)
        for level in range(spec.depth):
            ranked = coupling.rank(self.network.logits(normed), level, self._ids)  # [R, W, Vd]
            score, best = ranked.topk(min(growth.fanout, ranked.shape[2]), dim=2)
            frontier = growth.expand(score, self._ids[best])
            if frontier is None:
                break
            width = frontier.tokens.shape[1]
            at = frontier.parents.unsqueeze(2)
            itself = torch.eye(width, dtype=torch.bool, device=lengths.device).expand(len(rows), width, width)
            guessed = torch.cat((guessed.gather(1, at.expand(-1, -1, guessed.shape[2])), itself), dim=2)
            seen = torch.cat((committed.unsqueeze(1).expand(-1, width, -1), guessed), dim=2).unsqueeze(1)
            fed, normed = self.network.step(
                frontier.tokens,
                fed.gather(1, at.expand(-1, -1, fed.shape[2])),
                (lengths + level).unsqueeze(1).expand(-1, width),
                self._attend(rows, column, seen),
            )
            column += width
        return growth.tree()

    def truncate(self, slot: int, length: int) -> None:
        self._pending.truncate(slot, max(0, length - self._cache.lengths[slot]))
        self._cache.truncate(slot, length)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        self._cache.move(source, target)
        self._pending.move(source, target)
        self._fed[target], self._normed[target] = self._fed[source], self._normed[source]

    def _catch_up(self, rows: range, wanted: Sequence[bool]) -> None:
        """Read what was deferred of the rows that are `wanted` [R]."""
        lengths = self._pending.lengths
        counts = [lengths[slot] if want else 0 for slot, want in zip(rows, wanted, strict=True)]
        if not any(counts):
            return
        # a row far behind the others, such as one whose prompt was deferred, would make them all wait for it
        most = 2 * sum(counts) / len(rows)
        for row, count in enumerate(counts):
            if count > most:
                self._read_pending(rows[row : row + 1], [count])
        self._read_pending(rows, [count if count <= most else 0 for count in counts])
        for slot, count in zip(rows, counts, strict=True):
            if count:
                self._pending.truncate(slot, 0)

    def _read_pending(self, rows: range, counts: Sequence[int]) -> None:
        width = max(1, _CHUNK // len(rows))
        for begin in range(0, max(counts), width):
            part = [min(max(count - begin, 0), width) for count in counts]
            self._learn(rows, *self._pending.part(rows, begin, begin + max(part)), part)

    def _learn(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        width = max(counts)
        if not width:
            return
        next_tokens, taps = next_tokens[:, :width], taps[:, :width]
        layout = None if sum(counts) == next_tokens.numel() else RaggedLayout.of_counts(counts, self._ids.device)
        start = self._cache.start(rows)
        lengths = self._lengths(rows)
        steps = torch.arange(width, device=lengths.device)
        positions = lengths.unsqueeze(1) + steps
        causal = (steps.unsqueeze(1) >= steps).unsqueeze(0)
        attend = self._attend(rows, start, visible(lengths, start, causal, positions, None), layout)
        if layout is not None:
            next_tokens, taps, positions = layout.gather(next_tokens), layout.gather(taps), layout.gather(positions)
        fed, normed = self.network.step(next_tokens, self.network.fuse(taps), positions, attend)
        self._cache.commit(rows, [range(count) for count in counts])
        # rows lie end to end in both forms: padded ones are of one length
        ends = [end - 1 for end in accumulate(counts)]
        known = [(slot, end) for slot, end, count in zip(rows, ends, counts, strict=True) if count]
        at, last = torch.tensor(known, device=lengths.device).unbind(1)
        self._fed[at] = fed.flatten(0, 1)[last]
        self._normed[at] = normed.flatten(0, 1)[last]

    def _lengths(self, rows: range) -> Tensor:
        return torch.tensor(self._cache.lengths[rows.start : rows.stop], device=self._fed.device)

    def _attend(self, rows: range, column: int, seen: Tensor, layout: RaggedLayout | None = None) -> Attend:
        """Attention that stages its keys from `column` on, under the mask `seen` [R, 1, S, K].

        With a `layout` the rows' queries, keys and values come end to end.
        """
        self._cache.reserve(column + seen.shape[2])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layout is not None:
                q, k, v = layout.pad_heads(q), layout.pad_heads(k), layout.pad_heads(v)
            keys, values = self._cache.write(layer, k, v, rows, column)
            out = grouped_attention(q, keys, values, seen)  # [R, heads, S, Dv]
            return out if layout is None else layout.gather(out.transpose(1, 2)).transpose(1, 2)

        return attend


# Pairs that a drafter was told of and hasn't read yet: nobody wanted a draft, so only copies were made.
#
# Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden, C capacity.


_GRANULE = 64


class PendingPairs:
    """For each slot, in order: the tokens [slots, C] and the taps [slots, C, A, Ht] of its unread pairs.

    Takes memory from the first pair on, and no more than a little once all have been read.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._tokens: Tensor | None = None
        self._taps: Tensor | None = None

    def reshape(self, slots: int) -> None:
        """Have `slots` slots, keeping what is in those that stay."""
        self.lengths = self.lengths[:slots] + [0] * max(0, slots - len(self.lengths))
        if self._tokens is not None and self._taps is not None:
            self._resize(slots, self._tokens.shape[1], self._tokens, self._taps)

    def append(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Keep the first `counts[r]` of next_tokens [R, Q] and taps [R, Q, A, Ht]."""
        slots: list[int] = []
        columns: list[int] = []
        places: list[int] = []
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            length, first = self.lengths[slot], row * next_tokens.shape[1]
            slots += [slot] * count
            columns += range(length, length + count)
            places += range(first, first + count)
            self.lengths[slot] = length + count
        if not slots:
            return
        kept_tokens, kept_taps = self._room(next_tokens, taps)
        at = torch.tensor([slots, columns, places], device=taps.device)
        kept_tokens[at[0], at[1]] = next_tokens.flatten().index_select(0, at[2])
        kept_taps[at[0], at[1]] = taps.flatten(0, 1).index_select(0, at[2])

    def part(self, rows: range, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens [R, Q] and taps [R, Q, A, Ht] of the columns [begin, end); past a row's length they mean nothing."""
        if self._tokens is None or self._taps is None:
            raise IndexError("no pair was ever kept")
        here = slice(rows.start, rows.stop)
        return self._tokens[here, begin:end], self._taps[here, begin:end]

    def copy_out(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's pairs [begin, end): tokens [1, n], taps [1, n, A, Ht]."""
        tokens, taps = self.part(range(slot, slot + 1), begin, end)
        return tokens.clone(), mapped_copy(taps)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        self.lengths[slot] = min(self.lengths[slot], length)
        if self._tokens is not None and self._tokens.shape[1] > _GRANULE and not any(self.lengths):
            self._tokens = self._taps = None

    def move(self, source: int, target: int) -> None:
        """Copy a slot's pairs over another's and empty it."""
        used = self.lengths[source]
        if used:
            tokens, taps = self.part(range(len(self.lengths)), 0, used)
            tokens[target], taps[target] = tokens[source], taps[source]
        self.lengths[target], self.lengths[source] = used, 0

    def _room(self, next_tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Both buffers, wide enough for the longest slot. They double, so copying is paid for once a doubling."""
        wanted, held = max(self.lengths), 0 if self._tokens is None else self._tokens.shape[1]
        if self._tokens is not None and self._taps is not None and wanted <= held:
            return self._tokens, self._taps
        capacity = max(wanted + -wanted % _GRANULE, 2 * held)
        if self._tokens is not None and self._taps is not None:
            return self._resize(len(self.lengths), capacity, self._tokens, self._taps)
        return self._resize(len(self.lengths), capacity, next_tokens[:0], taps[:0])

    def _resize(self, slots: int, columns: int, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Make both buffers `slots` x `columns`, with what fits in of tokens [S, C] and taps [S, C, A, Ht]."""
        self._tokens, self._taps = (_resized(old, slots, columns) for old in (tokens, taps))
        return self._tokens, self._taps


def _resized(old: Tensor, slots: int, columns: int) -> Tensor:
    """[S, C, ...] -> [slots, columns, ...], zeros where there was nothing."""
    new = mapped_zeros((slots, columns, *old.shape[2:]), old.dtype, old.device)
    kept, held = min(slots, old.shape[0]), min(columns, old.shape[1])
    new[:kept, :held] = old[:kept, :held]
    return new
