"""The draft tree: candidate continuations of the last committed token, how they grow, and the target's logits for them.

Shapes: B rows, N nodes (the root not counted), W frontier nodes, K children offered by each, T tokens of a target pass,
V vocabulary. A node index counts the root as 0 and node i as i + 1, as do the columns of a verification pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import to_device
from eyas.tree.values import ValueTable, top_k_mask


@dataclass(frozen=True)
class BeamCandidates:
    """All candidates of a beam search, level by level, in host memory; complete only after the round's host sync."""

    scores: tuple[Tensor, ...]
    """For each level [B, W * K] logarithms of path values, child `k` of frontier node `w` in column `w * K + k`."""
    beams: tuple[Tensor, ...]
    """For each level but the last [B, W'] columns of the children that are the next frontier, best first."""


class Source(IntEnum):
    """Where a node comes from; node values are learned separately for each source."""

    NETWORK = 0
    LOOKUP = 1
    BOTH = 2
    """The drafter's network and a copied passage agree on it."""
    DISPUTED = 3
    """A copied passage continues with it, but the network guesses other tokens there."""


@dataclass(frozen=True)
class Draws:
    """The distributions that a batch of chains was drawn from, for rules whose acceptance depends on them."""

    probs: tuple[Tensor, ...]
    """For each level [B, Vd] probabilities of the tokens `ids`."""
    ids: Tensor | None  # [Vd] the target's ids; None = the target's whole vocabulary
    valid: Tensor  # [B, N] bool: which nodes were drawn, including those that a grammar rules out later

    def at(self, level: int, vocab_size: int) -> Tensor:
        """[B, V] the probabilities of a level over the target's vocabulary."""
        probs = self.probs[level]
        return probs if self.ids is None else probs.new_zeros(len(probs), vocab_size).index_add_(1, self.ids, probs)


@dataclass
class Proposal:
    """A tree of continuations of one row: parents come before their children, siblings are best first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """The index of each node's parent; -1 = the root."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each step, not of the whole path."""
    predicted: bool = False
    """Whether it was copied from the request's prediction."""

    @staticmethod
    def chain(tokens: Sequence[int], logprobs: Sequence[float]) -> Proposal:
        """A single continuation, whose steps have these log-probabilities."""
        return Proposal(list(tokens), list(range(-1, len(tokens) - 1)), list(logprobs))

    def levels(self, depth: int) -> list[list[int]]:
        """The nodes of each level, in order; at most `depth` levels."""
        found: list[list[int]] = []
        above: list[int] = []  # the depth of each node; 0 for the root's children
        for node, parent in enumerate(self.parents):
            above.append(above[parent] + 1 if parent >= 0 else 0)
            if above[node] == len(found):
                found.append([])
            found[above[node]].append(node)
        return found[:depth]

    def children(self) -> list[list[int]]:
        """The children of the root, then of each node, in order."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found


@dataclass(frozen=True)
class NetworkDraft:
    """How a network drafted a batch of trees, for planning the next ones."""

    levels: int = 0
    """Levels that it computed, if the host knows; fewer than planned if another level wasn't worth it."""
    candidates: BeamCandidates | None = None
    """The candidates from which its nodes were chosen, if the tree's spec keeps them."""
    promise: Sequence[float] | None = None
    """[B] expected number of its accepted nodes, in each row; None = not computed."""


@dataclass(frozen=True)
class Lookup:
    """How copies for a batch of trees were found on the host."""

    alone: bool = False
    """Whether all nodes are copies: no network computed anything for the draft."""
    seconds: float = 0.0
    """Time spent looking for copies and merging them with the network's nodes."""
    proposals: Sequence[Proposal] = ()
    """[B] everything that was found, if `alone`, because nodes that weren't verified are graded, too."""
    predicted: Sequence[bool] = ()
    """[B] whether the row's copies come from its request's prediction; empty = no row's do."""


@dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees, padded to N nodes.

    Parents come before their children, and an invalid node has no valid descendant.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 = the root (the last committed token)
    logprob: Tensor  # [B, N] float32, cumulative: the drafter's value for the whole path to the node
    valid: Tensor  # [B, N] bool
    max_depth: int
    """An upper bound on depth that the host knows, scratch nodes excluded; 0 for an empty tree."""
    shared_ancestors: Tensor | None = None  # [1 + N, 1 + N] bool when every row has the same shape
    counted: int | None = None
    """Number of valid nodes of all rows together; None = only the device knows it."""
    draws: Draws | None = None
    """The distributions from which nodes were drawn, if the acceptance rule needs them."""
    scratch: Tensor | None = None
    """[B, N] bool: nodes that are run but never accepted, like their descendants; None = there are none."""
    sources: Tensor | None = None  # [B, N] int64, each node's `Source`; None = all the same
    network: NetworkDraft = NetworkDraft()
    lookup: Lookup = Lookup()

    @staticmethod
    @lru_cache(maxsize=64)
    def empty(batch: int, device: torch.device) -> DraftTree:
        """Trees without nodes, as plain decoding verifies them: each row is only its root."""
        index = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return DraftTree(index, index, index.to(torch.float32), index.to(torch.bool), 0, counted=0)

    @property
    def size(self) -> int:
        """N, the number of node columns, valid or not."""
        return self.tokens.shape[1]

    # One row: the root r has the children a and b, and a has the child c.
    #   column of `tokens`   0  1  2        tokens  [ a,  b, c]
    #   node index         0 1  2  3        parents [-1, -1, 0]   columns of `tokens`; -1 is the root
    #   ancestors  r: 1 0 0 0               depth   [0, 1, 1, 2]  by node index
    #              a: 1 1 0 0
    #              b: 1 0 1 0
    #              c: 1 1 0 1
    @cached_property
    def ancestors(self) -> Tensor:
        """[B, 1 + N, 1 + N] bool, over node indexes: `[b, q, k]` = node k is q itself or on q's path to the root."""
        if self.shared_ancestors is not None:
            return self.shared_ancestors.expand(self.tokens.shape[0], -1, -1)
        if self.size == 0:
            return torch.ones(self.tokens.shape[0], 1, 1, dtype=torch.bool, device=self.tokens.device)
        return ancestor_mask(self.parents, self.max_depth if self.scratch is None else self.size)

    @cached_property
    def depth(self) -> Tensor:
        """[B, 1 + N] int64 depth by node index: 0 for the root, 1 for its children, and so on."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def acceptable(self) -> Tensor:
        """[B, N] bool: the nodes that may be accepted: the valid ones except scratch nodes."""
        return self.valid if self.scratch is None else self.valid & ~self.scratch

    @cached_property
    def full(self) -> bool | None:
        """Whether every node is valid; None if only an accelerator knows."""
        if self.counted is not None:
            return self.counted == self.valid.numel()
        return bool(self.valid.all()) if self.valid.device.type == "cpu" else None

    def only(self, drafting: Sequence[bool] | None) -> DraftTree:
        """The same trees, without the nodes of rows that aren't `drafting` [B]; None = all rows are."""
        if drafting is None or all(drafting):
            return self
        mask = to_device(list(drafting), self.valid.device).unsqueeze(1)
        counted = self.size * sum(drafting) if self.counted == self.valid.numel() else None
        return replace(self, valid=self.valid & mask, counted=counted)

    def compact(self) -> DraftTree:
        """The same trees in as few columns as the fullest row needs: valid nodes first, in their order.

        The width would have to be read from the device, so on an accelerator the trees stay as they are.
        """
        if self.valid.device.type != "cpu" or self.full:
            return self
        counts = self.valid.sum(1)  # [B]
        width = int(counts.max())
        if width == self.size:
            return self
        return self.keeping(self.valid, width, int(counts.sum()))

    def keeping(self, kept: Tensor, width: int, counted: int | None) -> DraftTree:
        """Only the `kept` [B, N] nodes, in order, at most `width` per row; `counted` is their number in all rows."""
        # kept nodes come first, in order, which puts parents before children: of [a, b, c] with parents [-1, -1, 0],
        # kept [1, 0, 1] gives chosen [0, 2], column [-1, 0, 0, 1] and parents [-1, 0]
        chosen = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # [B, width]
        valid = kept.gather(1, chosen)
        column = F.pad(kept.cumsum(1) - 1, (1, 0), value=-1)  # [B, 1 + N] new column of the root (-1) and the kept
        parents = column.gather(1, self.parents.gather(1, chosen) + 1)
        return replace(
            self,
            tokens=self.tokens.gather(1, chosen),
            # an invalid column copies a node whose parent may be gone: make it a child of the root
            parents=parents.masked_fill(~valid, -1),
            logprob=self.logprob.gather(1, chosen),
            valid=valid,
            sources=None if self.sources is None else self.sources.gather(1, chosen),
            max_depth=min(self.max_depth, width),
            shared_ancestors=None,
            counted=counted,
            scratch=None if self.scratch is None else self.scratch.gather(1, chosen),
        )

    def packed(self) -> Tensor:
        """[B, P * N] int64: its P parts side by side, floats as their bits, for one copy to the host.

        See `unpacked`.
        """
        bits = self.logprob.contiguous().view(torch.int32)
        parts = (self.tokens, self.parents, self.valid, bits, self.scratch, self.sources)
        return torch.cat([part.to(torch.int64) for part in parts if part is not None], dim=1)

    def unpacked(self, packed: Tensor) -> DraftTree:
        """The same trees on the host, from a host copy of what `packed` returned."""
        count = 4 + (self.scratch is not None) + (self.sources is not None)
        tokens, parents, valid, bits, *others = packed.view(len(packed), count, self.size).unbind(1)
        rest = iter(others)
        return replace(
            self,
            tokens=tokens,
            parents=parents,
            valid=valid.bool(),
            logprob=bits.to(torch.int32).contiguous().view(torch.float32),
            scratch=None if self.scratch is None else next(rest).bool(),
            sources=None if self.sources is None else next(rest),
            shared_ancestors=None,
        )

    def columns(self, root: Tensor) -> Tensor:
        """[B, 1 + N] token ids of a verification pass: the `root` [B] of each row, then its nodes."""
        return torch.cat((root.unsqueeze(1), self.tokens), dim=1)


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[B, 1 + N, 1 + N] bool ancestor-or-self relation of `parents` [B, N] (-1 = root), over node indexes.

    Repeated squaring of "self or parent" doubles the distance covered, so log2(depth) small products suffice.
    """
    batch, nodes = parents.shape
    reach = torch.eye(1 + nodes, device=parents.device).repeat(batch, 1, 1)
    reach[:, 1:].scatter_(2, parents.unsqueeze(2) + 1, 1.0)
    covered = 1
    while covered < max_depth:
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
        covered *= 2
    return reach > 0


class TreeSpec(ABC):
    """A tree shape: immutable and shared by all drafts. Callers use its properties and never test for its class."""

    depth: int
    """Levels below the root = drafter forwards in a round."""
    method: str | None = None
    """The only method whose drafter makes such trees; None = every drafter grows them."""

    # what a plan of one round adds to a shape (`eyas.tree.shared.PlannedTree`)
    values: ValueTable | None = None
    """The values of steps; None = their probabilities."""
    groups: tuple[int, ...] | None = None
    """Each row's group in `values`; None = all rows are in group 0."""
    calibrations: tuple[float, ...] | None = None
    """[B] accepted tokens of each row's text per token that the network's nodes promise; None = 1."""
    copy_exponents: tuple[float, ...] | None = None
    """[B] the power to which values of copied steps are raised in each row's text; None = 1."""
    keeps_candidates: bool = False
    """Whether finished trees include all candidates they were chosen from."""
    found_only: bool = False
    """Whether nodes are only found on the host, such as copies; a network, if there is one, computes nothing."""
    looks_up: bool = True
    """Whether a drafter that also has a network looks for copies."""

    @property
    @abstractmethod
    def max_fanout(self) -> int:
        """Maximum number of children that any node offers; a draft vocabulary must be at least this large."""

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Maximum number of nodes that a row's tree has."""

    @property
    def is_chain(self) -> bool:
        """Whether every tree is one path of a fixed length."""
        return False

    @property
    def recurs(self) -> bool:
        """Whether rows' trees grow independently, all to the same size, without a device sync."""
        return False

    @property
    def beam(self) -> int:
        """The largest level size at which a beam search reaches every node; 0 = not grown by beam search."""
        return 0

    @property
    def columns(self) -> int:
        """Maximum number of cache columns that a round takes beyond the committed ones.

        These are the root and the nodes in the target's cache, and the guesses in the drafter's.
        """
        return 1 + self.max_nodes

    def pass_tokens(self, rows: int) -> int:
        """Maximum number of tokens in the target pass of a round: a root for each row, and the nodes."""
        return rows * self.columns

    @abstractmethod
    def start(self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None) -> Growth:
        """Begin a batch of trees that are only a root. Rows that aren't `drafting` get no nodes; None = all are."""

    def search(self, batch: int, drafting: Sequence[bool] | None = None) -> BeamSearch | None:  # noqa: ARG002
        """The complete growth that `start` begins, on the host; None if it isn't a beam search."""
        return None

    def valued(self, values: ValueTable, groups: tuple[int, ...]) -> TreeSpec:  # noqa: ARG002
        """This shape with one round's `values` and `groups`; unchanged if it doesn't choose nodes by learned values."""
        return self

    def fits_all(self, counts: Sequence[int]) -> bool:  # noqa: ARG002
        """Whether there is room for all of the `counts` [B] nodes that beams reach, whatever their values."""
        return False

    def keep(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """[B, M] bool: the candidates to keep; `scores` [B, M] are logarithms of their values.

        `allowed` [B, M or 1]: which of them may be kept.
        """
        scores = scores.masked_fill(~allowed, -math.inf)
        return top_k_mask(scores, min(self.max_nodes, scores.shape[1])) & allowed

    def keep_on_host(self, scores: Sequence[Sequence[float]], allowed: Sequence[Sequence[bool]]) -> list[list[bool]]:
        """`keep` in lists [B][M], for trees that are made on the host."""
        made = []
        for values, usable in zip(scores, allowed, strict=True):
            order = sorted(compress(range(len(values)), usable), key=values.__getitem__, reverse=True)
            chosen = set(order[: self.max_nodes])
            made.append([node in chosen for node in range(len(values))])
        return made


class BeamSearch(NamedTuple):
    """The complete growth of a batch of trees, for drafters that run it in one call.

    Every beam node offers its `width` best children; the `width` best paths so far are the next level's beam. It ends
    after `depth` levels, as soon as no drafting row has a beam whose score exceeds `least`, or once further levels of a
    single row can't pay (`values.may_pay`).
    """

    depth: int
    width: int
    worth: npt.NDArray[np.float32] | None
    """[G, 2, K] logarithms of step values (`ValueTable`); None = their probabilities."""
    groups: npt.NDArray[np.int64] | None  # [B] each row's group in `worth`; None = group 0
    drafting: npt.NDArray[np.bool_] | None  # [B] None = all are
    least: float
    prices: npt.NDArray[np.float64] | None
    """What 1, 2, ... nodes of a single row must gain in total, up to its limit; None = the search chooses no nodes."""
    finish: Callable[[BeamLevels], DraftTree]
    """Makes the finished trees from the result."""
    calibration: float = 1.0
    """What the values of nodes are multiplied by before they are compared with the prices."""
    level_price: float = -math.inf
    """What each further level must gain; -inf = levels don't end for that."""

    @classmethod
    def by_probability(cls, depth: int, width: int, finish: Callable[[BeamLevels], DraftTree]) -> BeamSearch:
        """A search to the full depth that values paths by their probability."""
        return cls(depth, width, None, None, None, -math.inf, None, finish)


class ChosenNodes(NamedTuple):
    """Candidates of a single row that became nodes, depth first, the best child first."""

    nodes: npt.NDArray[np.int64]  # [3, N] candidates; their parents among the chosen ones, -1 = the root; tokens
    logprobs: npt.NDArray[np.float32]  # [N]
    promise: float
    """The sum of their values."""


class BeamLevels(NamedTuple):
    """The candidates of a beam search, of all levels side by side."""

    sizes: list[int]
    """The number of each level's candidates in a row; they sum to M."""
    tokens: npt.NDArray[np.int64]  # [B, M]
    parents: npt.NDArray[np.int64]  # [B, M] candidates, -1 = the root
    scores: npt.NDArray[np.float32]  # [B, M] logarithms of path values
    logprobs: npt.NDArray[np.float32]  # [B, M] of the paths
    beams: npt.NDArray[np.int64]  # [B, levels - 1, W'] the level's candidates that are the next frontier, best first
    chosen: ChosenNodes | None
    """The candidates worth their price, if there are prices."""


class Growth(Protocol):
    """A batch of trees that a drafter grows level by level; lives for one draft.

    The drafter reads how many children each frontier node should offer, hands them over, and gets back the nodes to
    run through its layers next.
    """

    @property
    def fanout(self) -> int:
        """K: children wanted of every frontier node at this level."""

    @property
    def calibrates(self) -> bool:
        """Whether node values are learned from how often nodes with such log-probabilities were accepted.

        If so, a drafter may weight log-probabilities by its own confidence: the values account for that.
        """

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        """Take the K best children [B, W, K] of each frontier node, best first; None when the trees are fully grown."""

    def tree(self) -> DraftTree:
        """The finished trees as tensors."""


class Frontier(NamedTuple):
    """The nodes whose children a drafter computes next."""

    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W] index into the previous frontier


