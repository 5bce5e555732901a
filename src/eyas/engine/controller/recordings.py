"""The trees recorded as CUDA graphs, each of which takes as long to record as dozens of passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from eyas.engine.controller.budget import Budget
from eyas.engine.controller.planner import Prospect, Prospects
from eyas.targets.shapes import USES, recurring
from eyas.tree import TreeSpec

_BUDGET = 0.02
"""The share of all time that recording further shapes may take while one is in use."""
_FIRST = 60.0
"""The assumed length of the first recording, in plain rounds."""


class Recordings:
    """Which trees are recorded, and how long recording another one takes.

    The first rounds that use a tree record its draft, a pass of its width, and the reading of its pairs.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """`widths` are those of the beams among which a plan chooses."""
        self._widths = tuple(widths)
        self._budget = Budget(_BUDGET)
        self._uses = Counter[tuple[int, TreeSpec]]()  # by recurring number of rows and tree
        self._spent = defaultdict[tuple[int, TreeSpec], float](float)
        self._latest = 0.0
        """Seconds that the latest recording took; 0 = not known."""
        self.usual = 0.0
        """Running mean of the seconds of rounds that only replay recordings; 0 = there was none."""

    def cost(self, wanted: Prospect, prospects: Prospects) -> float:
        """The seconds that it takes to record a shape; 0 if it is recorded already."""
        tree = wanted.recurring_tree(self._widths[wanted.shape.width], prospects.rows)
        if self._uses[recurring(prospects.rows), tree]:
            return 0.0
        return self._latest or _FIRST * prospects.plain_seconds

    def affords(self, cost: float) -> bool:
        """Whether `cost` seconds may be spent on recording a shape other than the one in use."""
        return not cost or self._budget.affords(cost)

    def earn(self, seconds: float) -> None:
        """Account for a round of any kind that took `seconds`."""
        self._budget.earn(seconds)

    def learn(self, rows: int, tree: TreeSpec, seconds: float, forecast: float) -> None:
        """Learn from a round of `rows` rows with `tree` that took `seconds`, where `forecast` were expected."""
        key = recurring(rows), tree
        self._uses[key] += 1
        if self._uses[key] <= USES:
            lost = max(0.0, seconds - forecast)
            self._budget.spend(lost)
            self._spent[key] += lost
            self._latest = max(self._spent[key], forecast)
        else:
            self.usual = seconds if not self.usual else self.usual + 0.05 * (min(seconds, 3 * self.usual) - self.usual)
