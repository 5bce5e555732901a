"""Decoding with a draft network that attends to a window.

What differs from `NetworkDrafter` is what a slot keeps. Passes that would cross a step of a row's window are split
there, so that a pair sees the same whatever else is read with it. Deferred pairs that would be dropped as soon as they
are read are forgotten unread, where the network has one layer: there a pair's keys and values depend on no other pair.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.network import DraftNetwork, Rotary
from eyas.drafters.window.cache import STAGED, SavedSpan, WindowCache
from eyas.drafters.window.window import Window
from eyas.errors import UnsupportedModelError, UsageError
from eyas.targets.graphs import Record


class WindowPairs(NamedTuple):
    """The pairs `[start, start + read + unread)` of a row, copied as far as its slot still had them."""

    start: int
    read: int
    spans: tuple[SavedSpan, ...]
    """Those of the pairs that were read which were kept."""
    deferred: tuple[Tensor, Tensor] | None  # tokens [1, n], taps [1, n, A, Ht]

    @property
    def unread(self) -> int:
        return 0 if self.deferred is None else self.deferred[0].shape[1]

    @property
    def missing(self) -> int:
        """How many of the pairs were dropped before they were copied."""
        return self.read - sum(span.stop - span.first for span in self.spans)

    @property
    def held(self) -> list[tuple[int, int]]:
        """The pairs that are there, as ranges of a row's indexes."""
        end = self.start + self.read
        return [*((span.first, span.stop) for span in self.spans), (end, end + self.unread)]


class WindowDrafter(NetworkDrafter):
    """A drafter whose slots keep the sinks and the last pairs of their rows."""

    forgets = True
    _cache: WindowCache

    def __init__(
        self, network: DraftNetwork, taps: tuple[int, ...], window: Window, record: Record | None = None
    ) -> None:
        """Decode with `network` in a `window`. Raises UnsupportedModelError for networks that don't rotate keys."""
        rotary = getattr(network, "rotary", None)
        if not isinstance(rotary, Rotary):
            raise UnsupportedModelError(f"{type(network).__name__} has no RoPE of its own, as a window needs")
        self.window, self._rotary = window, rotary
        self._forgets_unread = len(network.kv_shapes) == 1
        super().__init__(network, taps, record)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        shapes, dtype, device = self.network.kv_shapes, self.network.dtype, self._ids.device
        cache = WindowCache(shapes, slots, dtype, device, self.window, self._rotary.turned)
        cache.graphs, self._cache = self._cache.graphs, cache

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, min(columns, self._cache.most))

    def length(self, slot: int) -> int:
        return self._cache.read(slot) + self._deferred.lengths[slot]

    def kept_from(self, slot: int) -> int:
        return self._cache.kept_from(slot) if self._cache.dropped[slot] else 0

    def whole(self, saved: WindowPairs) -> bool:
        return not saved.missing

    @torch.inference_mode()
    def save(self, slot: int, start: int, stop: int) -> WindowPairs:  # type: ignore[override]  # of its own form
        read = self._cache.read(slot)
        between = min(max(read, start), stop)
        deferred = None if between == stop else self._deferred.copy_out(slot, between - read, stop - read)
        return WindowPairs(start, between - start, self._cache.spans(slot, start, between), deferred)

    @torch.inference_mode()
    def load(self, slot: int, saved: WindowPairs, count: int) -> None:  # type: ignore[override]
        read = min(count, saved.read)
        if read:
            if self._deferred.lengths[slot]:
                raise UsageError("pairs that were read can't follow deferred ones")
            self._cache.append(slot, saved.spans, saved.start + read)
        if saved.deferred is not None and count > read:
            tokens, taps = saved.deferred
            self._deferred.append(range(slot, slot + 1), tokens, taps, [count - read])

    def reusable(self, saved: Sequence[Any], count: int) -> int:
        """The most of the first `count` pairs of `saved` after which the sinks and the whole window are there.

        Those that were read can't follow deferred ones, which have been dropped before they were saved anew.
        """
        for one, following in pairwise(saved):
            if one.unread and following.read:
                count = min(count, following.start)
                break
        ranges: list[tuple[int, int]] = []
        for first, stop in (held for one in saved for held in one.held):
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

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        super().defer(rows, next_tokens, taps, counts)
        for slot in rows:
            if self._deferred.lengths[slot] > 2 * self.window.limit:
                self._forget_unread(slot)

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """See `Drafter.truncate`. Raises UsageError where what would stay of the window was dropped."""
        dropped, read = self._cache.dropped[slot], self._cache.read(slot)
        if self.window.sinks < length < min(read, self.window.sinks + dropped):
            raise UsageError(f"pairs before {self.window.sinks + dropped} are dropped: a row can't end at {length}")
        self._deferred.truncate(slot, max(0, length - read))
        if length < read:
            self._cache.truncate(slot, length if length <= self.window.sinks else length - dropped)

    def catch_up(self, rows: range, wanted: Sequence[bool]) -> None:
        for slot, want in zip(rows, wanted, strict=True):
            if want and self._deferred.lengths[slot] > self.window.step:
                self._forget_unread(slot)
        super().catch_up(rows, wanted)

    @torch.inference_mode()
    def _forget_unread(self, slot: int) -> None:
        """Forget those of a slot's deferred pairs that a row of its length drops; its sinks are read."""
        cache, sinks = self._cache, self.window.sinks
        first = sinks + self.window.dropped(self.length(slot))
        if not self._forgets_unread or first <= max(sinks, cache.read(slot)):
            return
        missing = max(0, sinks - cache.read(slot))
        if missing:
            self._read_deferred(range(slot, slot + 1), [missing])
        self._deferred.drop(slot, missing + first - cache.read(slot))
        cache.skip(slot, first)

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row, in parts within which no row's window moves on."""
        cache, begin = self._cache, 0
        while begin < max(counts):
            left = [max(0, count - begin) for count in counts]
            reading = [slot for slot, more in zip(rows, left, strict=True) if more]
            for slot in reading:
                if cache.lengths[slot] == self.window.limit:
                    cache.slide(slot, cache.dropped[slot] + self.window.step)
            part = min(STAGED, max(left), *(self.window.limit - cache.lengths[slot] for slot in reading))
            end = begin + part
            super()._read(rows, next_tokens[:, begin:end], taps[:, begin:end], [min(more, part) for more in left])
            begin = end
