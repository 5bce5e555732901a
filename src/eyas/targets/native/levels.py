"""The levels of one draft, each by one call of a native decoder, or all of a beam search by one.

Shapes: R rows, W nodes of a level, S columns staged so far, V outputs of the head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.runtime import inference
from eyas.targets.native.decoder import NativeDecoder, ParentStates, Staged, Warp
from eyas.targets.native.library import Beam, address
from eyas.targets.slots import SlotCache
from eyas.tree import Frontier
from eyas.tree.draft_tree import BeamLevels, BeamSearch, ChosenNodes


class NativeLevels:
    """The levels of one draft that follows the pairs in a slot cache, each run by one call of the decoder."""

    sure: Tensor | None = None

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: SlotCache,
        rows: range,
        last: tuple[Tensor, Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        """Draft from the `last` states [slots, H]: as they are fed back, and as the `head` reads them."""
        self._decoder = decoder
        self._cache = cache
        self._rows = rows
        self._head = head
        self._last = last
        self._lengths = cache.lengths[rows.start : rows.stop]
        self._staged = 0
        self._above: ParentStates | None = None
        self._parents: Tensor | None = None  # [R, S] as in `Staged`

    def first(self) -> Tensor:
        """The logits [R, 1, V] of the tokens that follow the roots."""
        return self._head(self._last[1][self._rows.start : self._rows.stop].unsqueeze(1))

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's W nodes; return the logits [R, W, V] of the tokens that follow them."""
        width = frontier.tokens.shape[1]
        staged = self._staged
        above = self._above or ParentStates(self._last[0][self._rows.start : self._rows.stop].unsqueeze(1), -1)
        if self._parents is not None or width > 1:
            parents = self._parents
            if parents is None:  # a chain so far
                parents = torch.arange(-1, staged - 1).expand(len(self._rows), -1)
            self._parents = torch.cat((parents, frontier.parents + above.first), dim=1)
        where = Staged(self._rows, width, None, self._lengths, self._parents, staged, guesses=True)
        self._cache.reserve(max(self._lengths) + staged + width, staged)
        heads = bool(self._decoder.outputs)
        done = self._decoder.run(self._cache, where, frontier.tokens, above, final=not heads, logits=heads)
        shape = (*frontier.tokens.shape, -1)
        self._above = ParentStates(done.states.view(shape), staged)
        self._staged += width
        if done.logits is not None:
            return done.logits.view(shape)
        assert done.final is not None
        return self._head(done.final.view(shape))

    def _of_rows(self, states: Tensor) -> Tensor:
        return states[self._rows.start : self._rows.stop]

    @property
    def can_search(self) -> bool:
        """Whether the decoder has a head, which a beam search needs."""
        return bool(self._decoder.outputs)

    def search(self, search: BeamSearch, ids: Tensor, warp: Warp) -> BeamLevels:
        """Run all levels of a beam search in one call, instead of `first`, `add` and the growth of the tree.

        `ids` [V] are the target's tokens. IndexError for a token without embedding.
        """
        fed, normed = map(self._of_rows, self._last)
        return beam_search(self._decoder, self._cache, self._rows, search, Roots(normed, fed), Choices(ids), warp)


class Roots(NamedTuple):
    """The states that a beam search begins with."""

    normed: Tensor  # [R, H] contiguous, in the model's dtype, after the final norm: the head reads them
    fed: Tensor | None = None  # [R, H] contiguous, float32: what the first guesses continue; None = only their texts


class Choices(NamedTuple):
    """The tokens that can be drafted."""

    ids: Tensor  # [V] the target's tokens
    outputs: Tensor | None = None
    """[V] the head's output for each, which is also the token that is fed back; None = each output stands for one of
    `ids`, which are fed back."""


@inference
def beam_search(
    decoder: NativeDecoder,
    cache: SlotCache,
    rows: range,
    search: BeamSearch,
    roots: Roots,
    choices: Choices,
    warp: Warp,
) -> BeamLevels:
    """Run all levels of a beam search below the committed columns of `rows` in one call.

    Guesses stay in staging columns: level l's node i in column l * `search.width` + i. IndexError for a token without
    embedding.
    """
    depth, width = search.depth, search.width
    children, staged = width + (depth - 1) * width * width, (depth - 1) * width
    tokens, parents = np.empty((2, len(rows), children), np.int64)
    scores, logprobs = np.empty((2, len(rows), children), np.float32)
    most = 0 if search.prices is None else len(search.prices)
    beams = np.empty((len(rows), depth - 1, width), np.int64)
    chosen = np.empty(1 + 3 * most, np.int64)
    chosen_logprobs = np.empty(most + 1, np.float32)
    given, made = (search.worth, search.groups, search.drafting), (tokens, parents, scores, logprobs, beams)
    cache.reserve(cache.start(rows) + staged)
    beam = Beam(
        len(rows),
        depth,
        width,
        *map(address, roots),
        *map(address, choices),
        len(choices.ids),
        *map(address, warp),
        *(array if array is None else array.ctypes.data for array in given),
        search.least,
        *(array.ctypes.data for array in made),
        None if search.prices is None else search.prices.ctypes.data,
        search.calibration,
        search.level_price,
        most,
        chosen.ctypes.data,
        chosen_logprobs.ctypes.data,
    )
    levels = decoder.search(cache, rows, staged, beam)
    sizes = [width, *[width * width] * (levels - 1)]
    nodes = None
    if search.prices is not None:
        count = int(chosen[0])
        numbers = chosen[1 : 1 + 3 * count].reshape(3, count)
        nodes = ChosenNodes(numbers, chosen_logprobs[:count], float(chosen_logprobs[most]))
    found = slice(None), slice(sum(sizes))
    return BeamLevels(
        sizes, tokens[found], parents[found], scores[found], logprobs[found], beams[:, : levels - 1], nodes
    )
