"""Arms: the ways to draft that the controller weighs against plain rounds, one for each type of drafter.

An arm forecasts the result of its rounds, makes their trees, and learns from them. The controller decides when to
draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from eyas.engine.controller.copy_search import CopySearches
from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.explore import Explorer
from eyas.engine.controller.planner import Prospect, Prospects, Shape
from eyas.engine.controller.recordings import Recordings
from eyas.engine.controller.records import RoundRecord
from eyas.tree import TreeSpec


class Batch(NamedTuple):
    """The rows [R] of the round being planned."""

    texts: Sequence[int]
    """[R] the number of the answer that each row writes."""
    lengths: Sequence[int]
    """[R] committed tokens."""
    groups: tuple[int, ...]
    """[R] 1 for rows with a temperature above 0."""
    room: int
    """The deepest tree that fits into the context of the shortest row."""

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.texts)


class ArmTexts(Protocol):
    """How many tokens the texts being written accept, compared with the average of the arm's rounds."""

    @property
    def known(self) -> bool:
        """Whether drafts for these texts, or for several others, have shown what to expect."""

    @property
    def drift(self) -> float:
        """Accepted tokens expected now, divided by those that the last forecast assumed."""

    def follow(self, texts: Sequence[int]) -> None:
        """Set the texts being written from now on; all others have ended."""


class ArmGain(Protocol):
    """Statistics of the rounds with an arm."""

    def settle(self, *, values: bool = True) -> None:
        """Base forecasts on what is known now; `values`: also the values of nodes."""

    def keep(self) -> None:
        """Save what was learned about the drafter, if anything."""


class DraftArm(ABC):
    """A way to draft: forecasts of its rounds, their trees, and statistics of earlier ones."""

    gain: ArmGain
    texts: ArmTexts
    explorer: Explorer
    """Proposes rounds that measure the arm, or plain decoding, while it isn't in use."""
    depth: int
    """The deepest tree."""
    drafts: bool = True
    """Whether a network, or a window, drafts; if not, every tree is looked up."""
    lookups: CopySearches | None = None
    """Decides whether copies are looked for; None = there are none."""
    recordings: Recordings | None = None
    """The trees recorded as CUDA graphs; None = the host can count nodes, and end drafts, without a sync."""

    @property
    def analysis(self) -> float:
        """Seconds that reading the candidates of a draft takes."""
        return 0.0

    @abstractmethod
    def prospects(self, batch: Batch, costs: CostModel, prompt_pairs: float) -> Prospects:
        """The forecasts for a batch; a drafter in use reads `prompt_pairs` pairs of prompts per generated token."""

    @abstractmethod
    def saved(self, prospects: Prospects) -> float:
        """The seconds that drafts may save with each token of the texts being written: if they save none, plain rounds
        take their place."""

    @abstractmethod
    def tree(self, prospect: Prospect | None, batch: Batch, *, probing: bool) -> TreeSpec:
        """The tree of a shape; None = only what is looked up. `probing`: whether the round is a probe."""

    @abstractmethod
    def learn(self, record: RoundRecord, judged: Prospect | None, clock: Callable[[], float]) -> int:
        """Learn from a round with a tree, and compare it with the forecast `judged`; None = there is none.

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
