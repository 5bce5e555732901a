"""What a drafter asks of our own kernels on a device: passes of its network over its slot cache, and ranked guesses.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, T tokens, P depths of a path, A taps, Ht target
hidden, H draft hidden, W nodes, K guesses, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from eyas.targets.attention import RaggedLayout
from eyas.targets.native.decoder import Warp
from eyas.targets.slots import SlotCache


class DraftPass(NamedTuple):
    """Where the tokens of a drafter's pass are, and which others they follow."""

    rows: range
    lengths: Tensor  # [R] committed columns
    positions: Tensor  # [R, Q]
    first: Tensor  # [R, Q or 1] the position of the first guess of the draft that each is of, or that follows it
    end: int
    """End of the longest row's staged columns, or a later column."""
    paths: Tensor | None = None  # [R, Q, P] staged columns on the path to each, itself included; None = a sequence
    before: int = 0
    """Number of columns of each row that earlier passes staged."""
    layout: RaggedLayout | None = None
    """Where the tokens of concatenated rows are."""


class DraftKernels(Protocol):
    """A draft network's passes, made of kernels."""

    @property
    def ranks(self) -> bool:
        """Whether guesses can be ranked without their logits."""

    def fuse(self, taps: Tensor) -> Tensor:
        """See `DraftNetwork.fuse`: [..., A, Ht] -> [..., H]."""

    def run(self, cache: SlotCache, at: DraftPass, tokens: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Stage `tokens` [R, Q], or T in a layout, with states [..., H]; None = a block's slots, which have none.

        Returns the states [T, H] to feed back and those that the head reads.
        """

    def stage(self, cache: SlotCache, at: DraftPass, context: Tensor) -> None:
        """Stage the keys and values that each layer computes from fused states [..., H] themselves."""

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftNetwork.logits`: [..., H] -> [..., Vd]."""

    def best(self, states: Tensor, count: int, warp: Warp, steps_ahead: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The best `count` guesses after states [R, W, H]: log-probabilities [R, W, K] and tokens among `ids` [Vd].

        They are `steps_ahead` of the root's next token.
        """


class UnreadLogits(NamedTuple):
    """Logits that are computed only when they are read, because kernels rank guesses without them."""

    states: Tensor  # [R, W, H]
    kernels: DraftKernels

    def read(self) -> Tensor:
        """The logits [R, W, Vd]."""
        return self.kernels.logits(self.states)

    def of_node(self, node: int) -> UnreadLogits:
        """The logits of one node, [R, 1, Vd]."""
        return self._replace(states=self.states[:, node : node + 1])
