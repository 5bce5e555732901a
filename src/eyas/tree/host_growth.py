"""Shared trees grown on a CPU: with numpy, whose operations take a fraction of PyTorch's time at such sizes.

What an accelerator can't do without waiting for it is done here: drafting ends as soon as no row has a node that is
worth going on from, the nodes that are kept are counted, and prices may choose them (`SharedTree`).

Shapes: B rows, W beam nodes, K children offered by each, M candidates of all levels of a row, N node columns.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.tree.draft_tree import BeamCandidates, DraftTree, Frontier
from eyas.tree.dynamic import path_sums

if TYPE_CHECKING:
    from eyas.tree.shared import SharedTree

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float32, np.int64)


class HostGrowth:
    """Grows a batch of trees that share a node budget, on the host."""

    def __init__(self, spec: SharedTree, batch: int, drafting: Sequence[bool] | None) -> None:
        """Rows that aren't `drafting` [B] get no nodes; None = all are."""
        self._spec, self._batch = spec, batch
        self._rows = np.arange(batch)[:, None]  # beside columns, an index of as many of each row
        self._drafting = [row for row in range(batch) if drafting is None or drafting[row]]
        self._groups = np.array((0,) * batch if spec.groups is None else spec.groups)
        self._beam_score: Floats = np.zeros((batch, 1), np.float32)  # [B, W] logarithm of the path's value
        self._beam_logprob = self._beam_score  # [B, W] log-probability of the path
        self._beam_index: Indices = np.full((batch, 1), -1)  # [B, W] into candidates
        self._tokens: list[Indices] = []  # for each level [B, W * K]
        self._scores: list[Floats] = []
        self._logprobs: list[Floats] = []
        self._parents: list[Indices] = []
        self._beams: list[Indices] = []  # for each level but the last [B, W'] into the level's candidates
        self._count = 0

    @property
    def fanout(self) -> int:
        return self._spec.width

    @property
    def calibrates(self) -> bool:
        return self._spec.values is not None

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        fanout = tokens.shape[2]
        # clamped: a score above its parent's, be it by rounding, would let a child outrank the parent
        steps = np.minimum(logprob.numpy(), np.float32(0.0))  # [B, W, K]
        scores = (self._beam_score[:, :, None] + self._worth(steps, np.arange(fanout) > 0)).reshape(self._batch, -1)
        logprobs = (self._beam_logprob[:, :, None] + steps).reshape(self._batch, -1)
        flat = tokens.numpy().reshape(self._batch, -1)
        offset, self._count = self._count, self._count + flat.shape[1]
        self._add(flat, scores, logprobs, np.repeat(self._beam_index, fanout, axis=1))
        if len(self._tokens) == self._spec.depth:
            return None
        best = (-scores).argsort(axis=1, kind="stable")[:, :fanout]  # [B, W']
        self._beam_score = scores[self._rows, best]
        if not self._wants_another_level():
            return None
        self._beam_logprob, self._beam_index = logprobs[self._rows, best], best + offset
        self._beams.append(best)
        return Frontier(torch.from_numpy(flat[self._rows, best]), torch.from_numpy(best // fanout))

    def expand_all(
        self, sizes: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]],
        logprob: Sequence[Sequence[float]], later: Sequence[Sequence[bool]],
    ) -> None:  # fmt: skip
        """Take candidates [B, M] of all levels at once, as `BeamGrowth.expand_all` does."""
        steps = np.minimum(np.array(logprob, np.float32), np.float32(0.0))
        worth = self._worth(steps[:, None], np.array(later)[:, None])[:, 0]
        scores, logprobs = (np.array(path_sums(part.tolist(), parents), np.float32) for part in (worth, steps))
        ids, above = np.array(tokens), np.array(parents)
        stop = 0
        for size in sizes:
            part = slice(stop, stop + size)
            stop += size
            self._add(ids[:, part], scores[:, part], logprobs[:, part], above[:, part])
            self._beam_score = self._scores[-1].max(axis=1, keepdims=True)
            if not self._wants_another_level():
                break

    def tree(self) -> DraftTree:
        spec, scores = self._spec, np.concatenate(self._scores, axis=1)  # [B, M]
        kept = self._kept(scores)
        counts = kept.sum(axis=1)
        width = int(counts.max())
        stops = list(accumulate(level.shape[1] for level in self._scores))
        deepest = bisect_right(stops, int(np.flatnonzero(kept.any(axis=0))[-1])) + 1 if width else 0
        # kept candidates come first, in their order, which puts parents before children
        chosen = (~kept).argsort(axis=1, kind="stable")[:, :width]  # [B, N]
        valid = np.arange(width) < counts[:, None]

        def of_nodes(levels: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
            return np.concatenate(levels, axis=1)[self._rows, chosen]

        column = np.zeros((self._batch, scores.shape[1] + 1), np.int64)  # of the root (-1) and the candidates
        column[:, 0], column[:, 1:] = -1, kept.cumsum(axis=1) - 1
        parents = column[self._rows, of_nodes(self._parents) + 1]
        return DraftTree(
            tokens=torch.from_numpy(of_nodes(self._tokens)),
            # an invalid column copies a candidate that may be dropped: it becomes a child of the root
            parents=torch.from_numpy(np.where(valid, parents, -1)),
            logprob=torch.from_numpy(of_nodes(self._logprobs)),
            valid=torch.from_numpy(valid),
            max_depth=deepest,
            counted=int(counts.sum()),
            candidates=self._candidates() if spec.keeps_candidates else None,
        )

    def _add(self, tokens: Indices, scores: Floats, logprobs: Floats, parents: Indices) -> None:
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._logprobs.append(logprobs)
        self._parents.append(parents)

    def _worth(self, steps: Floats, later: npt.NDArray[np.bool_]) -> Floats:
        """What children with log-probabilities `steps` [B, W, K] add to the logarithm of a path's value: at most 0.

        `later` ones, in any shape that fits, aren't the best child of their parent.
        """
        values = self._spec.values
        return steps if values is None else values.on_host(steps, later, self._groups[:, None, None])

    def _wants_another_level(self) -> bool:
        """Whether some row's next level may hold a node that reaches the threshold."""
        threshold = self._spec.threshold
        return threshold == 0.0 or any(self._beam_score[row, 0] > math.log(threshold) for row in self._drafting)

    def _kept(self, scores: Floats) -> npt.NDArray[np.bool_]:
        """[B, M] the candidates that make the tree."""
        spec, allowed = self._spec, None
        if len(self._drafting) < self._batch:
            allowed = torch.zeros(self._batch, 1, dtype=torch.bool)
            allowed[self._drafting] = True
        kept: npt.NDArray[np.bool_] = spec.keep(torch.from_numpy(scores), allowed).numpy()
        return kept

    def _candidates(self) -> BeamCandidates:
        return BeamCandidates(tuple(map(torch.from_numpy, self._scores)), tuple(map(torch.from_numpy, self._beams)))
