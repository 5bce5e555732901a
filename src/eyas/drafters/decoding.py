"""A draft network at decoding time: true pairs are kept in the slot cache, guesses live in its staging columns.

Every kind decodes here; one without attention has a cache without layers.

Shapes: R rows, Q pairs, W frontier nodes, F staged guesses so far, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.layers import Attend, grouped_attention
from eyas.drafters.network import DraftNetwork
from eyas.target.masks import visible
from eyas.target.slots import SlotCache
from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Coupling


class NetworkDrafter:
    """Pairs (state at i, token i + 1) predict token i + 2; `taps` are boundaries of the target."""

    def __init__(self, network: DraftNetwork, taps: tuple[int, ...]) -> None:
        self.network = network
        self.taps = taps
        self._ids = network.target_ids
        self.resize(0)

    @property
    def slots(self) -> int:
        return self._cache.slots

    def resize(self, slots: int) -> None:
        dtype, device = self.network.dtype, self._ids.device
        self._cache = SlotCache(self.network.kv_shapes, slots, dtype, device)
        # the state at each slot's last pair: as it is fed back, and as the head reads it
        self._fed = torch.zeros(slots, self.network.config.hidden_size, dtype=dtype, device=device)
        self._normed = torch.zeros_like(self._fed)

    def reshape(self, slots: int, columns: int) -> None:
        self._cache.reshape(slots, columns)
        more = max(0, slots - self._fed.shape[0])
        self._fed, self._normed = (F.pad(state[:slots], (0, 0, 0, more)) for state in (self._fed, self._normed))

    def length(self, slot: int) -> int:
        return self._cache.lengths[slot]

    @torch.inference_mode()
    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        if not any(counts):
            return
        start = self._cache.start(rows)
        lengths = self._lengths(rows)
        steps = torch.arange(next_tokens.shape[1], device=lengths.device)
        positions = lengths.unsqueeze(1) + steps
        causal = (steps.unsqueeze(1) >= steps).unsqueeze(0)
        attend = self._attend(rows, start, visible(lengths, start, causal, positions, None))
        fed, normed = self.network.step(next_tokens, self.network.fuse(taps), positions, attend)
        self._cache.commit(rows, [range(count) for count in counts])
        known = [i for i, count in enumerate(counts) if count]
        at = torch.tensor(known, device=lengths.device)
        last = torch.tensor([counts[i] - 1 for i in known], device=lengths.device)
        self._fed[at + rows.start] = fed[at, last]
        self._normed[at + rows.start] = normed[at, last]

    @torch.inference_mode()
    def draft(self, rows: range, spec: TreeSpec, coupling: Coupling) -> DraftTree:
        slots = slice(rows.start, rows.stop)
        lengths = self._lengths(rows)
        start = column = self._cache.start(rows)
        fed, normed = self._fed[slots].unsqueeze(1), self._normed[slots].unsqueeze(1)  # [R, 1, H]
        committed = torch.arange(start, device=lengths.device) < lengths.unsqueeze(1)  # [R, start]
        guessed = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=lengths.device)  # [R, W, F]
        growth = spec.start(len(rows), lengths.device)
        for level in range(spec.depth):
            ranked = coupling.rank(self.network.logits(normed), level, self._ids)  # [R, W, Vd]
            score, best = ranked.topk(min(growth.fanout, ranked.shape[2]), dim=2)
            frontier = growth.expand(score, self._ids[best])
            if frontier is None:
                break
            width = frontier.tokens.shape[1]
            at = frontier.parents.unsqueeze(2)
            itself = torch.eye(width, dtype=torch.bool, device=lengths.device).expand(len(rows), width, width)
            guessed = torch.cat((guessed.gather(1, at.expand(-1, -1, guessed.shape[2])), itself), dim=2)
            seen = torch.cat((committed.unsqueeze(1).expand(-1, width, -1), guessed), dim=2).unsqueeze(1)
            fed, normed = self.network.step(
                frontier.tokens,
                fed.gather(1, at.expand(-1, -1, fed.shape[2])),
                (lengths + level).unsqueeze(1).expand(-1, width),
                self._attend(rows, column, seen),
            )
            column += width
        tree = growth.tree()
        unknown = [self._cache.lengths[slot] == 0 for slot in rows]
        if any(unknown):  # a one-token prompt: there is no state to draft from yet
            known = ~torch.tensor(unknown, device=lengths.device).unsqueeze(1)
            tree = dataclasses.replace(tree, valid=tree.valid & known)
        return tree

    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    def move(self, source: int, target: int) -> None:
        self._cache.move(source, target)
        self._fed[target], self._normed[target] = self._fed[source], self._normed[source]

    def _lengths(self, rows: range) -> Tensor:
        return torch.tensor(self._cache.lengths[rows.start : rows.stop], device=self._fed.device)

    def _attend(self, rows: range, column: int, seen: Tensor) -> Attend:
        """Attention that stages its keys from `column` on, under the mask `seen` [R, 1, S, K]."""
        self._cache.reserve(column + seen.shape[2])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.write(layer, k, v, rows, column)
            return grouped_attention(q, keys, values, seen)

        return attend
