"""The levels of a draft: passes of a network's modules, one after another, or one pass that guesses a whole block.

In a block a slot is one of the guesses: slot 0 is the root's child. What a slot guesses doesn't depend on the path
above it, or only on the token chosen last. So a whole level is the same for all nodes of a tree, or nearly, and the
best paths are those of the best summed log-probability.

Shapes: R rows, S positions of a pass, W frontier nodes, F staged guesses so far, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.drafters.network import DraftNetwork
from eyas.targets.attention import RaggedLayout
from eyas.tree import Frontier

if TYPE_CHECKING:
    from eyas.drafters.decoding import NetworkDrafter


class Levels(Protocol):
    """The levels of one draft, run one after another or all at once."""

    def add(self, frontier: Frontier) -> Tensor:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""


class Stage(NamedTuple):
    """Where a pass of the network's modules stages its keys and values, and what it sees there."""

    lengths: Tensor  # [R] pairs that were read
    seen: Tensor  # [R or 1, S, F] bool: which staged columns each sees, besides the row's own pairs
    before: int = 0  # columns of each row that passes before this one staged
    layout: RaggedLayout | None = None  # of rows whose tokens lie end to end
    layer: int = 0  # the slot cache's layer that is the network's first
    first: int = 0  # the first of a row's own pairs that is seen
    end: int | None = None  # the columns that are read, where their number is fixed
    level: int = 0  # of a draft: 0 is that of the root's children


class ModuleLevels:
    """The levels of one draft, run by the network's modules."""

    def __init__(self, drafter: NetworkDrafter, rows: range, fed: Tensor) -> None:
        self._drafter, self._rows = drafter, rows
        self._level, self._fed = 0, fed  # [R, W, H]
        self._seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=fed.device)  # [R, W, F]

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, Vd] of what follows them."""
        rows, width = len(self._rows), frontier.tokens.shape[1]
        seen, fed = self._seen, self._fed
        # a guess sees the committed pairs, the guesses above it, and itself
        itself = torch.eye(width, dtype=torch.bool, device=fed.device).expand(rows, width, width)
        if width > 1 or fed.shape[1] > 1:  # in a chain every guess follows the one before
            parents = frontier.parents.unsqueeze(2)  # [R, W, 1]
            seen = seen.gather(1, parents.expand(-1, -1, seen.shape[2]))
            fed = fed.gather(1, parents.expand(-1, -1, fed.shape[2]))
        self._seen = torch.cat((seen, itself), dim=2)
        level, before = self._level, self._seen.shape[2] - width

        def compute(
            rows: range, end: int | None, lengths: Tensor, tokens: Tensor, fed: Tensor, seen: Tensor
        ) -> tuple[Tensor, Tensor]:
            positions = (lengths + level).unsqueeze(1).expand(-1, width)
            stage = Stage(lengths, seen, before, level=level, end=end)
            return self._drafter.run_level(rows, tokens, fed, positions, stage)

        inputs = (frontier.tokens, fed, self._seen)
        self._fed, logits = self._drafter.run_pass(("level", level), self._rows, inputs, compute, before + width)
        self._level += 1
        return logits


class HeadsNetwork(DraftNetwork):
    """A network that makes its `config.guesses` guesses in one pass: `block` is the pass, `follow` reads a slot."""

    def guess(self, states: Tensor, slot: int) -> Tensor:
        """What a slot's logits are made of [..., H], from the states [..., H] that `step` made for the head."""
        raise NotImplementedError

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