@lru_cache(maxsize=256)
def all_valid(batch: int, nodes: int) -> Tensor:
    """[batch, nodes] the mask of trees on the host in which every node is valid."""
    return torch.ones(batch, nodes, dtype=torch.bool)


@lru_cache(maxsize=256)
def cells(batch: int, nodes: int, device: torch.device) -> Tensor:
    """[batch, nodes] the indices of a table's cells, row by row."""
    return torch.arange(batch * nodes, device=device).view(batch, nodes)


class NodeDraws(NamedTuple):
    """How each row's tokens are drawn if temperature and noise are the only processing of logits."""

    divisors: Tensor  # [B] float32, of the logits
    scales: Tensor  # [B] float32, of the noise
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int64 of the tokens after the roots


@dataclass(frozen=True)
class NodeLogits:
    """The target's logits for a batch of trees, stored once for every token that was actually run.

    No tensor of size B x (1 + N) x V is ever made. Invalid nodes refer to some other token's logits.
    """

    rows: Tensor  # [T, V]
    index: Tensor  # [B, 1 + N] int64 into `rows`, by node index

    @staticmethod
    def of(padded: Tensor) -> NodeLogits:
        """A view of the logits [B, 1 + N, V] of every node."""
        return NodeLogits(padded.flatten(0, 1), cells(*padded.shape[:2], padded.device))

    @property
    def vocab_size(self) -> int:
        """V, the target's vocabulary."""
        return self.rows.shape[1]

    @property
    def chooses(self) -> bool:
        """Whether choosing tokens for all nodes at once is faster than reading the logits of some."""
        return self.index.device.type != "cpu"

    def drawn(self, draws: Callable[[], NodeDraws | None], depth: Tensor) -> Tensor | None:  # noqa: ARG002
        """[B, 1 + N] the token drawn at every node of `depth` [B, 1 + N]; None if that needs the logits.

        `draws` says how tokens are drawn; if it returns None, that needs the logits.
        """
        return None

    def best(self) -> Tensor:
        """[B, 1 + N] the token with the highest logit at every node, the first among equals."""
        # `max`: several times faster than `argmax` on a CPU in half precision
        return self.rows.max(dim=-1).indices[self.index]

    def at(self, nodes: Tensor) -> Tensor:
        """[B, V] logits of one node of each row, by node index `nodes` [B]; an index past the end reads the last."""
        nodes = nodes.clamp(max=self.index.shape[1] - 1)
        return self.rows[self.index.gather(1, nodes.unsqueeze(1)).squeeze(1)]
