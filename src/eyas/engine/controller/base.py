"""What every controller does: rounds that are planned together, and learned from together, and totals of them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.explore import Audience, Pace
from eyas.engine.controller.records import ControllerState, RoundRecord
from eyas.tree import TreeSpec

ENTER, LEAVE = 1.03, 1.015
"""The speedups that speculation must promise to begin, and to continue."""
_THINKING = 0.002
"""The share of the time that planning may take."""
_FADE = 1.0 - 1.0 / 100.0
"""The factor by which running averages decay each round."""


class Controller(ABC):
    """Plans the draft tree of each round and learns from how the round went."""

    def __init__(self, costs: CostModel, clock: Callable[[], float]) -> None:
        """Plan by these `costs`; `clock` gives the seconds that planning takes."""
        self.costs, self._clock = costs, clock
        self.audience = Audience()
        """Decides which sequences the drafter observes."""
        self._texts: set[int] = set()
        """The texts of the last round."""
        self._planned: TreeSpec | None = None
        self._ahead = 0
        """Further rounds that are planned already, to be like the last one."""
        self._situation: tuple[int, ...] = ()
        """What the latest plan was made for."""
        self._planning = Pace(_THINKING, least=8, most=256)
        self._unlearnt: list[tuple[RoundRecord, set[int]]] = []
        """Rounds to learn from, and the texts of the round before each."""
        self._emitted = self._seconds = self._prompt_pairs = 0.0
        self._counts = {"rounds": 0, "plain_rounds": 0, "probes": 0}
        self._sums = {"depth": 0, "width": 0, "nodes": 0}

    def goes_on(self, texts: Sequence[int]) -> bool:
        """Whether the next round of these texts is planned already: as the last one."""
        planned = self._ahead > 0 and self._texts == set(texts)
        self._ahead -= planned
        return planned

    def plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None = None,
        unread: Sequence[int] | None = None,
    ) -> TreeSpec | None:
        """The tree for a round of these `texts`, of which `lengths` tokens are committed; None = plain.

        `sampled` says which rows have a temperature above 0; None = none has. `unread` is the number of deferred pairs
        of each row, which a draft reads first; None = the rounds since the last draft.
        """
        if self.goes_on(texts):
            return self._planned
        self._end_stretch()
        self._planned = self._plan(texts, lengths, sampled, unread) if texts else None
        return self._planned

    def learn(self, record: RoundRecord) -> None:
        """Learn from a measured round; rounds planned together are learned from together."""
        self._unlearnt.append((record, self._texts))
        self._texts = set(record.texts)
        self._counts["rounds"] += 1
        self._counts["plain_rounds"] += not record.drafted and record.tokens == record.rows
        self._sums["nodes"] += record.tokens - record.rows
        if record.drafted and record.spec is not None:
            self._sums["depth"] += record.spec.depth
            self._sums["width"] += record.spec.max_fanout
        if not self._ahead:
            self._end_stretch()

    def _end_stretch(self) -> None:
        """Plan no further round ahead, and learn from those that were planned together."""
        self._ahead = 0
        rounds, self._unlearnt = self._unlearnt, []
        for record, before in rounds:
            self._emitted = self._emitted * _FADE + record.emitted
            self._seconds = self._seconds * _FADE + record.whole
            self._prompt_pairs = self._prompt_pairs * _FADE + record.prompt_pairs
            self._planning.round(record.whole)
            self._learn(record, before)

    @abstractmethod
    def _plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None,
        unread: Sequence[int] | None,
    ) -> TreeSpec | None:
        """`plan` for a round that isn't planned yet, of at least one text."""

    @abstractmethod
    def _learn(self, record: RoundRecord, before: set[int]) -> None:
        """Learn from a round; texts that weren't among those `before` are new."""

    @property
    @abstractmethod
    def probing(self) -> bool:
        """Whether the last plan is a draft made to learn, while rounds are plain."""

    @abstractmethod
    def snapshot(self) -> ControllerState:
        """The current state, for metrics."""

    def keep(self) -> None:
        """Save what was learned about the drafter, now that there is time; by default nothing."""
        return

    def _totals(self) -> ControllerState:
        """The part of the state that is about the rounds so far."""
        depth, width, nodes = (total / max(1, self._counts["rounds"]) for total in self._sums.values())
        return ControllerState(
            measured_tokens_per_second=self._emitted / self._seconds if self._seconds else 0.0,
            mean_depth=depth,
            mean_width=width,
            mean_nodes=nodes,
            **self._counts,
        )
