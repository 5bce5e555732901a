"""Suffix decoding (SuffixDecoding, NeurIPS 2025, arXiv 2411.04975): what followed the last tokens before, by counts.

Two texts are searched: the request's own, prompt and answer, and the finished answers of its owner. The longer the
match, the longer the draft; the better of both drafts is taken. It needs no weights, and drafts nothing where nothing
is repeated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch

from eyas.drafters.history import LookupDrafter
from eyas.drafters.suffix_index import SuffixIndex, SuffixLimits
from eyas.targets import Target
from eyas.tree import TreeSpec
from eyas.tree.proposal import Proposal

_MOST_FANOUT = 64
"""As many children of a node as are ever proposed; more would each be less likely than one in 64."""
ANSWER_TOKENS = 2**17
"""The most tokens of finished answers kept for an owner."""
ALL_ANSWER_TOKENS = 2**20
"""The most tokens of finished answers kept for all owners together: with the room to grow at most 8 MB."""
OWNERS = 256
"""The most owners whose finished answers are kept."""


class FinishedAnswers:
    """The answers of some owners, first in first out. Those of one owner never serve another."""

    def __init__(
        self, limits: SuffixLimits, per_owner: int = ANSWER_TOKENS, total: int = ALL_ANSWER_TOKENS, owners: int = OWNERS
    ) -> None:
        """At most so many tokens for an owner and for all, of at most so many owners."""
        self._limits, self._per_owner, self._total, self._most = limits, per_owner, total, owners
        self._indexes: OrderedDict[str, SuffixIndex] = OrderedDict()  # who finished an answer last comes last
        self._sizes: dict[str, deque[int]] = {}  # of each owner's answers, oldest first
        self._tokens = 0

    def __len__(self) -> int:
        """The tokens of all answers, and one more for each."""
        return self._tokens

    def index(self, owner: str) -> SuffixIndex | None:
        """An owner's answers; None if there are none."""
        return self._indexes.get(owner)

    def add(self, owner: str, answer: Sequence[int]) -> None:
        """Keep an answer. The owner's oldest ones are dropped for it, and owners who finished none for long."""
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


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the longest and most telling suffix of a sequence, in itself or in finished answers."""

    max_fanout = _MOST_FANOUT

    def __init__(self, device: torch.device, limits: SuffixLimits | None = None) -> None:
        """For a target on `device`. Raises UsageError for limits that make no sense."""
        self._limits = limits or SuffixLimits()
        self._limits.check()
        nodes = self._limits.nodes(self._limits.longest)
        self.default_tree = f"dynamic:{nodes},8,{nodes}"
        super().__init__(device)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self.answers = FinishedAnswers(self._limits)
        self._indexes = [SuffixIndex(self._limits) for _ in range(slots)]
        """For each slot its tokens, as far as they were known at the last draft."""
        self._owners = [("", 0)] * slots
        """For each slot the sequence's owner and how long its prompt is."""

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self._indexes = [
            *self._indexes[:slots],
            *(SuffixIndex(self._limits) for _ in range(slots - len(self._indexes))),
        ]
        self._owners = [*self._owners[:slots], *[("", 0)] * (slots - len(self._owners))]

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:
        super().begin(slot, prompt, owner)
        self._indexes[slot] = SuffixIndex(self._limits)
        self._owners[slot] = (owner, len(prompt))

    def finish(self, slot: int) -> None:
        """Keep the answer for its owner's later sequences; one without an owner is kept for nobody."""
        owner, prompt = self._owners[slot]
        answer = self._tokens[slot][prompt:]
        if owner and answer:
            self.answers.add(owner, answer)

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._indexes[slot].truncate(len(self._tokens[slot]))

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._owners[target] = self._owners[source]
        self._indexes[target], self._indexes[source] = self._indexes[source], SuffixIndex(self._limits)

    def propose(self, slot: int, tokens: Sequence[int], depth: int, fanout: int = _MOST_FANOUT) -> Proposal:
        """The better draft of the two texts; `fanout` 1 makes it a chain."""
        own = self._indexes[slot]
        own.append(tokens[len(own) :])
        last = tokens[-self._limits.longest :]
        draft = own.draft(last, depth, fanout)
        answers = self.answers.index(self._owners[slot][0])
        if answers is not None:
            others = answers.draft(last, depth, fanout, draft.score)
            draft = others if others.score > draft.score else draft
        return draft.proposal

    def propose_within(self, slot: int, spec: TreeSpec) -> Proposal:
        return self.propose(slot, self._tokens[slot], spec.depth, min(spec.max_fanout, _MOST_FANOUT))


def make(target: Target) -> SuffixDrafter:
    """Suffix decoding with the default limits."""
    return SuffixDrafter(target.device)
