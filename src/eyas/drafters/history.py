"""The token histories that drafters without a network draft from.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from eyas.drafters.base import Drafter, SavedPairs, SlotPairs
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.draft_tree import Proposal
from eyas.tree.proposal import best_path, grow
from eyas.types import NO_OWNER, Owner
from eyas.verify import Coupling

LONGEST_MATCH = 64
"""The length up to which matches are measured; longer ones are practically certain to continue."""


def continuation_rate(length: int) -> float:
    """The probability that a text that was copied for `length` tokens is copied for one more.

    So it is copied for n more with probability length / (length + n): the longer a copy, the longer it is likely to
    continue. The values of copies in the current texts are learned as a function of it (`eyas.tree.acceptance`).
    """
    return length / (length + 1)


class SavedTokens(NamedTuple):
    """The tokens of pairs that were copied out of a slot."""

    tokens: list[int]

    @property
    def unread(self) -> int:
        """Always 0: a known token counts as read."""
        return 0


class History:
    """One slot's sequence; subclasses add what they derive from it."""

    def __init__(self, prompt: Sequence[int] = (), owner: Owner = NO_OWNER) -> None:
        """A sequence of `owner` with the first token of `prompt`, if any; the other tokens follow as pairs."""
        self.tokens = list(prompt[:1])
        self.owner = owner

    def expect(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The answer to the `prompt` is expected to repeat `answer`, and may be drafted from it."""

    def cut(self) -> None:
        """Update derived data after tokens were removed from the end."""


H = TypeVar("H", bound=History)


class TokenPairs(SlotPairs, Generic[H]):
    """One `History` per slot: drafters without weights only read the tokens of pairs."""

    def __init__(self, history: Callable[..., H]) -> None:
        """Create histories with `history(prompt, owner)`, empty ones with `history()`. There are no slots yet."""
        self._history = history
        self.resize(0)

    def __getitem__(self, slot: int) -> H:
        return self._of[slot]

    @property
    def slots(self) -> int:
        return len(self._of)

    def resize(self, slots: int) -> None:
        self._of = [self._history() for _ in range(slots)]

    def reshape(self, slots: int, columns: int) -> None:  # noqa: ARG002
        self._of = [*self._of[:slots], *(self._history() for _ in range(slots - len(self._of)))]

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner, prediction: Sequence[int] = ()) -> None:
        self._of[slot] = self._history(prompt, owner)
        if prediction:
            self._of[slot].expect(prompt, prediction)

    def length(self, slot: int) -> int:
        return max(0, len(self._of[slot].tokens) - 1)

    def save(self, slot: int, start: int, stop: int) -> SavedPairs:
        return SavedTokens(self._of[slot].tokens[start + 1 : stop + 1])

    def load(self, slot: int, saved: Any, count: int) -> None:
        self._of[slot].tokens += saved.tokens[:count]

    def append(self, rows: range, next_tokens: Tensor, counts: Sequence[int]) -> None:
        """Add the first `counts[r]` of next_tokens [R, Q], which are on the host, to each row's sequence."""
        if any(counts):
            for slot, tokens, count in zip(rows, next_tokens.tolist(), counts, strict=True):
                self._of[slot].tokens += tokens[:count]

    def truncate(self, slot: int, length: int) -> None:
        if length < self.length(slot):
            history = self._of[slot]
            del history.tokens[length + 1 if length else 0 :]
            history.cut()

    def move(self, source: int, target: int) -> None:
        self._of[target], self._of[source] = self._of[source], self._history()


class HistoryDrafter(Drafter):
    """Drafts from the tokens of each slot's sequence."""

    taps = ()
    reads_on_host = True
    pairs: TokenPairs[Any]

    def __init__(self, pairs: TokenPairs[Any], device: torch.device) -> None:
        """Draft from the histories `pairs`; trees are made on `device`, where the target is."""
        self.pairs = pairs
        self._device = device

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:  # noqa: ARG002
        self.pairs.append(rows, next_tokens, counts)

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:  # noqa: ARG002
        self.pairs.append(rows, next_tokens, counts)


class LookupDrafter(HistoryDrafter):
    """Proposes continuations found in known texts, at almost no cost; subclasses say which."""

    computes, looks_up = False, True

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:
        """What may follow the sequence in `slot`: at most `depth` levels and `fanout` children a node; may be empty."""
        raise NotImplementedError

    def draft(
        self,
        rows: range,
        spec: TreeSpec,
        coupling: Coupling,
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        found = self.proposals(rows, spec.depth, spec.max_fanout, coupling, drafting)
        return grow(spec, found, self._device)

    def proposals(
        self, rows: range, depth: int, fanout: int, coupling: Coupling, drafting: Sequence[bool] | None
    ) -> list[Proposal]:
        """What each `drafting` row (None = all) proposes, or its grammar forces; empty proposals for the others."""
        wanted = [True] * len(rows) if drafting is None else drafting
        return [
            _with_forced(self.propose(slot, depth, fanout), coupling.forced(row)[:depth]) if want else Proposal()
            for row, (slot, want) in enumerate(zip(rows, wanted, strict=True))
        ]


def _with_forced(proposal: Proposal, forced: list[int]) -> Proposal:
    """A proposal that begins with the tokens that a grammar forces, which are as certain as the longest match."""
    if not forced:
        return proposal
    path = best_path(proposal, len(forced))
    if [proposal.tokens[node] for node in path] != forced:
        path = list(range(len(forced)))
        proposal = Proposal.chain(forced, [0.0] * len(forced))
    certain = math.log(continuation_rate(LONGEST_MATCH))
    return replace(
        proposal, logprobs=[certain if node in path else logprob for node, logprob in enumerate(proposal.logprobs)]
    )
