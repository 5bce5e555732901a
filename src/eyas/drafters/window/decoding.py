"""Decoding with a draft network that attends to a window: a slot keeps only sinks and the last pairs.

Passes that would cross a step of a row's window are split there, so that what a pair sees doesn't depend on the other
pairs of its pass. If the network has one layer, deferred pairs that would be dropped as soon as they are read are
forgotten unread: a pair's keys and values then depend on no other pair.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, Hkv heads, n columns, D head size, G
tensors of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkPairs, SavedNetworkPairs
from eyas.drafters.network import DraftNetwork, Rotary
from eyas.drafters.window.window import Window
from eyas.errors import UnsupportedModelError, UsageError
from eyas.runtime import inference
from eyas.targets.graphs import Record
from eyas.targets.slots import KVShape, Saved, SlotCache

RotateKeys = Callable[[Tensor, int], Tensor]
"""(keys [..., D], positions) -> the keys, rotated further by `positions`."""

STAGING_COLUMNS = 256
"""Columns reserved for staging; larger draft trees extend them."""


class SavedSpan(NamedTuple):
    """Consecutive pairs that were copied out of a slot."""

    first: int
    """The index of the first pair in its row."""
    stop: int
    dropped: int
    """How far the positions of their keys lie below their indexes."""
    columns: Saved


class WindowCache(SlotCache):
    """A slot cache where `lengths` count the columns of kept pairs, and `dropped` the pairs between sinks and window.

    The columns of a slot are the sinks, then the pairs of the window, in order. A key is rotated by its column index.
    When a window moves on, the remaining pairs are copied to the columns after the sinks and their keys rotated back by
    the same distance. The last pairs dropped are kept aside: a row that is loaded again a little shorter needs them.
    """

    def __init__(
        self,
        layers: Sequence[tuple[KVShape, KVShape]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        window: Window,
        turn: RotateKeys,
    ) -> None:
        self.window = window
        self._turn = turn
        self.dropped = [0] * slots
        self._last_step: list[SavedSpan | None] = [None] * slots
        """The pairs that each slot dropped last."""
        super().__init__(layers, slots, dtype, device)

    @property
    def max_capacity(self) -> int:
        """Maximum number of a slot's columns, however long its row is; only large draft trees need more."""
        return self.window.limit + STAGING_COLUMNS

    def reserve(self, columns: int, staged: int = 0) -> None:
        if columns > self.capacity:
            self.reshape(self.slots, max(columns, min(2 * self.capacity, self.max_capacity)), staged)

    def reshape(self, slots: int, capacity: int, staged: int = 0) -> None:
        super().reshape(slots, capacity, staged)
        self.dropped = self.dropped[:slots] + [0] * (slots - len(self.dropped))
        self._last_step = self._last_step[:slots] + [None] * (slots - len(self._last_step))

    def length(self, slot: int) -> int:
        """How many of a row's pairs were read, dropped ones included."""
        return self.lengths[slot] + self.dropped[slot]

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.dropped[target] = self.dropped[source]
        self.dropped[source] = 0
        self._last_step[target] = self._last_step[source]
        self._last_step[source] = None

    def truncate(self, slot: int, length: int) -> None:
        """Drop a row's pairs from `length` on. Raises UsageError if `length` lies among pairs dropped before."""
        sinks = self.window.sinks
        dropped = self.dropped[slot]
        read = self.length(slot)
        if sinks < length < min(read, sinks + dropped):
            raise UsageError(f"pairs before {sinks + dropped} are dropped: a row can't end at {length}")
        if length <= sinks:
            self.dropped[slot] = 0
            self._last_step[slot] = None
        super().truncate(slot, length if length <= sinks else length - dropped)

    def kept_from(self, slot: int) -> int:
        """The index of the pair from which on all of a row's pairs can be copied."""
        last = self._last_step[slot]
        return self.window.sinks + self.dropped[slot] if last is None else last.first

    def slide(self, slot: int, dropped: int) -> None:
        """Move a slot's window on until `dropped` pairs are dropped; a no-op if they already are."""
        by = dropped - self.dropped[slot]
        sinks = self.window.sinks
        used = self.lengths[slot]
        if by <= 0:
            return
        kept = max(0, used - sinks - by)
        self._last_step[slot] = None
        if kept:
            first = sinks + max(0, by - self.window.step)
            end = sinks + by
            dropped_before = self.dropped[slot]
            self._last_step[slot] = SavedSpan(
                first + dropped_before, end + dropped_before, dropped_before, self.copy_out(slot, first, end)
            )
            for keys, values in self._layers(slot):
                keys[:, sinks : sinks + kept] = self._turn(keys[:, used - kept : used], -by)
                values[:, sinks : sinks + kept] = values[:, used - kept : used].clone()
        self.lengths[slot] = min(used, sinks) + kept
        self.dropped[slot] = dropped

    def skip(self, slot: int, first: int) -> None:
        """Drop all pairs of the window, so that the next pair read is the row's pair `first`."""
        self.lengths[slot] = min(first, self.window.sinks)
        self.dropped[slot] = first - self.lengths[slot]
        self._last_step[slot] = None

    def spans(self, slot: int, start: int, stop: int) -> tuple[SavedSpan, ...]:
        """Copies of the kept pairs among a row's pairs `[start, stop)`: sinks, the last step, and the window."""
        sinks = self.window.sinks
        dropped = self.dropped[slot]
        last = self._last_step[slot]
        found = []
        if start < min(stop, sinks):
            found.append(SavedSpan(start, min(stop, sinks), 0, self.copy_out(slot, start, min(stop, sinks))))
        if last is not None and max(start, last.first) < min(stop, last.stop):
            first = max(start, last.first)
            end = min(stop, last.stop)
            columns = [part[:, :, first - last.first : end - last.first].clone() for part in last.columns]
            found.append(SavedSpan(first, end, last.dropped, columns))
        first = max(start, sinks + dropped)
        if first < stop:
            found.append(SavedSpan(first, stop, dropped, self.copy_out(slot, first - dropped, stop - dropped)))
        return tuple(found)

    def append(self, slot: int, spans: Sequence[SavedSpan], stop: int) -> None:
        """Append the pairs of `spans` before the row's pair `stop` that a row of `stop` pairs keeps.

        If such a pair is in no span, the window is shorter.
        """
        sinks = self.window.sinks
        self.slide(slot, self.window.dropped(stop))
        for span in spans:
            first = span.first if span.first < sinks else max(span.first, sinks + self.dropped[slot])
            count = min(span.stop, stop) - first
            if count <= 0:
                continue
            if first >= sinks and first > self.length(slot):
                self.skip(slot, first)
            begin, by = (first, 0) if first < sinks else (self.lengths[slot], span.dropped - self.dropped[slot])
            self.reserve(begin + count)
            offset = first - span.first
            for group, kept in zip(self._groups.values(), span.columns, strict=True):
                group[:, slot, :, begin : begin + count] = kept[:, :, offset : offset + count]
            if by:
                for keys, _ in self._layers(slot):
                    keys[:, begin : begin + count] = self._turn(keys[:, begin : begin + count], by)
            self.lengths[slot] = begin + count
        if self.length(slot) < stop:
            self.skip(slot, stop)

    def _layers(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Views of a slot's keys and values [Hkv, C, D] of each layer."""
        return [
            (self._groups[of_keys][key, slot], self._groups[of_values][value, slot])
            for (of_keys, key), (of_values, value) in self._where
        ]


class WindowPairs(NetworkPairs):
    """Pairs of which each row keeps only the sinks and the last ones."""

    forgets = True
    cache: WindowCache

    def __init__(
        self, network: DraftNetwork, window: Window, fed: torch.dtype | None = None, record: Record | None = None
    ) -> None:
        """See `NetworkPairs`. Raises UnsupportedModelError for networks that don't rotate keys."""
        rotary = getattr(network, "rotary", None)
        if not isinstance(rotary, Rotary):
            raise UnsupportedModelError(f"{type(network).__name__} has no RoPE of its own, which a window needs")
        self.window = window
        self._rotary = rotary
        super().__init__(network, fed, record)

    def make_cache(self, slots: int) -> SlotCache:
        return WindowCache(self.shapes, slots, self.dtype, self.device, self.window, self._rotary.rotated_by)

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, min(columns, self.cache.max_capacity))

    def kept_from(self, slot: int) -> int:
        return self.cache.kept_from(slot) if self.cache.dropped[slot] else 0

    def whole(self, saved: SavedNetworkPairs) -> bool:
        spans: Sequence[SavedSpan] = saved.columns
        return saved.read == sum(span.stop - span.first for span in spans)

    def copy_out(self, slot: int, start: int, stop: int) -> tuple[SavedSpan, ...]:
        return self.cache.spans(slot, start, stop)

    def copy_in(self, slot: int, saved: SavedNetworkPairs, count: int) -> None:
        self.cache.append(slot, saved.columns, saved.start + count)

    def reusable(self, saved: Sequence[SavedNetworkPairs], count: int) -> int:
        """The most of the first `count` pairs of `saved` after which the sinks and the whole window are present.

        Pairs that were read can't follow deferred ones: those were dropped before the later pairs were saved.
        """
        for one, following in pairwise(saved):
            if one.unread and following.read:
                count = min(count, following.start)
                break
        ranges: list[tuple[int, int]] = []
        for first, stop in (there for one in saved for there in _ranges(one)):
            stop = min(stop, count)
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], max(first, stop))
            elif first < stop:
                ranges.append((first, stop))
        if not ranges or ranges[0][0] > 0:
            return 0
        for first, stop in reversed(ranges[1:]):
            if ranges[0][1] >= self.window.sinks and first <= self.window.sinks + self.window.dropped(stop):
                return stop
        return ranges[0][1]

    @inference
    def forget(self, slot: int, read: Callable[[list[int]], None], now: bool) -> None:
        """See `NetworkPairs.forget`. The sinks are always read."""
        sinks = self.window.sinks
        before = self.cache.length(slot)
        first = sinks + self.window.dropped(self.length(slot))
        many = self.unread(slot) > (self.window.step if now else 2 * self.window.limit)
        if not many or len(self.shapes) != 1 or first <= max(sinks, before):
            return
        if before < sinks:
            read([sinks - before])
        self.deferred.drop(slot, first - before)
        self.cache.skip(slot, first)

    def parts(self, rows: range, counts: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Split the pairs into parts within which no row's window moves on."""
        cache = self.cache
        begin = 0
        while begin < max(counts):
            left = [max(0, count - begin) for count in counts]
            reading = [slot for slot, more in zip(rows, left, strict=True) if more]
            for slot in reading:
                if cache.lengths[slot] == self.window.limit:
                    cache.slide(slot, cache.dropped[slot] + self.window.step)
            part = min(STAGING_COLUMNS, max(left), *(self.window.limit - cache.lengths[slot] for slot in reading))
            yield begin, [min(more, part) for more in left]
            begin += part


def _ranges(saved: SavedNetworkPairs) -> list[tuple[int, int]]:
    """The pairs present in `saved`, as index ranges of the row."""
    end = saved.start + saved.read
    return [*((span.first, span.stop) for span in saved.columns), (end, end + saved.unread)]
