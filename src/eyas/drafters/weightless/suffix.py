"""Suffix decoding (SuffixDecoding, NeurIPS 2025, arXiv 2411.04975): the most frequent continuations of the last tokens.

Three texts are searched: the request's own prompt and answer, what its answer is predicted to be, and the finished
answers of its owner. The longer the match, the longer the draft; the best of the drafts is taken. It needs no weights,
and drafts nothing if nothing is repeated.

Shapes: n occurrences, W tokens before or after each.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from typing_extensions import Self

from eyas.drafters.history import LONGEST_MATCH, History, LookupDrafter, TokenPairs, continuation_rate
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.targets.native.library import Kernels, SuffixSearch, kernels
from eyas.tree.draft_tree import Proposal
from eyas.types import NO_OWNER, Owner

_MAX_FANOUT = 64
"""Maximum number of children proposed for a node; any more would each be less likely than one in 64."""
ANSWER_TOKENS = 2**17
"""Maximum number of tokens of finished answers kept for an owner."""
ALL_ANSWER_TOKENS = 2**20
"""Maximum number of tokens of finished answers kept for all owners together: at most 8 MB including room to grow."""
OWNERS = 256
"""Maximum number of owners whose finished answers are kept."""


class FinishedAnswers:
    """Finished answers by owner, first in first out. One owner's answers never serve another."""

    def __init__(
        self, limits: SuffixLimits, per_owner: int = ANSWER_TOKENS, total: int = ALL_ANSWER_TOKENS, owners: int = OWNERS
    ) -> None:
        """Keep at most `per_owner` tokens of an owner and `total` tokens of all, of at most `owners` owners."""
        self._limits = limits
        self._per_owner = per_owner
        self._total = total
        self._most = owners
        self._indexes: OrderedDict[Owner, SuffixIndex] = OrderedDict()  # least recent answer first
        self._sizes: dict[Owner, deque[int]] = {}  # of each owner's answers, oldest first
        self._tokens = 0

    def __len__(self) -> int:
        """The number of tokens of all answers, plus one for each answer."""
        return self._tokens

    def index(self, owner: Owner) -> SuffixIndex | None:
        """An owner's answers; None if there are none."""
        return self._indexes.get(owner)

    def add(self, owner: Owner, answer: Sequence[int]) -> None:
        """Keep an answer; if limits are exceeded, drop the owner's oldest answers and the least recent owners."""
        answer = answer[-(self._per_owner - 1) :]
        index = self._indexes.setdefault(owner, SuffixIndex(self._limits))
        sizes = self._sizes.setdefault(owner, deque())
        dropped = 0
        while len(index) - dropped + len(answer) + 1 > self._per_owner:
            dropped += sizes.popleft()
        index.drop(dropped)
        index.append(answer)
        index.end_text()
        sizes.append(len(answer) + 1)
        self._tokens += sizes[-1] - dropped
        self._indexes.move_to_end(owner)
        while self._tokens > self._total or len(self._indexes) > self._most:
            leaving, index = self._indexes.popitem(last=False)
            del self._sizes[leaving]
            self._tokens -= len(index)


