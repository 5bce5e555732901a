"""The arm whose trees are sized by their nodes' values: a network's trees, looked-up ones, or unions of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from eyas.engine.controller.arms import Batch, DraftArm
from eyas.engine.controller.budget import Pace
from eyas.engine.controller.copy_search import CopySearches
from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.explore import Explorer
from eyas.engine.controller.gain import THRESHOLDS, GainModel
from eyas.engine.controller.planner import Prospect, Prospects, Shape
from eyas.engine.controller.recordings import Recordings
from eyas.engine.controller.records import RoundRecord
from eyas.engine.controller.texts import SHARES, Texts
from eyas.tree import TreeSpec
from eyas.tree.acceptance import Indices
from eyas.tree.draft_tree import Source
from eyas.tree.shared import PlannedTree, SharedTree

WIDTHS = (1, 2, 3, 4, 6, 8)
DEPTH = 10
_ANALYZING = 0.005
"""The share of the time that analyzing drafts may take."""
_MIN_PER_ROW = 4
_MAX_PER_ROW = 64
_HOPED = int(SHARES.searchsorted(0.89))
"""Index of the share of tokens that a drafter is hoped to guess in its first texts, as what it shows there serves all
later ones. With the mean of what is known instead, the first six answers of a recorded pair take 8% longer."""
_FOUND = 64
"""The most looked-up nodes in a round of one row; each further row adds a few."""


class TreeArm(DraftArm):
    """Trees of the fastest shape, cut to the nodes that pay."""

    def __init__(
        self,
        widths: Sequence[int] = WIDTHS,
        depth: int = DEPTH,
        *,
        counts_freely: bool = True,
        computes: bool = True,
        looks_up: bool = False,
    ) -> None:
        """Choose among beams of `widths` (ascending) and trees up to `depth`.

        `counts_freely`: whether nodes can be counted, and drafting stopped, without a device sync, as on a CPU.
        Elsewhere only the budget limits a tree. `computes`: whether the drafter has a network, whose levels take time;
        `looks_up`: whether it finds continuations on the host.
        """
        self.gain: GainModel = GainModel(widths, depth, len(Source) if looks_up else 1)
        self.texts: Texts = self.gain.texts
        self.explorer = Explorer()
        self.depth = depth
        self.drafts = computes
        self.lookups = CopySearches() if looks_up else None
        self.recordings = None if counts_freely else Recordings(widths)
        self._widths = tuple(widths)
        self._counts_freely = counts_freely
        self._analyzing = Pace(_ANALYZING, least=1, most=64)
        self._made: dict[Hashable, TreeSpec] = {}
        """The trees of a plan, kept because making one takes several percent of a small target's pass."""

    @property
    def analysis(self) -> float:
        return self._analyzing.cost

    def follow(self, texts: Sequence[int]) -> None:
        self.texts.follow(texts)
        self.gain.copies.follow(texts)

    def prospects(self, batch: Batch, costs: CostModel, prompt_pairs: float) -> Prospects:
        self._prospects = Prospects(
            self.gain.forecast(batch.texts, batch.groups),
            costs,
            self._widths,
            batch.rows,
            batch.lengths,
            depth=batch.room,
            stops_early=self._counts_freely,
            prompt_pairs=prompt_pairs,
        )
        self._made.clear()
        return self._prospects

    def saved(self, prospects: Prospects) -> float:
        if not self.texts.known:  # without prompts, since the reading of these is weighed against it
            return float(prospects.saved_by_share[_HOPED]) + prospects.reading
        return float(self.texts.guessed() @ prospects.saved_by_share)

    def size(self, shape: Shape) -> tuple[int, int]:
        return shape.depth + 1, self._widths[shape.width]

    def tree(self, prospect: Prospect | None, batch: Batch, *, probing: bool) -> TreeSpec:
        keeps = probing or self._analyzing.due()
        looks_up = self.lookups is not None and self.lookups.of(batch.rows).looking
        calibrations = () if prospect is None else tuple(self.texts.assumed(text).calibration for text in batch.texts)
        copies = self.gain.copies.exponents(batch.texts) if looks_up else ()
        weights = self.texts.weights(batch.texts) if looks_up and batch.rows > 1 else ()
        shape = None if prospect is None else prospect.shape
        key = (shape, batch.groups, calibrations, copies, weights, probing, keeps, looks_up)
        if key not in self._made and prospect is not None and not (self._counts_freely or keeps):
            self._made[key] = prospect.recurring_tree(self._widths[prospect.shape.width], batch.rows)
        elif key not in self._made:
            rows = batch.rows
            made = (
                self._copies_alone(rows) if prospect is None else self._drafted(prospect, rows, not probing, looks_up)
            )
            self._made[key] = replace(
                made,
                values=self.gain.values,
                groups=batch.groups if any(batch.groups) else None,
                calibrations=calibrations or None,
                copy_exponents=copies or None,
                weights=weights or None,
                keeps_candidates=keeps,
                # what deeper levels offer is only learned from drafts that don't end where they can't pay
                level_price=-math.inf if keeps else made.level_price,
                looks_up=looks_up,
            )
        return self._made[key]

    def _drafted(self, prospect: Prospect, rows: int, chooses: bool, looks_up: bool) -> PlannedTree:
        """The tree of a shape; `chooses`: whether only nodes that pay are verified."""
        shape = prospect.shape
        nodes = max(1, round(prospect.nodes))
        # attention pads all rows' queries to the longest row, so one easy row must not slow the pass for all
        most = _MAX_PER_ROW if rows == 1 else max(_MIN_PER_ROW, 5 * nodes // (2 * rows))
        prices = padding_prices = alone = None
        level_price = -math.inf
        if looks_up and self._counts_freely:
            # a copied passage may be as long as its price allows
            most = _MAX_PER_ROW
            nodes += _FOUND
        if self._counts_freely and chooses:
            # prices select the nodes, except in probes, which verify all; the budget only bounds the list of prices
            nodes = 3 * nodes + 4 * rows + 8
            rate = max(prospect.rate, self._prospects.plain_rate)
            prices = self._prospects.prices(rate, nodes)
            padding_prices = self._prospects.padding_prices(rate, rows * most) if rows > 1 else None
            if rows == 1:
                level_price = rate * self._prospects.level_seconds(self._widths[shape.width])
            if looks_up:  # the forecast, and so the rate, doesn't include what is looked up
                alone = rate * (prospect.seconds - self._prospects.added(nodes=prospect.nodes))
        return PlannedTree(
            SharedTree(
                depth=shape.depth + 1,
                width=self._widths[shape.width],
                budget=nodes,
                per_row=min(_MAX_PER_ROW, most),
                threshold=float(THRESHOLDS[shape.threshold]) if self._counts_freely else 0.0,
            ),
            prices=prices,
            alone=alone,
            level_price=level_price,
            padding_prices=padding_prices,
        )

    def _copies_alone(self, rows: int) -> PlannedTree:
        """The tree of a round in which the drafter only looks up: the nodes that pay among those found."""
        nodes = min(_MAX_PER_ROW * rows, _FOUND + 4 * rows)
        return PlannedTree(
            SharedTree(depth=_MAX_PER_ROW, width=self._widths[-1], budget=nodes, per_row=_MAX_PER_ROW),
            prices=self._prospects.prices(self._prospects.plain_rate, nodes),
            alone=float(rows),
            padding_prices=self._prospects.padding_prices(self._prospects.plain_rate, rows * _MAX_PER_ROW),
            found_only=True,
        )

    def learn(self, record: RoundRecord, judged: Prospect | None, clock: Callable[[], float]) -> int:
        drafted = self._learn(record, judged, clock)
        if not record.drafted:
            self.texts.rest()
        if record.rows > 1 and self.lookups is not None:
            emitted = [1] * record.rows if record.draft is None else list(map(len, record.draft.paths))
            self.texts.advance(record.texts, emitted)
        self._analyzing.round(record.whole)
        return drafted

    def _learn(self, record: RoundRecord, judged: Prospect | None, clock: Callable[[], float]) -> int:
        """Learn from a draft; from its nodes only if reading them takes no sync, or the draft was made for that."""
        draft, spec = record.draft, record.spec
        if draft is None or spec is None:
            return 0
        began = clock()
        reads = self._counts_freely or spec.keeps_candidates
        groups: Indices = np.array(spec.groups or (0,) * record.rows)
        if reads:
            self.gain.learn(record.texts, draft, groups, record.drafting)
        if spec.keeps_candidates:
            spent = clock() - began
            if self._counts_freely and record.rows == 1:  # most levels below the deepest node are only drafted for this
                further = max(0, draft.tree.network.levels - draft.tree.max_depth)
                spent += further * self._prospects.level_seconds(spec.max_fanout)
            if self.recordings is not None and self.recordings.usual and record.seconds is not None:
                spent += max(0.0, record.seconds - self.recordings.usual)
            self._analyzing.done(spent)
        kept = [len(path) - 1 - found for path, found in zip(draft.paths, record.copied, strict=True)]
        drafted = sum(kept)
        if judged is not None and record.drafted:
            self.texts.judge(judged.accepted, record.texts, draft.tree.network.promise, kept, record.drafting)
        return drafted
