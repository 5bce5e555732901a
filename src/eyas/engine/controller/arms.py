"""What a drafter brings to the controller: an arm, one way to draft that is weighed against plain rounds.

An arm forecasts what its rounds bring, makes their trees, and learns from them. It says nothing about when to draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from eyas.engine.controller.copy_search import CopySearch
from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.explore import Explorer
from eyas.engine.controller.planner import Prospect, Prospects, Shape
from eyas.engine.controller.recordings import Recordings
from eyas.engine.controller.records import RoundRecord
from eyas.tree import TreeSpec
from eyas.tree.acceptance import Array


class Batch(NamedTuple):
    """The rows [R] of a round that is planned."""

    texts: Sequence[int]
    """[R] the number of the answer that each row writes."""
    lengths: Sequence[int]
    """[R] committed tokens."""
    groups: tuple[int, ...]
    """[R] 1 for rows with a temperature above 0."""
    room: int
    """The deepest tree that all rows have room for."""

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.texts)


class ArmTexts(Protocol):
    """What the texts being written yield, compared with what rounds with an arm have brought."""

    @property
    def drift(self) -> float:
        """What the texts yield now, compared with what the last forecast assumed."""

    def follow(self, texts: Sequence[int]) -> None:
        """The texts being written from now on; all others have ended."""


class ArmGain(Protocol):
    """What rounds with an arm have brought."""

    def settle(self, *, values: bool = True) -> None:
        """Base forecasts on what is known now; `values`: also the values of nodes."""

    def keep(self) -> None:
        """Save what was learned about the drafter, if anything."""


class DraftArm(ABC):
    """A way to draft: forecasts of its rounds, their trees, and what they have shown."""

    gain: ArmGain
    texts: ArmTexts
    explorer: Explorer
    """Proposes rounds that show what the arm, or plain decoding, would bring."""
    depth: int
    """The deepest tree."""
    drafts: bool = True
    """Whether a network, or a window, drafts: else every tree is looked up."""
    lookups: CopySearch | None = None
    """Decides whether copies are looked for; None = there are none."""
    recordings: Recordings | None = None
    """The trees that an accelerator has recorded; None = the host counts nodes, and ends drafts, without a sync."""

    @property
    def analysis(self) -> float:
        """Seconds that reading the candidates of a draft takes."""
        return 0.0

    @abstractmethod
    def prospects(self, batch: Batch, costs: CostModel, prompt_pairs: float) -> Prospects:
        """The forecasts for a batch, with which a plan begins.

        A drafter in use reads `prompt_pairs` pairs of prompts for each generated token.
        """

    @abstractmethod
    def sampled_rates(self, prospects: Prospects) -> Array:
        """[S] samples of the tokens per second that drafts may make, by what is known about the texts being written."""

    @abstractmethod
    def tree(self, prospect: Prospect | None, batch: Batch, *, probing: bool) -> TreeSpec:
        """The tree of a shape; None = whatever is looked up. `probing`: whether the round is made to learn."""

    @abstractmethod
    def learn(self, record: RoundRecord, judged: Prospect | None, clock: Callable[[], float]) -> int:
        """Learn from a round with a tree, and compare it with the forecast `judged`; None = it isn't known.

        Returns how many of the accepted tokens were drafted, not looked up.
        """

    def follow(self, texts: Sequence[int]) -> None:
        """Account for the texts being written from now on; all others have ended."""
        self.texts.follow(texts)

    def width_of(self, spec: TreeSpec) -> int:
        """The width of one of the arm's trees, for averages."""
        return spec.max_fanout

    @abstractmethod
    def size(self, shape: Shape) -> tuple[int, int]:
        """The depth and the width of a shape's trees."""
