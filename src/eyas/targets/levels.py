"""Guesses of a model itself, run level by level below what is committed: how a language model drafts.

Shapes: R rows (a contiguous range of slots), W frontier nodes, F guesses staged so far, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.runtime import to_device
from eyas.targets.native.decoder import Staged
from eyas.targets.slots import SlotCache, StagedCache
from eyas.targets.target import Target
from eyas.targets.transformers_names import given
from eyas.tree import Frontier


class StagedLevels:
    """The levels of one draft, each run by one pass of the model behind those above it; nothing is committed.

    A guess sees its row's committed tokens, the guesses above it, and itself. They lie in staging columns, which the
    next pass over these rows overwrites.
    """

    def __init__(self, target: Target, cache: SlotCache, rows: range) -> None:
        """For drafts below the last committed token of the slots `rows`."""
        self._target, self._cache, self._rows = target, cache, rows
        self._start = cache.start(rows)
        self._above = -1  # the staged column of the first node of the level above
        none = torch.empty(len(rows), 0, dtype=torch.int64, device=target.device)
        self._parents = none  # [R, F] the staged column that each guess follows, -1 = none
        self._positions = none  # [R, F], where modules are run
        self._seen = torch.empty(
            len(rows), 1, 0, dtype=torch.bool, device=target.device
        )  # [R, W, F] of the level above

    @torch.inference_mode()
    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, V] of what follows them."""
        first, width = self._parents.shape[1], frontier.tokens.shape[1]
        self._parents = torch.cat((self._parents, frontier.parents + self._above), dim=1)
        self._cache.reserve(self._start + first + width, first)
        logits = self._native(frontier, first) if self._target.native is not None else self._modules(frontier, first)
        self._above = first
        return logits

    def _native(self, frontier: Frontier, first: int) -> Tensor:
        target, tokens = self._target, frontier.tokens
        assert target.native is not None
        lengths = self._cache.lengths[self._rows.start : self._rows.stop]
        where = Staged(self._rows, tokens.shape[1], None, lengths, self._parents, first)
        done = target.native.run(self._cache, where, tokens, logits=True)
        out: Tensor = target.finish(done.logits)
        return out.view(*tokens.shape, -1)

    def _modules(self, frontier: Frontier, first: int) -> Tensor:
        target, tokens = self._target, frontier.tokens
        width = tokens.shape[1]
        lengths = to_device(self._cache.lengths[self._rows.start : self._rows.stop], target.device)
        itself = torch.eye(width, dtype=torch.bool, device=target.device).expand(len(tokens), -1, -1)
        parents = frontier.parents.unsqueeze(2).expand(-1, -1, first)
        self._seen = torch.cat((self._seen.gather(1, parents), itself), dim=2)
        above = self._positions[:, -1:] if first else lengths.unsqueeze(1) - 1
        positions = (above + 1).expand(-1, width)
        if target.max_length is not None:  # guesses beyond the context are no good, but some models look positions up
            positions = positions.clamp(max=target.max_length - 1)
        self._positions = torch.cat((self._positions, positions), dim=1)

        def compute(
            rows: range,
            end: int | None,
            lengths: Tensor,
            tokens: Tensor,
            seen: Tensor,
            positions: Tensor,
            staged: Tensor,
        ) -> tuple[Tensor]:
            start = self._start if end is None else end - seen.shape[2]
            staging = self._cache.staging(rows, width, first, lengths, end)
            out: Tensor = target.model(
                input_ids=tokens,
                attention_mask=target.masks(lengths, start, seen, positions, staged),
                position_ids=positions,
                use_cache=True,
                **given(target.model, StagedCache(self._cache, staging)),
            )[0]
            return (out,)

        inputs, done = (tokens, self._seen, positions, self._positions), None
        if self._cache.graphs is not None:
            done = self._cache.graphs.run("level", self._cache, self._rows, first + width, inputs, compute)
        return (done or compute(self._rows, None, lengths, *inputs))[0]
