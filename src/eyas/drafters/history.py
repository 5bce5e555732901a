"""What drafters without a network know of a sequence: its tokens.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafters.base import Drafter, SavedPairs
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.proposal import Proposal, grow
from eyas.verify import Coupling


class SavedTokens(NamedTuple):
    """The tokens of pairs that were copied out of a slot."""

    tokens: list[int]

    @property
    def unread(self) -> int:
        """None ever is: a token that is known has been read."""
        return 0


class HistoryDrafter(Drafter):
    """Keeps the tokens of each slot's sequence; subclasses draft with them.

    The tokens are read to the host as they are committed: on an accelerator after the round's host sync, when nothing
    is left to wait for.
    """

    taps = ()

    def __init__(self, device: torch.device) -> None:
        """For a target on `device`. There are no slots yet."""
        self._device = device
        self.resize(0)

    @property
    def slots(self) -> int:
        return len(self._tokens)

    def resize(self, slots: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(slots)]

    def reshape(self, slots: int, columns: int) -> None:  # noqa: ARG002
        self._tokens = [*self._tokens[:slots], *([] for _ in range(slots - len(self._tokens)))]

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:  # noqa: ARG002
        self._tokens[slot] = [prompt[0]]

    def length(self, slot: int) -> int:
        return max(0, len(self._tokens[slot]) - 1)

    def unread(self, slot: int) -> int:  # noqa: ARG002
        return 0

    def save(self, slot: int, start: int, stop: int) -> SavedPairs:
        return SavedTokens(self._tokens[slot][start + 1 : stop + 1])

    def load(self, slot: int, saved: Any, count: int) -> None:
        self._tokens[slot] += saved.tokens[:count]

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:  # noqa: ARG002
        if not any(counts):
            return
        for slot, tokens, count in zip(rows, next_tokens.tolist(), counts, strict=True):
            self._tokens[slot] += tokens[:count]

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self.observe(rows, next_tokens, taps, counts)

    def truncate(self, slot: int, length: int) -> None:
        if length < self.length(slot):
            del self._tokens[slot][length + 1 if length else 0 :]

    def move(self, source: int, target: int) -> None:
        self._tokens[target], self._tokens[source] = self._tokens[source], []


class LookupDrafter(HistoryDrafter):
    """Proposes continuations that were found in what is known, at next to no cost; subclasses say which."""

    computes, looks_up = False, True

    def propose(self, slot: int, tokens: Sequence[int], depth: int) -> Proposal:
        """What may follow the `tokens` of the sequence in `slot`, at most `depth` levels of it; it may be empty."""
        raise NotImplementedError

    def propose_within(self, slot: int, spec: TreeSpec) -> Proposal:
        """What may follow the sequence in `slot`, for a tree of the shape `spec`."""
        return self.propose(slot, self._tokens[slot], spec.depth)

    def draft(
        self,
        rows: range,
        spec: TreeSpec,
        coupling: Coupling,  # noqa: ARG002
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else drafting
        found = [
            self.propose_within(slot, spec) if want else Proposal() for slot, want in zip(rows, wanted, strict=True)
        ]
        return grow(spec, found, self._device)
