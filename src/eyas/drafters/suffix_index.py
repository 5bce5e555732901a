"""Counts of a text's suffixes: how often its last tokens occurred before, and what followed them each time.

The counts are those of a suffix tree over the text (SuffixDecoding, arXiv 2411.04975), taken from the text itself: a
search for one token among a hundred thousand takes some 50 microseconds, appending and cutting are copies, and the
memory is four bytes a token. As in a tree, an occurrence at the end of a text counts, as one that nothing followed.

Shapes: n occurrences, W tokens before or after each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from eyas.errors import UsageError
from eyas.tree.proposal import Proposal

Array = npt.NDArray[np.int32]

_NOTHING = -1
"""Stands where there is no token: before the first text, after the last one, and between two."""
_UNLIKE = -2
"""Differs from whatever stands in a text."""
_FEW = 512
"""So many occurrences are compared in one operation; while there are more, token by token."""


class SuffixLimits(NamedTuple):
    """How much is drafted: after a match of m tokens at most `factor * m + offset`, and only what is likely."""

    factor: float = 2.0
    offset: float = 0.0
    least: float = 0.1
    """The least probability, by the counts, of a token's whole path."""
    longest: int = 16
    """Longer matches count as matches of this length."""

    def check(self) -> None:
        """Raise UsageError for limits that make no sense."""
        if self.factor < 0.0 or not 0.0 < self.least <= 1.0 or self.longest < 1 or self.nodes(self.longest) < 1:
            raise UsageError(
                f"suffix: factor {self.factor}, offset {self.offset}, least {self.least}, longest {self.longest}: "
                "write factor >= 0, 0 < least <= 1, longest >= 1, factor * longest + offset >= 1"
            )

    def nodes(self, match: int) -> int:
        """The most tokens to draft after a match of so many."""
        return int(self.factor * match + self.offset + 1e-6)


class SuffixDraft(NamedTuple):
    """A proposal, and how many of its tokens are right on average if the counts are right."""

    proposal: Proposal
    score: float


