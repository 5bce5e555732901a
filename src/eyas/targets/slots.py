"""The slot cache: preallocated keys and values for many sequences of different lengths.

A pass writes its tokens into *staging columns*, which follow each row's committed ones. Where all rows are equally
long, that is one slice copy per layer. Committing moves the accepted path of each row to the end of its committed
columns, all layers in one operation; a chain is there already. Nothing is rolled back: the next pass overwrites what
isn't committed. So a short row next to a long one takes no memory for the columns that only the long one uses, where
the system allocates pages on first write. transformers sees a pass as a `StagedCache`.

With an 8-bit cache, each key and value is quantized once, when it is written: to codes from -127 to 127, followed by a
scale of its own. So what a pass reads depends only on the token and on the tokens that it attended to.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, C capacity, Hkv heads, D head size, D' numbers stored
per head (D, or the codes and their scale), G tensors of one shape (keys or values of some layers).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from eyas.errors import CacheMemoryError, InvariantError
from eyas.runtime import discard, mapped_copy, mapped_zeros, out_of_memory_as, to_device
from eyas.targets.attention import RaggedLayout
from eyas.targets.graphs import PassGraphs
from eyas.targets.native.packed import MIN_INPUT
from eyas.targets.states import SlotStates

COLUMNS = 256
"""Capacities are multiples of this."""
_MIN_COPIED_COLUMNS = 64
"""Fewer columns of a slot than this aren't worth copying ahead of a reshape."""
_GRANULE, _FLOOR = 64, 256
_MAX_GROWTH = 4096
"""Maximum number of columns added beyond those needed. Even with this limit, long sequences are rarely copied."""


class KVShape(NamedTuple):
    """Number of heads and head size of one layer's keys or values."""

    heads: int
    size: int


class Staging(NamedTuple):
    """The columns that a pass writes in each row, behind the committed columns and those that earlier passes staged."""

    rows: range
    first: int
    """The first column of the longest row."""
    end: int
    """End of the longest row's columns, or a later column."""
    columns: Tensor | None  # [R, 1, Q, 1] the columns of each row; None = the same for all rows


Saved = list[Tensor]
"""Columns copied out of a slot: one tensor [G, Hkv, n, D'] per shape."""
SCALE_BYTES = 4
"""Size of the float32 scale behind the codes of a key or value."""


