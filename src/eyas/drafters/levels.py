"""The levels of a draft, and networks that guess all of them in one pass.

In such a pass a slot is one of the guesses: slot 0 is the root's child. A slot's guess doesn't depend on the path above
it, or only on the last token of that path. So all nodes of a level have the same children, or nearly, and the best
paths are the ones with the highest summed log-probability.

Shapes: R rows, H draft hidden, W frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eyas.drafters.network import DraftNetwork
from eyas.targets.draft_kernels import UnreadLogits
from eyas.tree import Frontier

DraftLogits = Tensor | UnreadLogits
"""Logits [R, W, Vd] of what follows W nodes, or what they are computed from."""


def logits_of_node(logits: DraftLogits, node: int) -> DraftLogits:
    """The logits of one node of each row."""
    return logits.of_node(node) if isinstance(logits, UnreadLogits) else logits[:, node : node + 1]


class Levels(Protocol):
    """The levels of one draft, run one after another or all in one pass."""

    @property
    def sure(self) -> Tensor | None:
        """[R, W] log-probability that guesses from the last logits are accepted; None if the network can't tell."""

    def first(self) -> DraftLogits:
        """The logits [R, 1, Vd] of what follows the roots."""

    def add(self, frontier: Frontier) -> DraftLogits:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""


class HeadsNetwork(DraftNetwork):
    """A network that makes its `config.guesses` guesses in one pass: `block` runs the pass, `follow` reads a slot."""

    def guess(self, states: Tensor, slot: int) -> Tensor:
        """The states [..., H] that a slot's logits are computed from, given the states [..., H] that `step` returns."""
        raise NotImplementedError

    def logits_at(self, normed: Tensor, slot: int) -> Tensor:  # noqa: ARG002
        """Logits [..., Vd] of one guess, `slot` levels below the root's children, from `guess`'s states [..., H]."""
        return self.logits(normed)

    def block(self, states: Tensor, depth: int) -> Tensor:
        """Run the pass for trees of `depth` levels from the last states [R, H] of `step`, for use by `follow`."""
        raise NotImplementedError

    def follow(self, block: Tensor, slot: int, tokens: Tensor | None) -> Tensor:
        """The logits of a slot after `tokens` [R, W], which were chosen in the slot before; None = after the roots.

        [R, 1, Vd] if they are the same after all tokens, else [R, W, Vd].
        """
        raise NotImplementedError


class HeadLevels:
    """The levels of one draft, computed in one pass."""

    sure: Tensor | None = None

    def __init__(self, network: HeadsNetwork, states: Tensor, depth: int) -> None:
        """For trees of at most `depth` levels that follow the last states [R, H]."""
        self._network = network
        self._block = network.block(states, depth)
        self._slot = 0

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._network.follow(self._block, 0, None)

    def add(self, frontier: Frontier) -> Tensor:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""
        self._slot += 1
        return self._network.follow(self._block, self._slot, frontier.tokens)
