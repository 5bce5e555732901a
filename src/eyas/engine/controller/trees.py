"""The draft trees of a plan's shapes: which nodes a round drafts, and what they must be worth to be verified."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from eyas.engine.controller.gain import THRESHOLDS
from eyas.engine.controller.planner import Prospect, Prospects
from eyas.tree import TreeSpec
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import ValueTable

_LEAST_PER_ROW = 4
_MOST_PER_ROW = 64
_FOUND = 64
"""The most looked-up nodes in a round of one row; rounds of several rows may have a few more."""


class PlannedTrees:
    """The trees of one plan. Each is made once: making one takes several percent of a small target's pass."""

    def __init__(self, widths: Sequence[int], counts_freely: bool) -> None:
        """For beams of `widths`; `counts_freely` as in `Controller`."""
        self._widths, self._counts_freely = tuple(widths), counts_freely
        self._made: dict[Hashable, TreeSpec] = {}

    def renew(self, prospects: Prospects, values: ValueTable, least_rate: float) -> None:
        """Begin a new plan; `least_rate` is the lowest rate, in tokens per second, that turns time into tokens."""
        self._prospects, self._values, self._least_rate = prospects, values, least_rate
        self._made.clear()

    def of(
        self, prospect: Prospect | None, groups: tuple[int, ...], calibrations: tuple[float, ...], *,
        chooses: bool, keeps: bool, looks_up: bool,
    ) -> TreeSpec:  # fmt: skip
        """The tree of a shape for rows in `groups` [R] and texts with these `calibrations` [R].

        With None and no calibrations, it is a tree of what is looked up alone. `chooses`: whether only nodes that
        pay are verified; `keeps`: whether the candidates are kept.
        """
        key = (None if prospect is None else prospect.shape, groups, calibrations, chooses, keeps, looks_up)
        if key not in self._made and prospect is not None and not (self._counts_freely or keeps):
            self._made[key] = prospect.recurring_tree(self._widths[prospect.shape.width], len(groups))
        elif key not in self._made:
            rows = len(groups)
            made = self._found(rows) if prospect is None else self._drafted(prospect, rows, chooses, looks_up)
            self._made[key] = replace(
                made,
                values=self._values,
                groups=groups if any(groups) else None,
                calibrations=calibrations or None,
                keeps_candidates=keeps,
                looks_up=looks_up,
            )
        return self._made[key]

    def _drafted(self, prospect: Prospect, rows: int, chooses: bool, looks_up: bool) -> PlannedTree:
        shape = prospect.shape
        nodes = max(1, round(prospect.nodes))
        # attention pads all rows' queries to the longest row, so one easy row must not slow the pass for all
        most = _MOST_PER_ROW if rows == 1 else max(_LEAST_PER_ROW, 5 * nodes // (2 * rows))
        prices = padding_prices = None
        if looks_up and self._counts_freely:
            most, nodes = _MOST_PER_ROW, nodes + _FOUND  # a copied passage may be as long as its price allows
        if self._counts_freely and chooses:
            # prices select the nodes, except in probes that learn about prices; the budget only ends their list
            nodes = 3 * nodes + 4 * rows + 8
            rate = max(prospect.rate, self._least_rate)
            prices = self._prospects.prices(rate, nodes)
            padding_prices = self._prospects.padding_prices(rate, rows * most) if rows > 1 else None
        return PlannedTree(
            SharedTree(
                depth=shape.depth + 1,
                width=self._widths[shape.width],
                budget=nodes,
                per_row=min(_MOST_PER_ROW, most),
                threshold=float(THRESHOLDS[shape.threshold]) if self._counts_freely else 0.0,
            ),
            prices=prices,
            padding_prices=padding_prices,
        )

    def _found(self, rows: int) -> PlannedTree:
        """The tree of a round in which the drafter only looks up: whatever pays of what it finds."""
        nodes = min(_MOST_PER_ROW * rows, _FOUND + 4 * rows)
        return PlannedTree(
            SharedTree(depth=1, width=self._widths[-1], budget=nodes, per_row=_MOST_PER_ROW),
            prices=self._prospects.prices(self._least_rate, nodes),
            padding_prices=self._prospects.padding_prices(self._least_rate, rows * _MOST_PER_ROW),
            found_only=True,
        )