def quantize_kv(x: Tensor) -> Tensor:
    """Quantize keys or values [..., D] to 8 bits [..., D + 4] as the kernels do: maximum to 127, ties to even."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    most = torch.where(most >= MIN_INPUT, most, torch.zeros_like(most))
    codes = (wide * torch.where(most > 0, 127.0 / most, most)).round().to(torch.int8)
    scales = most * torch.tensor(1 / 127, dtype=torch.float32) + (wide - wide).sum(-1, keepdim=True)  # keeps a NaN
    return torch.cat((codes, scales.contiguous().view(torch.int8)), dim=-1)


def dequantize_kv(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize keys or values [..., D + 4] of 8 bits to [..., D]."""
    scales = entries[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (entries[..., :-SCALE_BYTES].float() * scales).to(dtype)


def _column_bytes(shape: KVShape, dtype: torch.dtype, in_codes: bool) -> int:
    """Bytes that one token's keys or values take in a layer."""
    return shape.heads * (shape.size + SCALE_BYTES if in_codes else shape.size * dtype.itemsize)


class SlotCache:
    """Keys and values of `layers`, and recurrent `states` (with the same number of slots), for `slots` sequences.

    `layers` has a (key shape, value shape) pair per layer, None for layers without attention. With `in_codes`, keys and
    values are stored in 8 bits.
    """

    def __init__(
        self,
        layers: Sequence[tuple[KVShape, KVShape] | None],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = COLUMNS,
        states: SlotStates | None = None,
        in_codes: bool = False,
    ) -> None:
        self.lengths = [0] * slots
        self.in_codes = in_codes
        self.graphs: PassGraphs | None = None
        """The passes recorded over this cache; None = record none."""
        self.drafts: PassGraphs | None = None
        """The whole drafts recorded over this cache; recording them may fail where recording passes doesn't."""
        self._dtype = dtype
        self.device = device
        self._dense = dense_columns(device)
        self.capacity = capacity
        """C, the number of columns allocated for every slot."""
        members: dict[KVShape, int] = {}
        self._where: list[list[tuple[KVShape, int]]] = []  # (shape, index in its group) of each layer's keys and values
        for pair in layers:
            self._where.append([])
            for shape in pair or ():
                self._where[-1].append((shape, members.get(shape, 0)))
                members[shape] = members.get(shape, 0) + 1
        self._addresses: tuple[Tensor, Tensor] | None = None
        self.column_bytes = sum(n * _column_bytes(shape, dtype, in_codes) for shape, n in members.items())
        """Size of one token's keys and values."""
        self._groups = {  # [G, slots, Hkv, C, D']
            shape: self._allocate(count, slots, shape, capacity) for shape, count in members.items()
        }
        self.states = states
        self.reshaping: Reshaping | None = None
        """The buffers for the next `reshape`, and what has been copied to them already."""

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def length(self, slot: int) -> int:
        """Number of committed tokens of a slot."""
        return self.lengths[slot]

    def nbytes(self) -> int:
        """Size of all keys, values and recurrent states, in bytes."""
        states = 0 if self.states is None else self.states.nbytes()
        return states + sum(group.nbytes for group in self._groups.values())

    def start(self, rows: range) -> int:
        """Number of committed columns of the longest of `rows`, behind which its staging columns begin."""
        return max(self.lengths[rows.start : rows.stop], default=0)

    def device_lengths(self, rows: range) -> Tensor:
        """[R] the number of committed columns of each of `rows`, on the device."""
        return to_device(self.lengths[rows.start : rows.stop], self.device)

    def reserve(self, columns: int, staged: int = 0) -> None:
        """Make room for `columns` columns, keeping `staged` staged ones of each row.

        Growing at least doubles the capacity, so that copies are rare.
        """
        if columns <= self.capacity:
            return
        wanted = max(columns, 2 * self.capacity)
        self.reshape(self.slots, wanted + -wanted % COLUMNS, staged)

    def reshape(self, slots: int, capacity: int, staged: int = 0) -> None:
        """Change to `slots` x `capacity`, keeping the committed and `staged` columns of each row that still fit.

        Raises CacheMemoryError, with nothing changed, if memory runs out.
        """
        if (slots, capacity) == (self.slots, self.capacity):
            return
        reshaping = self.reshaping
        self.reshaping = None
        if reshaping is None or reshaping.shape != (slots, capacity):
            reshaping = Reshaping(self, slots, capacity)
        reshaping.finish([length + staged for length in self.lengths])
        if self.states is not None and slots != self.slots:
            self.states.reshape(slots)
        self._groups = reshaping.groups
        self.capacity = capacity
        self._addresses = None
        self.lengths = [min(length, capacity) for length in self.lengths[:slots]] + [0] * (slots - self.slots)
        for graphs in (self.graphs, self.drafts):  # they hold the old addresses
            if graphs is not None:
                graphs.clear()

    def staging(
        self, rows: range, width: int, before: int = 0, lengths: Tensor | None = None, end: int | None = None
    ) -> Staging:
        """The columns of a pass `width` wide over `rows`, in which earlier passes staged `before` columns.

        Given `end`, a pass reads `end` columns and takes the committed `lengths` [R] from the device, so it can be
        recorded.
        """
        # Two rows of 5 and 3 committed tokens, in a pass of width 3 (a root and two nodes):
        #   row 0  t t t t t r a b      columns 5, 6, 7
        #   row 1  t t t r c - . .      columns 3, 4, 5
        # Rows end at different columns, so they are written by index, and both are read up to column 8 under a mask.
        # What follows in the same draft is staged with `before` = 3: from columns 8 and 6 on.
        known = self.lengths[rows.start : rows.stop]
        first = max(known, default=0) + before
        if end is None or lengths is None:
            if all(length + before == first for length in known):
                return Staging(rows, first, first + width, None)
            lengths = to_device(known, self.device)
            end = first + width
        columns = lengths.unsqueeze(1) + torch.arange(before, before + width, device=lengths.device)  # [R, Q]
        return Staging(rows, end - width, end, columns[:, None, :, None])

    def write(self, layer: int, key: Tensor, value: Tensor, staging: Staging) -> tuple[Tensor, Tensor]:
        """Stage one layer's key and value [R, Hkv, Q, D]; return all columns up to the last staged one."""
        rows, first, end, at = staging
        views = []
        for (shape, member), new in zip(self._where[layer], (key, value), strict=True):
            columns = self._groups[shape][member, rows.start : rows.stop, :, :end]  # [R, Hkv, end, D']
            new = quantize_kv(new) if self.in_codes else new
            if at is None:
                columns[:, :, first:] = new
            else:
                columns.scatter_(2, at.expand_as(new), new.to(columns.dtype))
            views.append(dequantize_kv(columns, self._dtype) if self.in_codes else columns)
        return views[0], views[1]

    def columns(self, layer: int, rows: range, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values [R, Hkv, end - first, D] of a layer in columns `[first, end)` of each row."""
        found = [
            self._groups[shape][member, rows.start : rows.stop, :, first:end] for shape, member in self._where[layer]
        ]
        keys, values = (dequantize_kv(part, self._dtype) if self.in_codes else part for part in found)
        return keys, values

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [slots, Hkv, C, D'] until `reshape`, for kernels that write to them."""
        keys, values = (self._groups[shape][member] for shape, member in self._where[layer])
        return keys, values

    def addresses(self) -> tuple[Tensor, Tensor]:
        """[layers] addresses of each layer's keys and of its values in slot 0, until `reshape`; 0 if it has none."""
        if self._addresses is None:
            found = [
                [self._groups[shape][member].data_ptr() for shape, member in layer] or [0, 0] for layer in self._where
            ]
            keys, values = torch.tensor(found, dtype=torch.int64).view(-1, 2).T.contiguous()
            self._addresses = keys, values
        return self._addresses

    def commit(self, rows: range, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's staged columns in `paths` (0 = the first staged one), in that order; drop the rest."""
        if self.states is not None:
            self.states.commit(rows, paths)
        # Rows of 5 and 3 committed tokens, staged columns [r, a, b | r, c, -], paths [[0, 2], [0]]: row 0 keeps r where
        # it is, moves b from column 7 to 6, and has 7 tokens; row 1 keeps r and has 4. The path of a chain is 0, 1, 2,
        # ...: nothing moves.
        slots = []
        sources = []
        targets = []
        for slot, path in zip(rows, paths, strict=True):
            length = self.lengths[slot]
            for offset, column in enumerate(path):
                if column != offset:
                    slots.append(slot)
                    sources.append(length + column)
                    targets.append(length + offset)
            self.lengths[slot] = length + len(path)
        if not slots:
            return
        at = to_device([slots, sources, targets], self.device)
        for shape, group in self._groups.items():
            heads = torch.arange(shape.heads, device=self.device)
            first = (at[0].unsqueeze(1) * shape.heads + heads) * self.capacity  # [n, Hkv] column 0 of slot and head
            flat = group.view(len(group), -1, group.shape[-1])  # [G, slots * Hkv * C, D'], to copy whole vectors
            # all are read before any is written, so overlaps are harmless
            kept = flat.index_select(1, (first + at[1].unsqueeze(1)).flatten())
            flat.index_copy_(1, (first + at[2].unsqueeze(1)).flatten(), kept)

    def truncate(self, slot: int, length: int) -> None:
        """Drop everything in `slot` from position `length` on; in a wide cache, an emptied slot returns its memory.

        A slot with recurrent states can only be emptied: raises InvariantError for other lengths.
        """
        if self.states is not None and length < self.lengths[slot]:
            if length:
                raise InvariantError(f"the recurrent states of slot {slot} can't go back to {length} tokens")
            self.states.clear(slot)
        before = self.lengths[slot]
        self.lengths[slot] = min(self.lengths[slot], length)
        if self.reshaping is not None:
            self.reshaping.forget(slot, length)
        if not length and before:
            _release_pages(self, slot)

    def move(self, source: int, target: int) -> None:
        """Move a sequence from slot `source` to slot `target`, leaving `source` empty."""
        used = self.lengths[source]
        for group in self._groups.values():
            group[:, target, :, :used] = group[:, source, :, :used]
        if self.states is not None:
            self.states.move(source, target)
        self.lengths[target] = used
        self.lengths[source] = 0
        if self.reshaping is not None:
            self.reshaping.forget(target, 0)
            self.reshaping.forget(source, 0)
        _release_pages(self, source)

    def copy_out(self, slot: int, start: int, stop: int) -> Saved:
        """Copy the committed columns `[start, stop)` of a slot."""
        return [mapped_copy(group[:, slot, :, start:stop]) for group in self._groups.values()]

    def copy_in(self, slot: int, saved: Saved, count: int) -> None:
        """Append to a slot the first `count` columns that `copy_out` saved."""
        start = self.lengths[slot]
        self.reserve(start + count)
        for group, kept in zip(self._groups.values(), saved, strict=True):
            group[:, slot, :, start : start + count] = kept[:, :, :count]
        self.lengths[slot] = start + count

    def _allocate(self, count: int, slots: int, shape: KVShape, capacity: int) -> Tensor:
        width = shape.size + SCALE_BYTES * self.in_codes
        size = (count, slots, shape.heads, capacity, width)
        dtype = torch.int8 if self.in_codes else self._dtype
        gib = count * slots * capacity * _column_bytes(shape, self._dtype, self.in_codes) / 2**30
        why = (
            f"no memory for a key-value cache of {slots} slots x {capacity} tokens ({gib:.1f} GiB more): use a "
            "smaller `batch_size=`, shorter prompts, fewer `max_tokens=` or a smaller `dtype=`"
        )
        # zeros, not empty: a stale NaN behind a masked column would survive the multiplication by zero
        dense = self._dense is None or capacity <= self._dense
        with out_of_memory_as(lambda: CacheMemoryError(why)):
            return mapped_zeros(size, dtype, self.device, huge=dense)


class Reshaping:
    """The buffers of a cache's next shape, to which its columns are copied before passes switch to them.

    Columns can be copied a few layers at a time between passes, so that no step has to copy them all: committed columns
    change only in slots that are emptied or moved, which `forget` reports.
    """

    def __init__(self, cache: SlotCache, slots: int, capacity: int, layers: int | None = None) -> None:
        """Allocate `slots` x `capacity`, to copy `layers` at a time (None = all). Raises CacheMemoryError."""
        self.shape = slots, capacity
        old = cache._groups
        self.groups = {shape: cache._allocate(len(old[shape]), slots, shape, capacity) for shape in old}
        self._pieces = [  # source, destination, and the number of columns copied of each slot
            (old[shape][first:last], new[first:last], [0] * min(slots, cache.slots))
            for shape, new in self.groups.items()
            for first, last in pairwise([*range(0, len(new), layers or len(new)), len(new)])
        ]
        self._done = 0  # pieces copied so far
        self._worthwhile_length = 0  # total length from which copying is worthwhile again

    def catch_up(self, lengths: Sequence[int], seconds: float) -> bool:
        """Copy slots of `lengths` columns for `seconds`; return whether all is copied, or each piece was twice."""
        if sum(lengths) < self._worthwhile_length:
            return True
        end = time.perf_counter() + seconds
        for _ in self._pieces:
            self._copy(self._done % len(self._pieces), lengths, _MIN_COPIED_COLUMNS)
            self._done += 1
            if time.perf_counter() > end:
                return self._done >= 2 * len(self._pieces)  # the row that waits for it mustn't wait forever
        self._worthwhile_length = sum(lengths) + _MIN_COPIED_COLUMNS * len(lengths)
        return True

    def finish(self, lengths: Sequence[int]) -> None:
        """Copy all columns that aren't copied yet."""
        for piece in range(len(self._pieces)):
            self._copy(piece, lengths, 0)

    def forget(self, slot: int, length: int) -> None:
        """Discard what was copied of a slot from column `length` on, because the slot has changed there."""
        self._worthwhile_length = 0
        for _, _, copied in self._pieces:
            if slot < len(copied):
                copied[slot] = min(copied[slot], length)

    def _copy(self, piece: int, lengths: Sequence[int], few: int) -> None:
        old, new, copied = self._pieces[piece]  # [g, slots, Hkv, C, D']
        for slot, (begin, length) in enumerate(zip(copied, lengths, strict=False)):
            end = min(length, old.shape[3], new.shape[3])
            if begin + few < end:
                new[:, slot, :, begin:end] = old[:, slot, :, begin:end]
                copied[slot] = end


def _release_pages(cache: SlotCache, slot: int) -> None:
    """Return a slot's pages to the system, where rows have pages of their own; they read as zeros afterwards."""
    if cache._dense is not None and cache.capacity > cache._dense:
        for group in cache._groups.values():
            for member in group:
                discard(member[slot])


def dense_columns(device: torch.device) -> int | None:
    """The widest capacity at which every row takes memory for all of its columns; None = there is no limit.

    Up to it, buffers get huge pages (2 MiB on x86), which are read a little faster. In wider caches rows differ in
    length, so their buffers get small pages, which take no memory until they are written to.
    """
    return 4096 if device.type == "cpu" and sys.platform.startswith("linux") else None


class CacheRoom:
    """How large the slot caches should be: slots x columns, grown on demand within a memory limit.

    The cache is a rectangle, which takes memory for slots x columns whatever the sequences' lengths. On a CPU this
    holds up to `dense` columns; in a wider cache, a row takes only the pages that were written to. Each row also takes
    memory of fixed size for its recurrent states: as much as `state_columns` columns.
    """

    def __init__(self, most_slots: int, limit: int | None, dense: int | None = None) -> None:
        """`dense` None: every rectangle takes all of its memory."""
        self.slots = self.columns = self.state_columns = 0
        self.limit = limit
        self._most_slots = most_slots
        self._dense = dense
        self._peak = (0, 0)
        self._rows: Sequence[int] = ()  # columns that each row needs
        self._memory_limit = math.inf  # tokens that memory turned out to have room for
        self.context = math.inf
        """Columns of the longest possible sequence."""
        self.planned: tuple[int, int] | None = None
        """Slots and columns that will soon be needed, to which the caches are copied a piece at a time."""
        self.ready = False
        """Whether the caches are copied to the planned shape."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the caches take memory for, used or not."""
        columns = sum(self._rows) if self._sparse(self.columns) else self.slots * self.columns
        return columns + self.slots * self.state_columns

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether the limits allow rows of these lengths; a single row may always use all of the configured limit."""
        return self.holds(len(rows), max(rows, default=0), sum(rows))

    def holds(self, rows: int, longest: int, total: int) -> bool:
        """`fits` for `rows` rows with `total` columns in all, of which the longest row has `longest`."""
        taken = total if self._sparse(longest) else rows * longest
        return taken + rows * self.state_columns <= self.max_tokens(rows)

    def has(self, slots: int, columns: int) -> bool:
        """Whether the current rectangle has at least `slots` slots and `columns` columns."""
        return slots <= self.slots and columns <= self.columns

    def cover(self, rows: Sequence[int], expected: int = 0, soon: int = 0) -> bool:
        """Grow to hold rows of these lengths, which must fit; return whether the rectangle changed.

        Its sides double, columns by at most `_MAX_GROWTH`, so that copies are rare. It also makes room for `expected`
        slots and for the columns needed `soon`. Close to the limit it takes what is left.
        """
        slots = len(rows)
        columns = max(rows, default=0)
        self._rows = tuple(rows)
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if self.has(slots, columns):
            return False
        # a planned rectangle that is large enough is taken, because contents may be copied to it already
        if (
            self.planned is None
            or slots > self.planned[0]
            or columns > self.planned[1]
            or not self._is_allowed(*self.planned)
        ):
            self.planned = self._larger(slots, columns, expected, soon)
        (self.slots, self.columns), self.planned, self.ready = self.planned, None, False
        return True

    def plan(self, slots: int, columns: int, expected: int) -> None:
        """Plan the rectangle that will soon be needed to `cover` slots x columns, if the limits allow it."""
        planned = self.planned or (0, 0)
        if (slots > planned[0] or columns > planned[1]) and self._is_allowed(slots, columns):
            self.planned = self._larger(slots, columns, expected, columns)
            self.ready = False

    def _larger(self, slots: int, columns: int, expected: int, soon: int) -> tuple[int, int]:
        # From 4 slots x 512 columns, a fifth row makes 8 slots (not 5), and a row of 600 tokens 1024 columns (not 600):
        # growing one by one would copy the whole cache each time. If 8 x 1024 exceeds the limit, exactly the slots that
        # are needed share the columns that are left.
        wide, long = self.slots, self.columns
        if slots > wide:
            wide = max(slots, min(max(2 * wide, expected), self._most_slots))
        if columns > long:
            long = max(columns, soon, int(min(long + min(long, _MAX_GROWTH), self.context + _GRANULE)))
            long += -long % _GRANULE
        if not self._is_allowed(wide, long):
            wide = slots
            long = int(min(long, self.max_tokens(slots) // slots - self.state_columns))
        return wide, max(long, columns)

    def _is_allowed(self, slots: int, columns: int) -> bool:
        return self._sparse(columns) or self.fits([columns] * slots)

    def exhausted(self) -> None:
        """Record that memory ran out for the rectangle of `cover`; half of it is the limit until the engine is idle."""
        self._memory_limit = self.tokens // 2
        self.slots = 0
        self.planned = None

    def shrink(self) -> bool:
        """Give back what wasn't needed since the engine was last idle; return whether the rectangle changed."""
        slots, columns = self._peak
        self._peak = (0, 0)
        self._memory_limit = math.inf
        self._rows = ()
        self.planned = None
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.slots * self.columns:  # it would free less than half
            return False
        self.slots = slots
        self.columns = columns
        return True

    def _sparse(self, columns: int) -> bool:
        return self._dense is not None and columns > self._dense

    def max_tokens(self, slots: int) -> float:
        """Maximum number of tokens that `slots` slots may take memory for."""
        return min(math.inf if self.limit is None else self.limit, self._memory_limit if slots > 1 else math.inf)


class StagedCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers cache that stages the keys and values of one pass over rows of a slot cache.

    It lives as long as the pass. `layout` is set in a ragged pass. Recurrent layers use its `states`.
    """

    def __init__(self, slots: SlotCache, staging: Staging, layout: RaggedLayout | None = None) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.staging = staging
        self.layout = layout
        self.states = slots.states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.layout is not None:  # [1, Hkv, T, D]
            key_states = self.layout.pad_heads(key_states)
            value_states = self.layout.pad_heads(value_states)
        return self.slots.write(layer_idx, key_states, value_states, self.staging)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.staging.first
