"""Start-time fair queueing between keys (Goyal, Vin, Cheng 1996).

Every request gets a start tag: the queue's virtual time, or the moment its key's last request ends on that clock if
that is later. The smallest tag goes first. A request lasts as long as the tokens it may come to, so keys that keep
the queue filled are served in equal shares of tokens, and a key that comes new is served next, however many of
another's wait. Preempted sequences come before all others, oldest first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from eyas.engine.sequence import SequenceState


class FairQueue:
    """The sequences that wait for a slot, in the order in which they get one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceState]] = []
        self._waiting: dict[int, SequenceState] = {}
        self._returned: list[tuple[int, SequenceState]] = []  # a heap too
        self._finish_times: dict[str, float] = {}
        self._time = 0.0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._waiting.values())

    def __contains__(self, sequence: SequenceState) -> bool:
        return self._waiting.get(sequence.index) is sequence

    def count(self, key: str) -> int:
        """The number of sequences that wait for `key`."""
        return self._counts[key]

    def push(self, sequence: SequenceState) -> None:
        """Queue a new sequence behind its key's others."""
        start = max(self._time, self._finish_times.get(sequence.key, 0.0))
        self._finish_times[sequence.key] = start + sequence.longest
        heapq.heappush(self._heap, (start, sequence.index, sequence))
        self._enter(sequence)

    def push_front(self, sequence: SequenceState) -> None:
        """Queue a sequence that had a slot and lost it before all new ones."""
        heapq.heappush(self._returned, (sequence.index, sequence))
        self._enter(sequence)

    def peek(self) -> SequenceState | None:
        """The sequence that is next; None if none waits."""
        self._skip_removed()
        if self._returned:
            return self._returned[0][1]
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceState:
        """Remove and return the next sequence. IndexError if none waits."""
        self._skip_removed()
        if self._returned:
            sequence = heapq.heappop(self._returned)[1]
        else:
            self._time, _, sequence = heapq.heappop(self._heap)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence wherever it stands."""
        del self._waiting[sequence.index]
        self._counts[sequence.key] -= 1
        if not self._counts[sequence.key]:
            del self._counts[sequence.key]
        if not self._waiting:
            self._heap.clear()
            self._returned.clear()
            self._finish_times.clear()
            self._time = 0.0
        elif len(self._finish_times) > 64 + 2 * len(self._counts):
            self._finish_times = {key: end for key, end in self._finish_times.items() if end > self._time}

    def _enter(self, sequence: SequenceState) -> None:
        self._waiting[sequence.index] = sequence
        self._counts[sequence.key] += 1

    def _skip_removed(self) -> None:
        while self._returned and self._returned[0][1] not in self:
            heapq.heappop(self._returned)
        while self._heap and self._heap[0][2] not in self:
            heapq.heappop(self._heap)
