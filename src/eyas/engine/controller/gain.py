"""The gain model: the expected nodes and accepted tokens of every tree shape, learned from earlier drafts.

A node is kept if its value, the probability that it is accepted, reaches a threshold. So a shape consists of a beam
width, a depth and a threshold, and a batch keeps all nodes of its rows above the threshold. Because that is a sum over
rows, multiplying the average row by the number of rows gives the exact mean, however much rows differ.

Shapes: G groups, W widths, D depths, K bins, L thresholds, R rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eyas.engine.controller.difficulty import Difficulty
from eyas.engine.controller.experience import Experience
from eyas.engine.controller.supply import Supply
from eyas.engine.controller.texts import Texts
from eyas.engine.round import VerifiedDraft
from eyas.tree.acceptance import GROUPS, Acceptance, Array, Indices, graded
from eyas.tree.values import BIN_EDGES, ValueTable

_LOW = (0.02, 0.03, 0.045, 0.065, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.36, 0.42)
_HIGH = (0.48, 0.54, 0.6, 0.66, 0.72, 0.78, 0.83, 0.87, 0.905, 0.935, 0.96, 0.98)
THRESHOLDS: Array = np.array(_LOW + _HIGH)
"""[L] the thresholds of node values among which shapes choose."""
# [K, 1], [K, L]
_TOP = BIN_EDGES[:-1, None]
_BOTTOM = np.maximum(BIN_EDGES[1:, None], np.log(THRESHOLDS))
_KEPT: Array = np.maximum(_TOP - _BOTTOM, 0.0) / (_TOP - BIN_EDGES[1:, None])
"""[K, L] the share of a bin's nodes that reach a threshold."""
_WORTH: Array = _KEPT * np.exp((_TOP + _BOTTOM) / 2)
"""[K, L] the average value of a bin's nodes, counting those below the threshold as 0."""
_LEARNED_STATE = ("offered", "accepted", "sums", "weights", "best_sums", "best_weights")
_RESUMED = 0.5
_RENEWED = 256
"""The weight of resumed statistics; the drafts after which statistics are saved again."""


class Forecast(NamedTuple):
    """The expected result of a round, by shape."""

    nodes: Array  # [W, D, L] in the whole batch
    accepted: Array  # [W, D, L] draft tokens, likewise
    levels: Array  # [D, L] levels that are drafted until no row has a node worth extending


class GainModel:
    """Forecasts the nodes and accepted tokens of all shapes from acceptance rates and candidate counts."""

    def __init__(self, widths: Sequence[int], depth: int, sources: int = 1) -> None:
        """For trees of up to `depth` levels and beams of `widths`, whose nodes come from `sources` sources."""
        self.widths = tuple(widths)
        self.depth = depth
        self._acceptance = Acceptance(GROUPS * sources)
        self._supply = Supply(widths, depth)
        self.values: ValueTable = self._acceptance.table()
        self.texts = Texts()
        self.copies = Difficulty()
        """How well copies predict each text."""
        self._experience: Experience | None = None
        self._learned_rounds = 0
        """Drafts since what was learned was last saved."""

    def learn(
        self, texts: Sequence[int], draft: VerifiedDraft, groups: Indices, drafting: Sequence[bool] | None
    ) -> None:
        """Learn from a verified draft of `texts` [R], and from its candidates if they were kept; `groups` [R]."""
        if draft.tree.network.candidates is not None:
            alive = np.ones(len(groups), dtype=np.bool_) if drafting is None else np.array(drafting, dtype=np.bool_)
            self._supply.learn(draft.tree.network.candidates, groups, alive)
        proposals = draft.tree.lookup.proposals
        emitted = draft.emitted
        if not proposals or emitted is None:
            self._acceptance.learn_tree(draft.tree, draft.paths, groups)
        else:
            steps = [graded(one, tokens) for one, tokens in zip(proposals, emitted, strict=True)]
            self._acceptance.learn_copies(steps, groups)
            self.copies.learn(texts, steps, self.values, groups)
        self._learned_rounds += 1

    @property
    def _learned(self) -> dict[str, Array]:
        """What was learned about the drafter, by name."""
        return dict(zip(_LEARNED_STATE, (*self._acceptance.counts, *self._supply.counts), strict=True))

    def keep(self) -> None:
        """Save what was learned if there were enough drafts since the last time; called while the engine is idle."""
        if self._experience is not None and self._learned_rounds >= _RENEWED:
            self._experience.write(self._learned)
            self._learned_rounds = 0

    def resume(self, experience: Experience) -> None:
        """Continue from `experience` at half its weight, because texts may have changed; later, save to it.

        What a model of other shapes has learned is ignored.
        """
        self._experience = experience
        learned = experience.read()
        own = self._learned
        if learned.keys() != own.keys() or any(learned[name].shape != own[name].shape for name in own):
            return
        for name, state in own.items():
            state[:] = _RESUMED * learned[name]
        self.texts.resume()
        self.settle()

    def prepare(self) -> None:
        """Do what would take long in the first round."""
        self._supply.prepare()

    def settle(self, *, values: bool = True) -> None:
        """Base forecasts on the latest statistics of texts, and `values` of nodes, which take as long as half a pass of
        a small target."""
        if values:
            self.values = self._acceptance.table()
        self.texts.settle()

    def forecast(self, texts: Sequence[int], groups: Sequence[int]) -> Forecast:
        """The forecast for a batch of `texts` [R] in these `groups` [R]."""
        rates, best = self._supply.rates, self._supply.best
        shape = (len(self.widths), self.depth, len(THRESHOLDS))
        nodes = np.zeros(shape)
        accepted = np.zeros(shape)
        idle = np.ones(shape[1:])  # [D, L] the probability that no row has a node worth another level
        for group in range(GROUPS):
            assumed = [self.texts.assumed(text) for text, own in zip(texts, groups, strict=True) if own == group]
            if not assumed:
                continue
            rows = len(assumed)
            offers = sum(one.offers for one in assumed)
            nodes += offers * (rates[group] @ _KEPT)
            accepted += rows * np.minimum(sum(one.accepted for one in assumed) / rows * (rates[group] @ _WORTH), 1.0)
            reach = np.minimum(offers / rows * (best[group] @ _KEPT), 1.0)  # [D, L]
            idle *= (1.0 - reach) ** rows
        # level 1 is always drafted, level d + 1 if the best node of some row at depth d is worth extending
        continues = np.minimum.accumulate(1.0 - idle, axis=0)
        levels = 1.0 + np.concatenate((np.zeros((1, shape[2])), continues[:-1].cumsum(0)))
        return Forecast(nodes.cumsum(1), accepted.cumsum(1), levels)
