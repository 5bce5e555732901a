"""How often draft nodes are accepted: the calibration of their values.

How often a child of an accepted node is accepted depends on the drafter's probability for it and on whether it is the
node's first child, but hardly on its depth, so all depths are pooled. Frequencies start from a prior, decay with time,
and are made non-increasing as the probability falls (isotonic regression by pooling adjacent violators). The prior is
the drafter's probability raised to a power, which is 1 for a well-calibrated drafter; this one number is learned from
few nodes, long before every bin has seen enough. If a tree combines several sources, each is calibrated separately.

Shapes: G groups, K bins, n nodes, P powers; B rows, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.tree.draft_tree import DraftTree, Proposal, Source
from eyas.tree.values import BIN_CENTERS, BINS, ValueTable, bins

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GROUPS = 2
"""Greedy rows and sampled rows have separate statistics: the Gumbel noise of a coupled drafter changes its scores.
Nodes of source s (`eyas.tree.draft_tree.Source`) in rows of group g are in group s * GROUPS + g."""
_PRIOR = 8.0
"""The weight of a bin's prior, in nodes."""
_EXPONENTS: Array = 2.0 ** np.arange(-3.0, 2.01, 0.25)
"""[P] the powers considered: drafters are under- or overconfident."""
_BIN_POWERS: Array = np.exp(np.multiply.outer(_EXPONENTS, BIN_CENTERS))
"""[P, K] each bin's probability, raised to each power."""
_PRIOR_WEIGHT = 2.0
"""Weight of the prior that the drafter is well calibrated: its log-likelihood cost at a power of 2 or 1/2."""
_DECAY = 1.0 - 1.0 / 600.0
"""The factor by which counts decay each round."""
_MAX_QUEUED_ROUNDS = 64
"""Maximum number of rounds counted together, because a round's few nodes aren't worth a dozen array operations."""
_UPDATE_INTERVAL = 16
"""Values are updated after this many drafts, and initially at doubling intervals."""


class GradedStep(NamedTuple):
    """A step of a copied continuation whose parent was right, and whether the step was right."""

    later: bool
    """Whether it isn't its parent's first child."""
    logprob: float
    accepted: bool


def graded(proposal: Proposal, emitted: Sequence[int]) -> list[GradedStep]:
    """Grade the steps of a `proposal`, verified or not, by the tokens that its row `emitted` next.

    So the values of copies are learned without trials.
    """
    steps = list[GradedStep]()
    if not proposal.tokens:
        return steps
    children = proposal.children()
    node = -1
    for token in emitted:
        right = -1
        for rank, child in enumerate(children[node + 1]):
            accepted = proposal.tokens[child] == token
            steps.append(GradedStep(rank > 0, proposal.logprobs[child], accepted))
            right = child if accepted else right
        if right < 0:
            break
        node = right
    return steps


