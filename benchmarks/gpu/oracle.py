"""A drafter that knows the answers: its accept length is a setting, not a property of trained weights.

Shapes: R rows (a contiguous range of slots), Q pairs, S recorded sequences, L their tokens, K levels of a chain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.drafters.base import Drafter, SlotPairs
from eyas.errors import UsageError
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.static import StaticTree
from eyas.types import Owner
from eyas.verify import Coupling


class OracleDrafter(Drafter, SlotPairs):
    """Drafts chains from recorded plain continuations, level i right with probability `rates[i]`.

    Which levels are right is drawn once for every position of every sequence, so all runs accept the same. Drafts are
    known on the host; a draft costs one small copy to the device. A `network`, if given, observes and drafts as usual,
    but its tokens are discarded: then a draft costs as much as a real one.

    Sequences must differ within their prompts and are recognized when their first pairs are observed. A sequence that
    leaves its recorded continuation (by rounding) is `lost`: it gets wrong drafts from there on.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        rates: Sequence[float],
        vocab_size: int,
        device: torch.device,
        network: Drafter | None = None,
        seed: int = 0,
    ) -> None:
        self.lost: list[int] = []
        """Slots whose sequence has left its recorded continuation."""
        self._sequences = [list(sequence) for sequence in sequences]
        self.max_fanout = vocab_size
        self._device = device
        self._network = network
        self.taps = () if network is None else network.taps
        longest = max(map(len, self._sequences))
        draws = torch.rand(len(self._sequences), longest, len(rates), generator=torch.Generator().manual_seed(seed))
        right = (draws < torch.tensor(rates)).long().cumprod(2).sum(2)  # [S, L] number of leading levels that are right
        self._right: list[list[int]] = right.tolist()
        self._depth = len(rates)
        self.pairs = self
        self.resize(0)

    @property
    def slots(self) -> int:
        return len(self._lengths)

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner, prediction: Sequence[int] = ()) -> None:
        if self._network is not None:
            self._network.pairs.begin(slot, prompt, owner, prediction)

    def finish(self, slot: int) -> None:
        if self._network is not None:
            self._network.finish(slot)

    def fresh(self) -> OracleDrafter:
        made = copy.copy(self)
        made.pairs = made
        made._network = None if self._network is None else self._network.fresh()
        made.resize(0)
        return made

    def resize(self, slots: int) -> None:
        self._lengths = [0] * slots
        self._held: list[int | None] = [None] * slots  # the sequence in each slot; None: unknown or lost
        self._expected: list[int | None] = [None] * slots  # how many tokens of the last draft are right
        if self._network is not None:
            self._network.pairs.resize(slots)

    def reshape(self, slots: int, columns: int) -> None:
        more = max(0, slots - self.slots)
        self._lengths = self._lengths[:slots] + [0] * more
        self._held = self._held[:slots] + [None] * more
        self._expected = self._expected[:slots] + [None] * more
        if self._network is not None:
            self._network.pairs.reshape(slots, columns)

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def unread(self, slot: int) -> int:
        return 0 if self._network is None else self._network.pairs.unread(slot)

    def save(self, slot: int, start: int, stop: int) -> Any:  # noqa: ARG002
        """Refused: engines that measure have no prefix cache."""
        raise UsageError("an oracle's sequences can't be saved: leave the prefix cache off")

    def load(self, slot: int, saved: Any, count: int) -> None:  # noqa: ARG002
        """Refused, as `save` is."""
        raise UsageError("an oracle's sequences can't be loaded: leave the prefix cache off")

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._follow(rows, next_tokens, counts)
        if self._network is not None:
            self._network.observe(rows, next_tokens, taps, counts)

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._follow(rows, next_tokens, counts)
        if self._network is not None:
            self._network.defer(rows, next_tokens, taps, counts)

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        if not isinstance(spec, StaticTree) or len(spec.nodes) != spec.depth or spec.depth > self._depth:
            raise UsageError(f"an oracle drafts chains of at most {self._depth} tokens")
        if self._network is not None:
            self._network.draft(rows, spec, coupling, drafting)
        wanted = [True] * len(rows) if drafting is None else drafting
        grown = [want and self._lengths[slot] > 0 for want, slot in zip(wanted, rows, strict=True)]
        if not any(grown):
            return DraftTree.empty(len(rows), self._device)
        chains = [self._chain(slot, spec.depth) for slot in rows]
        return chain_trees(torch.tensor(chains, device=self._device)).only(grown)

    def truncate(self, slot: int, length: int) -> None:
        self._lengths[slot] = min(self._lengths[slot], length)
        self._expected[slot] = None
        if not length:
            self._held[slot] = None
        if self._network is not None:
            self._network.pairs.truncate(slot, length)

    def move(self, source: int, target: int) -> None:
        self._lengths[target], self._lengths[source] = self._lengths[source], 0
        for state in (self._held, self._expected):
            state[target], state[source] = state[source], None
        if self._network is not None:
            self._network.pairs.move(source, target)

    def _follow(self, rows: range, next_tokens: Tensor, counts: Sequence[int]) -> None:
        """Record how far the sequences have come; tokens are only read to recognize a new sequence."""
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            if not count:
                continue
            if not self._lengths[slot]:
                self._held[slot] = self._recognized(next_tokens[row, :count].tolist())
            expected = self._expected[slot]
            self._expected[slot] = None
            if expected is not None and expected != count - 1:
                self._held[slot] = None
                self.lost.append(slot)
            self._lengths[slot] += count

    def _recognized(self, tokens: list[int]) -> int:
        for number, sequence in enumerate(self._sequences):
            if sequence[1 : 1 + len(tokens)] == tokens:
                return number
        raise UsageError(f"no recorded sequence goes on with {tokens[:8]} after its first token")

    def _chain(self, slot: int, depth: int) -> list[int]:
        """The draft of a slot: as many right tokens as were drawn, then wrong ones."""
        held = self._held[slot]
        if held is None:
            return [0] * depth
        last = self._lengths[slot]  # n pairs know tokens 0 to n
        right = min(self._right[held][min(last, len(self._right[held]) - 1)], depth)
        truth = self._sequences[held][last + 1 : last + 1 + depth]
        self._expected[slot] = right if len(truth) == depth else None
        truth += [0] * (depth - len(truth))
        return [token if i < right else (token + 1) % self.max_fanout for i, token in enumerate(truth)]


def chain_trees(tokens: Tensor) -> DraftTree:
    """Trees with a single path each, from tokens [R, K]."""
    depth = tokens.shape[1]
    parents = torch.arange(-1, depth - 1, device=tokens.device).expand_as(tokens)
    return DraftTree(
        tokens=tokens,
        parents=parents,
        logprob=torch.zeros(tokens.shape, device=tokens.device),
        valid=torch.ones_like(tokens, dtype=torch.bool),
        max_depth=depth,
        shared_ancestors=torch.ones(1 + depth, 1 + depth, dtype=torch.bool, device=tokens.device).tril(),
        counted=tokens.numel(),
    )


def expected_accept_length(rates: Sequence[float]) -> float:
    """Tokens per round, including the bonus token, if level i is right with probability `rates[i]`."""
    length, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        length += reached
    return length
