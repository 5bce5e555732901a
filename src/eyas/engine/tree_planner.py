"""What plans the draft tree of each round: one that is always the same, or a `Controller` for `--tree auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from eyas.engine.controller.records import RoundRecord
from eyas.tree import TreeSpec
from eyas.tree.acceptance import LearnedValues


class TreePlanner(Protocol):
    """Plans the draft tree of each round, and is told how the round went."""

    @property
    def tree(self) -> TreeSpec | None:
        """The shape of the latest plan, or of all plans; None = a plain round."""

    @property
    def always_drafts(self) -> bool:
        """Whether every round drafts, even the first one of a text; then prompts needn't wait for a plan to be read."""

    @property
    def probing(self) -> bool:
        """Whether the latest plan is a trial, made while rounds are plain."""

    def observes(self, rows: int, /) -> bool:
        """Whether the drafter observes a sequence that begins as one of `rows`."""

    def plan(
        self, texts: Sequence[int], lengths: Sequence[int], sampled: Sequence[bool], unread: Sequence[int], /
    ) -> TreeSpec | None:
        """The tree for a round of these `texts`, of which `lengths` tokens are committed; None = plain.

        `sampled` says which rows have a temperature above 0, `unread` how many deferred pairs a draft reads first.
        """

    def decoded(self, rows: int, /) -> None:
        """Account for any round, of `rows` rows, whether the drafter observes them or not."""

    def learn(self, record: RoundRecord, /) -> None:
        """Learn from a measured round in which a row was drafted for, or would have been if the plan weren't plain."""

    def keep(self) -> None:
        """Save what was learned; called while the engine is idle."""


class FixedTree:
    """Plans trees of one shape. Shapes that choose nodes by learned values learn them from the accepted nodes."""

    always_drafts = True
    probing = False

    def __init__(self, tree: TreeSpec | None) -> None:
        """None: all rounds are plain, and a drafter only observes."""
        self.tree = tree
        self.values = LearnedValues()

    def observes(self, _rows: int, /) -> bool:
        return True

    def plan(
        self, _texts: Sequence[int], _lengths: Sequence[int], sampled: Sequence[bool], _unread: Sequence[int], /
    ) -> TreeSpec | None:
        return None if self.tree is None else self.tree.valued(self.values.table, tuple(map(int, sampled)))

    def decoded(self, _rows: int, /) -> None:
        """Does nothing: the tree doesn't depend on the number of rows."""

    def learn(self, record: RoundRecord, /) -> None:
        spec = record.spec
        draft = record.draft
        chooses_by_values = spec is not None and spec.values is self.values.table
        if spec is not None and chooses_by_values and draft is not None and draft.tree.size:
            self.values.learn(draft.tree, draft.paths, np.array(spec.groups))

    def keep(self) -> None:
        """Does nothing: each engine learns its values anew."""