class Acceptance:
    """Counts of offered and accepted children of accepted nodes, and the acceptance rates that follow from them."""

    def __init__(self, groups: int = GROUPS) -> None:
        """`groups`: the number of groups of nodes."""
        self._offered: Array = np.zeros((groups, 2, BINS))
        self._accepted: Array = np.zeros((groups, 2, BINS))
        self._waiting: list[list[tuple[int, bool, float, bool]]] = []
        """The nodes of rounds that aren't counted yet: group, later child, log-probability, accepted."""
        self._rates: Array = np.zeros_like(self._offered)
        self._table: ValueTable | None = None
        self._stale: set[int] = set(range(groups))
        """Groups with new counts since the last table. Updating all of them would take a tenth of a small pass."""

    def learn_tree(self, tree: DraftTree, paths: Sequence[Sequence[int]], groups: Indices) -> None:
        """Count the nodes of a verified tree on the host whose parents were accepted.

        `paths` [B] are the node indexes walked in each row, starting with the root's 0; `groups` [B] the rows' groups.
        """
        sources = [[0] * tree.size] * len(paths) if tree.sources is None else tree.sources.tolist()
        columns = (tree.acceptable.tolist(), tree.parents.tolist(), tree.logprob.tolist(), sources)
        tested = []
        for row, (path, *nodes) in enumerate(zip(paths, *columns, strict=True)):  # lists, for few nodes
            walked = set(path)
            begun = set[tuple[int, int]]()
            logprobs = nodes[2]
            for node, (valid, parent, logprob, source) in enumerate(zip(*nodes, strict=True), 1):
                if valid and parent + 1 in walked:
                    step = logprob - logprobs[parent] if parent >= 0 else logprob
                    tested.append((int(groups[row]) + GROUPS * source, (parent, source) in begun, step, node in walked))
                    begun.add((parent, source))
        self._enqueue(tested)

    def learn_copies(self, graded: Sequence[Sequence[GradedStep]], groups: Indices) -> None:
        """Count the graded steps of each row's copies [B]; `groups` [B] the rows' groups."""
        self._enqueue(
            [
                (group + GROUPS * Source.LOOKUP, step.later, step.logprob, step.accepted)
                for steps, group in zip(graded, groups.tolist(), strict=True)
                for step in steps
            ]
        )

    def _enqueue(self, tested: list[tuple[int, bool, float, bool]]) -> None:
        """Keep a round's tested nodes until there are enough to be counted together."""
        if tested:
            self._waiting.append(tested)
        if len(self._waiting) >= _MAX_QUEUED_ROUNDS:
            self._count()

    def _count(self) -> None:
        """Count the nodes of the waiting rounds."""
        rounds = self._waiting
        self._waiting = []
        if rounds:
            group, later, steps, accepted = map(
                np.array, zip(*(node for nodes in rounds for node in nodes), strict=True)
            )
            ages = np.repeat(np.arange(len(rounds))[::-1], [len(nodes) for nodes in rounds])
            self.learn(group, later, bins(steps), accepted, ages)

    def learn(self, groups: Indices, later: Mask, bins: Indices, accepted: Mask, ages: Indices | None = None) -> None:
        """Count verified nodes [n] whose parents were accepted.

        `later` [n]: whether the node is not its parent's first child; `accepted` [n]: whether it was accepted itself;
        `ages` [n]: how many rounds ago, the oldest first (None = all in one round).
        """
        shape = self._offered.shape
        self._stale.update(groups.tolist())
        at = np.ravel_multi_index((groups, later.astype(np.int64), bins), shape)
        weights = np.ones(len(at)) if ages is None else _DECAY**ages
        fade = _DECAY * weights[0]
        self._offered *= fade
        self._accepted *= fade
        self._offered += np.bincount(at, weights=weights, minlength=self._offered.size).reshape(shape)
        self._accepted += np.bincount(at, weights=weights * accepted, minlength=self._offered.size).reshape(shape)

    @property
    def counts(self) -> tuple[Array, Array]:
        """[G, 2, K] the numbers of nodes offered and accepted: the state itself, which callers may change in place."""
        self._count()
        self._stale.update(range(len(self._offered)))
        return self._offered, self._accepted

    def table(self) -> ValueTable:
        """The current acceptance rates, by group, first or later child, and probability."""
        self._count()
        some = sorted(self._stale)
        if self._table is not None and not some:
            return self._table
        self._stale.clear()
        weight = self._offered[some] + _PRIOR
        rates = (self._accepted[some] + _PRIOR * self._prior(some)) / weight
        for index, group in enumerate(some):
            for later in range(2):
                self._rates[group, later] = non_increasing(rates[index, later], weight[index, later])
        self._table = ValueTable(self._rates)
        return self._table

    def _prior(self, groups: Sequence[int]) -> Array:
        """The drafter's probabilities [., 2, K] for some groups, raised to the most likely power."""
        taken = self._accepted[groups]
        refused = self._offered[groups] - self._accepted[groups]
        likelihood = (
            taken @ np.log(_BIN_POWERS).T
            + refused @ np.log1p(-_BIN_POWERS).T
            - _PRIOR_WEIGHT * np.log2(_EXPONENTS) ** 2
        )
        out: Array = _BIN_POWERS[likelihood.argmax(2)]  # of [., 2, P]
        return out


class LearnedValues:
    """Values learned from the nodes of all sources, for trees that no controller plans."""

    def __init__(self) -> None:
        self._acceptance = Acceptance(GROUPS * len(Source))
        self.table: ValueTable = self._acceptance.table()
        self._learned = 0

    def learn(self, tree: DraftTree, paths: Sequence[Sequence[int]], groups: Indices) -> None:
        """Learn from a verified tree, as `Acceptance.learn_tree` does."""
        self._acceptance.learn_tree(tree, paths, groups)
        self._learned += 1
        if self._learned % _UPDATE_INTERVAL == 0 or self._learned & (self._learned - 1) == 0:
            self.table = self._acceptance.table()


def non_increasing(values: Array, weights: Array) -> Array:
    """The non-increasing sequence closest to `values` [K] by weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean = value
        mass = weight
        length = 1
        while blocks and blocks[-1][0] < mean:
            other, other_mass, other_length = blocks.pop()
            mean = (mean * mass + other * other_mass) / (mass + other_mass)
            mass, length = mass + other_mass, length + other_length
        blocks.append((mean, mass, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])