class SuffixHistory(History):
    """A sequence, and the index of its suffixes."""

    def __init__(self, limits: SuffixLimits, prompt: Sequence[int] = (), owner: Owner = NO_OWNER) -> None:
        super().__init__(prompt, owner)
        self._limits = limits
        self._index = SuffixIndex(limits)
        self._prompt = len(prompt)
        self.prediction: SuffixIndex | None = None
        """What the answer is expected to repeat, after the prompt's end: so its beginning is a long match."""

    def expect(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.prediction = SuffixIndex(self._limits)
        self.prediction.append([*prompt[-self._limits.longest :], *answer])

    def predicted(self, depth: int, fanout: int, floor: float = 0.0) -> SuffixDraft:
        """The draft from the prediction; empty without one, or if its score isn't above `floor`."""
        if self.prediction is None:
            return SuffixDraft(Proposal(), floor)
        draft = self.prediction.draft(self.tokens[-self._limits.longest :], depth, fanout, floor)
        return draft._replace(proposal=replace(draft.proposal, predicted=True))

    def following(self, depth: int, fanout: int) -> SuffixDraft:
        """The better draft of the prediction's and that of the sequence itself; of equals, the prediction's."""
        predicted = self.predicted(depth, fanout)
        own = self.index().draft(self.tokens[-self._limits.longest :], depth, fanout, predicted.score)
        return own if own.score > predicted.score else predicted

    def cut(self) -> None:
        self._index.truncate(len(self.tokens))

    def index(self) -> SuffixIndex:
        """The index of all tokens so far."""
        self._index.append(self.tokens[len(self._index) :])
        return self._index

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt, which later drafts may copy once the sequence is complete."""
        return self.tokens[self._prompt :]


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the best-matching suffix of a sequence, in itself or in finished answers."""

    max_fanout = _MAX_FANOUT
    pairs: TokenPairs[SuffixHistory]

    def __init__(self, device: torch.device, limits: SuffixLimits | None = None) -> None:
        """Draft for a target on `device`. Raises UsageError for invalid limits."""
        self._limits = limits or SuffixLimits()
        self._limits.check()
        kernels()  # compile them now if necessary, not during a round
        self.fixed_tree = "dynamic:32,8,32"
        self.answers = FinishedAnswers(self._limits)
        super().__init__(TokenPairs(partial(SuffixHistory, self._limits)), device)

    def fresh(self) -> Self:
        made = super().fresh()
        made.answers = FinishedAnswers(self._limits)
        return made

    def finish(self, slot: int) -> None:
        """Keep the answer for its owner's later sequences; answers without an owner aren't kept."""
        history = self.pairs[slot]
        if history.owner.key and history.answer:
            self.answers.add(history.owner, history.answer)

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:
        """The best of the drafts from all texts; `fanout` 1 makes it a chain."""
        history = self.pairs[slot]
        fanout = min(fanout, _MAX_FANOUT)
        draft = history.following(depth, fanout)
        if (answers := self.answers.index(history.owner)) is not None:
            other = answers.draft(history.tokens[-self._limits.longest :], depth, fanout, draft.score)
            draft = other if other.score > draft.score else draft
        return draft.proposal


def make(target: Target) -> SuffixDrafter:
    """Suffix decoding with the default limits."""
    return SuffixDrafter(target.device)


Array = npt.NDArray[np.int32]

_SEPARATOR = -1
"""Marks positions without a token: before the first text, after the last text, and between two texts."""
_MISMATCH = -2
"""Differs from every value in a text."""
_MAX_AT_ONCE = 512
"""Up to this many occurrences are compared in one operation; while there are more, token by token."""


class SuffixLimits(NamedTuple):
    """Limits of a draft: at most `factor * m + offset` tokens after a match of m tokens, and only likely ones."""

    factor: float = 2.0
    offset: float = 0.0
    min_probability: float = 0.1
    """Minimum probability of a token's whole path, estimated from the counts."""
    longest: int = LONGEST_MATCH
    """Longer matches count as matches of this length."""
    max_tokens: int = 64
    """Maximum number of tokens of a draft."""

    def check(self) -> None:
        """Raise UsageError for invalid limits."""
        if (
            self.factor < 0.0
            or not 0.0 < self.min_probability <= 1.0
            or self.longest < 1
            or self.nodes(self.longest) < 1
        ):
            raise UsageError(
                f"suffix: factor {self.factor}, offset {self.offset}, min_probability {self.min_probability}, "
                f"longest {self.longest}, max_tokens {self.max_tokens}: write factor >= 0, 0 < min_probability <= 1, "
                "longest >= 1, max_tokens >= 1, factor * longest + offset >= 1"
            )

    def nodes(self, match: int) -> int:
        """Maximum number of tokens to draft after a match of `match` tokens."""
        return min(self.max_tokens, int(self.factor * match + self.offset + 1e-6))


class SuffixDraft(NamedTuple):
    """A proposal, and its expected number of correct tokens according to the counts."""

    proposal: Proposal
    score: float


class SuffixIndex:
    """Suffix counts of a text that grows at its end and can be cut at both ends, or of several texts, one after
    another.

    The counts equal a suffix tree's but are taken from the text itself: a search for one token among a hundred thousand
    takes about 50 microseconds, appending and cutting are copies, and memory is four bytes per token. As in a tree, an
    occurrence at the end of a text counts as one that nothing followed.
    """

    def __init__(self, limits: SuffixLimits | None = None) -> None:
        """An empty text. Raises UsageError."""
        self._limits = limits or SuffixLimits()
        self._limits.check()
        self._before, self._after = self._limits.longest + 1, self._limits.nodes(self._limits.longest)
        self._margin = max(self._before, self._after)
        tokens, parents, logprobs = self._made = *np.empty((2, self._after), np.int64), np.empty(self._after)
        self._search = SuffixSearch(
            factor=self._limits.factor,
            offset=self._limits.offset,
            most=self._limits.max_tokens,
            least=self._limits.min_probability,
            longest=self._limits.longest,
            tokens=tokens.ctypes.data,
            parents=parents.ctypes.data,
            logprobs=logprobs.ctypes.data,
        )
        self._size = 0
        self._reserve(64)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """The size of the texts' buffer in bytes, including room to grow."""
        return self._buffer.nbytes

    def append(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the end of the last text."""
        end = self._size + len(tokens)
        if end > self._room:
            self._reserve(max(end, 2 * self._room))
        self._text[self._size : end] = tokens
        self._size = end

    def end_text(self) -> None:
        """End the text with a separator, which takes one token's room, so that no match spans two texts."""
        self.append((_SEPARATOR,))

    def truncate(self, size: int) -> None:
        """Forget all but the first `size` tokens."""
        if size < self._size:
            self._text[size : self._size] = _SEPARATOR
            self._size = size

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens."""
        kept = self._text[count : self._size].copy()
        self.truncate(len(kept))
        self._text[: self._size] = kept

    def draft(self, context: Sequence[int], depth: int, fanout: int, floor: float = 0.0) -> SuffixDraft:
        """The best draft that any suffix of `context` gives: at most `depth` levels, `fanout` children per node.

        Each suffix gives a draft grown from the most probable token to the next. The draft with the highest score wins;
        on ties, the longer suffix. The draft is empty if the text is empty, if the last token is new, or if no score is
        above `floor`.
        """
        if (native := kernels()) is not None:
            return self._searched(native, context, depth, fanout, floor)
        best = SuffixDraft(Proposal(), floor)
        stops, lengths = self._matches(context)
        for match in np.unique(lengths)[::-1].tolist():
            nodes = self._limits.nodes(match)
            if nodes <= best.score:
                break  # shorter matches may draft even less
            found = self._grown(stops[lengths >= match], match, nodes, depth, fanout, best.score)
            if found.score > best.score:
                best = found
        return best

    def _searched(self, native: Kernels, context: Sequence[int], depth: int, fanout: int, floor: float) -> SuffixDraft:
        """`draft` by a kernel, which between two passes takes a tenth of NumPy's time."""
        last = np.array(context[-self._limits.longest :], np.int32)
        search = self._search
        search.size = self._size
        search.context = last.ctypes.data
        search.known = len(last)
        search.depth = depth
        search.fanout = fanout
        search.score = floor
        count = native.suffix(search)
        return SuffixDraft(Proposal(*(part[:count].tolist() for part in self._made)), search.score)

    def _reserve(self, room: int) -> None:
        """Move the text to buffers that hold `room` tokens."""
        margin = self._margin
        kept = self._text[: self._size] if self._size else np.empty(0, np.int32)
        self._room = room
        self._buffer: Array = np.full(margin + room + margin, _SEPARATOR, np.int32)
        self._text: Array = self._buffer[margin:-margin]
        self._text[: self._size] = kept
        self._search.text = self._text.ctypes.data
        # row i: the tokens before position i of the text, and from it on
        self._windows_before = sliding_window_view(self._buffer[margin - self._before :], self._before)
        self._windows_after = sliding_window_view(self._buffer[margin:], self._after)

    def _matches(self, context: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ends of all occurrences of the context's last token, and the match length at each [n]."""
        if not context:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        stops = np.flatnonzero(self._text[: self._size] == context[-1]) + 1
        lengths = np.ones(len(stops), np.int64)
        longer = np.arange(len(stops))
        length = 1
        while len(longer) > _MAX_AT_ONCE and length < min(len(context), self._limits.longest):
            length += 1
            at = stops[longer] + (self._margin - length)
            longer = longer[self._buffer[at] == context[-length]]
            lengths[longer] = length
        pattern = np.full(self._before, _MISMATCH, np.int32)
        known = context[-self._limits.longest :]
        pattern[self._before - len(known) :] = known
        unlike = self._windows_before[stops[longer]] != pattern  # [n, W], the first column always
        lengths[longer] = unlike[:, ::-1].argmax(axis=1)
        return stops, lengths

    def _grown(
        self, stops: npt.NDArray[np.int64], match: int, nodes: int, depth: int, fanout: int, floor: float
    ) -> SuffixDraft:
        """The most probable continuations of occurrences that end at `stops`, up to `nodes` tokens.

        The last `match` tokens before each are those of the context. Growth stops early if the score can't exceed
        `floor`.
        """
        made = Proposal()
        score = 0.0
        following = self._windows_after[stops, : min(nodes, depth)]  # [n, W]
        queue = _children(following, match, 0, 1.0, -1, fanout, self._limits.min_probability)
        while queue and len(made.tokens) < nodes:
            child = heapq.heappop(queue)
            probability = -child.order[0]
            level = child.level
            if score + probability * (nodes - len(made.tokens)) <= floor:
                break
            rows = child.rows[child.chosen]
            made.tokens.append(child.token)
            made.parents.append(child.parent)
            made.logprobs.append(math.log(child.step))
            score += probability
            # while all occurrences continue alike, the next token needs no queue unless another path is as probable
            rival = -queue[0].order[0] if queue else 0.0
            going_on = rows[:, level + 1 : level + 1 + nodes - len(made.tokens)]
            alike = (going_on == going_on[0]).all(axis=0) & (going_on[0] != _SEPARATOR)
            run = going_on.shape[1] if alike.all() else int(alike.argmin())
            level += 1
            parent = len(made.tokens) - 1
            for token in going_on[0, :run].tolist():
                step = continuation_rate(match + level)
                if probability * step < self._limits.min_probability or probability * step <= rival:
                    break
                made.tokens.append(token)
                made.parents.append(parent)
                made.logprobs.append(math.log(step))
                probability *= step
                score += probability
                level, parent = level + 1, parent + 1
            if level < following.shape[1]:
                for each in _children(rows, match, level, probability, parent, fanout, self._limits.min_probability):
                    heapq.heappush(queue, each)
        return SuffixDraft(made, score)


class _Continuation(NamedTuple):
    """A token that may be drafted next; the most probable one sorts first, without ties."""

    order: tuple[float, int, int]
    token: int
    parent: int
    step: float
    """Its probability after its parent."""
    level: int
    rows: Array
    """[n, W] the tokens after the parent's occurrences."""
    chosen: list[int]
    """The indexes of the rows that continue with the token."""


def _children(
    rows: Array, match: int, level: int, probability: float, parent: int, fanout: int, least: float
) -> list[_Continuation]:
    """The most frequent tokens that follow occurrences at a level after a match; on ties, the most recent ones."""
    on = continuation_rate(match + level)
    column = rows[:, level]
    followers: dict[int, list[int]] = {}
    if len(rows) > _MAX_AT_ONCE:  # find the few frequent tokens first
        tokens, counts = np.unique(column, return_counts=True)
        frequent = tokens[probability * (counts / len(rows) * on) >= least]
        followers = {token: np.flatnonzero(column == token).tolist() for token in frequent.tolist()}
    else:
        for row, token in enumerate(column.tolist()):
            followers.setdefault(token, []).append(row)
    followers.pop(_SEPARATOR, None)
    found = []
    for token, chosen in followers.items():
        step = len(chosen) / len(rows) * on
        if probability * step >= least:
            order = (-probability * step, parent, -chosen[-1])
            found.append(_Continuation(order, token, parent, step, level, rows, chosen))
    return sorted(found)[:fanout]