class SuffixIndex:
    """A text, or several one after the other, that grows at its end and can be cut at both."""

    def __init__(self, limits: SuffixLimits | None = None) -> None:
        """An empty text. Raises UsageError."""
        self._limits = limits or SuffixLimits()
        self._limits.check()
        self._before, self._after = self._limits.longest + 1, self._limits.nodes(self._limits.longest)
        self._margin = max(self._before, self._after)
        self._size = 0
        self._reserve(64)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """The memory taken, in bytes."""
        return self._buffer.nbytes

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with the last text."""
        end = self._size + len(tokens)
        if end > self._room:
            self._reserve(max(end, 2 * self._room))
        self._text[self._size : end] = tokens
        self._size = end

    def end_text(self) -> None:
        """Let another text begin, which takes a token's room: nothing occurs half in one text, half in the next."""
        self.append((_NOTHING,))

    def truncate(self, size: int) -> None:
        """Forget all but the first `size` tokens."""
        if size < self._size:
            self._text[size : self._size] = _NOTHING
            self._size = size

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens."""
        kept = self._text[count : self._size].copy()
        self.truncate(len(kept))
        self._text[: self._size] = kept

    def draft(self, context: Sequence[int], depth: int, fanout: int) -> SuffixDraft:
        """The best draft that any suffix of `context` gives: at most `depth` levels, `fanout` children a node.

        Every suffix gives one that takes the most probable token first, then the next, and the best is the one with the
        highest score; of equals that of the longer suffix. An empty text, or a new token, gives none.
        """
        best = SuffixDraft(Proposal(), 0.0)
        stops, lengths = self._matches(context)
        for match in np.unique(lengths)[::-1].tolist():
            nodes = self._limits.nodes(match)
            if nodes <= best.score:
                break  # shorter ones may draft even less
            found = self._grown(stops[lengths >= match], nodes, depth, fanout)
            if found.score > best.score:
                best = found
        return best

    def _reserve(self, room: int) -> None:
        """Make room for so many tokens."""
        margin, kept = self._margin, self._text[: self._size] if self._size else np.empty(0, np.int32)
        self._room = room
        self._buffer: Array = np.full(margin + room + margin, _NOTHING, np.int32)
        self._text: Array = self._buffer[margin:-margin]
        self._text[: self._size] = kept
        # row i: the tokens before, from, position i of the text
        self._windows_before = sliding_window_view(self._buffer[margin - self._before :], self._before)
        self._windows_after = sliding_window_view(self._buffer[margin:], self._after)

    def _matches(self, context: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where occurrences of the context's last token end, and how many of its last tokens occur there [n]."""
        if not context:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        stops = np.flatnonzero(self._text[: self._size] == context[-1]) + 1
        lengths = np.ones(len(stops), np.int64)
        longer, length = np.arange(len(stops)), 1
        while len(longer) > _FEW and length < min(len(context), self._limits.longest):
            length += 1
            at = stops[longer] + (self._margin - length)
            longer = longer[self._buffer[at] == context[-length]]
            lengths[longer] = length
        pattern = np.full(self._before, _UNLIKE, np.int32)
        known = context[-self._limits.longest :]
        pattern[self._before - len(known) :] = known
        unlike = self._windows_before[stops[longer]] != pattern  # [n, W], the first column always
        lengths[longer] = unlike[:, ::-1].argmax(axis=1)
        return stops, lengths

    def _grown(self, stops: npt.NDArray[np.int64], nodes: int, depth: int, fanout: int) -> SuffixDraft:
        """The most probable continuations of occurrences that end there, up to `nodes` of them."""
        made, score = Proposal(), 0.0
        following = self._windows_after[stops, : min(nodes, depth)]  # [n, W]
        queue = [*_children(following, 0, 1.0, -1, fanout, self._limits.least)]
        heapq.heapify(queue)
        while queue and len(made.tokens) < nodes:
            child = heapq.heappop(queue)
            rows, level, probability = child.rows, child.level, -child.order[0]
            parent = len(made.tokens)
            made.tokens.append(child.token)
            made.parents.append(child.parent)
            made.logprobs.append(math.log(child.ratio))
            # as long as all occurrences go on alike, nothing is more probable than the next token
            going_on = rows[:, level + 1 : level + 1 + nodes - len(made.tokens)]
            alike = (going_on == going_on[0]).all(axis=0) & (going_on[0] != _NOTHING)
            run = going_on.shape[1] if alike.all() else int(alike.argmin())
            made.tokens += going_on[0, :run].tolist()
            made.parents += range(parent, parent + run)
            made.logprobs += [0.0] * run
            score += probability * (1 + run)
            level += run + 1
            if level < following.shape[1] and len(rows) > 1:
                for each in _children(rows, level, probability, parent + run, fanout, self._limits.least):
                    heapq.heappush(queue, each)
        return SuffixDraft(made, score)


class _Continuation(NamedTuple):
    """A token that may be drafted next; the most probable one sorts first, and none are equal."""

    order: tuple[float, int, int]
    token: int
    parent: int
    ratio: float
    """Its share of its parent's occurrences."""
    level: int
    rows: Array
    """What follows those of the occurrences that go on with it [n, W]."""


def _children(
    rows: Array, level: int, probability: float, parent: int, fanout: int, least: float
) -> list[_Continuation]:
    """What follows occurrences at a level: the most frequent tokens; of equals those that followed the last time."""
    column = rows[:, level]
    tokens, counts = np.unique(column, return_counts=True)
    likely = (tokens != _NOTHING) & (probability * counts >= least * len(column))
    found = []
    for token, count in zip(tokens[likely].tolist(), counts[likely].tolist(), strict=True):
        mine = np.flatnonzero(column == token)
        ratio = count / len(column)
        order = (-probability * ratio, parent, -int(mine[-1]))
        found.append(_Continuation(order, token, parent, ratio, level, rows[mine]))
    return sorted(found)[:fanout]
