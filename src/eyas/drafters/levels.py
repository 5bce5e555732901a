"""The levels of a draft, and networks that guess all of them in one pass.

In such a pass a slot is one of the guesses: slot 0 is the root's child. What a slot guesses doesn't depend on the path
above it, or only on the token chosen last. So a whole level is the same for all nodes of a tree, or nearly, and the
best paths are those of the best summed log-probability.

Shapes: R rows, H draft hidden, W frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eyas.drafters.network import DraftNetwork
from eyas.tree import Frontier


class Levels(Protocol):
    """The levels of one draft, run one after another or all at once."""

    @property
    def sure(self) -> Tensor | None:
        """[R, W] the logarithm of how probable it is that the last logits are the target's; None if nobody knows."""

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""

    def add(self, frontier: Frontier) -> Tensor:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""


class HeadsNetwork(DraftNetwork):
    """A network that makes its `config.guesses` guesses in one pass: `block` is the pass, `follow` reads a slot."""

    def guess(self, states: Tensor, slot: int) -> Tensor:
        """What a slot's logits are made of [..., H], from the states [..., H] that `step` made for the head."""
        raise NotImplementedError

    def logits_at(self, normed: Tensor, slot: int) -> Tensor:  # noqa: ARG002
        """Logits [..., Vd] of one guess, `slot` levels below the root's children, of what `guess` gives [..., H]."""
        return self.logits(normed)

    def block(self, states: Tensor, depth: int) -> Tensor:
        """One pass for trees `depth` deep, from the last states [R, H] that `step` made for the head; for `follow`."""
        raise NotImplementedError

    def follow(self, block: Tensor, slot: int, tokens: Tensor | None) -> Tensor:
        """The logits of a slot after `tokens` [R, W], chosen in the slot before; None = the roots.

        [R, 1, Vd] where they are the same after all tokens, else [R, W, Vd].
        """
        raise NotImplementedError


class HeadLevels:
    """The levels of one draft, which come from one pass."""

    sure: Tensor | None = None

    def __init__(self, network: HeadsNetwork, states: Tensor, depth: int) -> None:
        """Trees at most `depth` deep that follow the last states [R, H]."""
        self._network, self._block, self._slot = network, network.block(states, depth), 0

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._network.follow(self._block, 0, None)

    def add(self, frontier: Frontier) -> Tensor:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""
        self._slot += 1
        return self._network.follow(self._block, self._slot, frontier.tokens)
