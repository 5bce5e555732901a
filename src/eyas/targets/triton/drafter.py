"""A draft network's passes on a GPU, made of the kernels that run its target: a guess has the same bits in any batch.

See `eyas.targets.draft_kernels` for the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.errors import UnsupportedModelError
from eyas.targets.draft_kernels import DraftPass
from eyas.targets.native.decoder import DecoderDescription, LayerParts, Warp
from eyas.targets.slots import SlotCache
from eyas.targets.triton.attention import Sight, Tokens, place
from eyas.targets.triton.choice import ranked
from eyas.targets.triton.layers import TritonLayers
from eyas.targets.triton.linear import Norm, Weight, linear, on_device_of
from eyas.targets.triton.norm import normalize


class _View(NamedTuple):
    """What tokens see in a layer; see `LayerParts`."""

    window: int | None
    anchored: bool
    whole_draft: bool
    causal: bool

    @classmethod
    def of(cls, layer: LayerParts) -> _View:
        return cls(layer.window, layer.anchored, layer.whole_draft, layer.causal)

    def sight(self, at: DraftPass) -> Sight:
        positions, columns = at.positions, at.positions.shape[1]
        latest = positions
        oldest = None
        if not self.causal:
            latest = (at.lengths + (at.before + columns - 1)).unsqueeze(1).expand_as(positions)
        if self.window is not None:
            oldest = (at.first if self.anchored else positions + 1) - self.window
            if self.whole_draft and not self.anchored:
                oldest = torch.minimum(oldest, at.first - 1)
            elif not self.anchored:
                latest = torch.minimum(latest, positions + (self.window - 1))
            oldest = oldest.clamp(min=0).expand_as(positions).to(torch.int32).contiguous()
        return Sight(latest.to(torch.int32).contiguous(), oldest)


class TritonDrafter(TritonLayers):
    """The layers, norms and head of a draft network; see `DraftKernels`."""

    def __init__(self, description: DecoderDescription) -> None:
        """Raises UnsupportedModelError for parts that the kernels don't compute; no weight has been moved then."""
        form, head = description.form, description.head
        if head is None:
            raise UnsupportedModelError("it has neither a head of its own nor its target's")
        self._head = Weight.of(head)
        self._finish = form.finish
        self._mix = None if form.mix is None else Weight.of(form.mix)
        fuse = form.fuse
        self._fc = None if fuse is None else Weight.of(fuse.linear)
        super().__init__(description)
        self._views = [_View.of(layer) for layer in description.layers]
        self._residual_is_normed = description.layers[0].normed_residual
        self._returns_normed = form.returns_normed
        self._mix_norms = [self._normed(norm) for norm in form.mix_norms] or [None, None]
        self._tap_norms = [] if fuse is None else [self._normed(norm) for norm in fuse.tap_norms]
        self._fc_norm = None if fuse is None else self._normed(fuse.norm_before)
        self._fused_norm = None if fuse is None else self._normed(fuse.norm_after)

    @property
    def ranks(self) -> bool:
        """Whether guesses can be ranked without their logits."""
        return self._finish is None

    def fuse(self, taps: Tensor) -> Tensor:
        """See `DraftNetwork.fuse`: [..., A, Ht] -> [..., H]."""
        if self._fc is None:
            return taps[..., 0, :]
        flat = taps.flatten(0, -3)  # [T, A, Ht]
        with on_device_of(taps):
            if self._tap_norms:
                flat = _normed_side_by_side(flat.unbind(1), self._tap_norms)
            made = linear(flat.flatten(1).contiguous(), self._fc, self._fc_norm)
            made = made if self._fused_norm is None else normalize(made, self._fused_norm)
        return made.view(*taps.shape[:-2], -1)

    def run(self, cache: SlotCache, at: DraftPass, tokens: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `DraftKernels`."""
        with on_device_of(tokens):
            where = self._places(cache, at)
            sights = {view: view.sight(at) for view in set(self._views)}
            embedded = F.embedding(tokens.flatten(), self._embedding).to(self._dtype)
            x, wide = self.entering(embedded, None if hidden is None else hidden.reshape(len(embedded), -1))
            for number, (layer, view) in enumerate(zip(self._layers, self._views, strict=True)):
                x = self._run_layer(layer, x, where, sights[view], *cache.of_layer(number), self._tables, wide)
                wide = None
            normed = x if self._norm is None else normalize(x, self._norm)
            return normed if self._returns_normed else x, normed

    def entering(self, embedded: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The states [T, H] that enter the first layer, and what its attention reads if it is more: [T, 2 H].

        Of embeddings and states [T, H].
        """
        first = self._layers[0]
        if hidden is None:
            return embedded, None
        if self._mix is not None:
            return linear(_normed_side_by_side((embedded, hidden), self._mix_norms), self._mix), None
        if first.embedding_norm is None:
            return hidden.contiguous(), None
        wide = _normed_side_by_side((embedded, hidden), (first.embedding_norm, first.input_norm))
        residual = wide[:, embedded.shape[1] :] if self._residual_is_normed else hidden
        return residual.contiguous(), wide

    def stage(self, cache: SlotCache, at: DraftPass, context: Tensor) -> None:
        """See `DraftKernels`."""
        heads = self._heads._replace(queries=0)
        first = self._heads.queries * heads.size
        x = context.reshape(-1, context.shape[-1]).contiguous()
        with on_device_of(context):
            where = self._places(cache, at)
            for number, layer in enumerate(self._layers):
                assert layer.qkv is not None
                made = linear(x, layer.qkv.rows(first, heads.width))
                rope = None if layer.rope is None else self._tables[layer.rope]
                place(made, heads, *cache.of_layer(number), where, rope, k_norm=layer.k_norm)

    def logits(self, states: Tensor) -> Tensor:
        """See `DraftNetwork.logits`: [..., H] -> [..., Vd]."""
        flat = states.reshape(-1, states.shape[-1]).contiguous()
        with on_device_of(states):
            made = linear(flat, self._head).view(*states.shape[:-1], -1)
        return made if self._finish is None else self._finish(made)

    def best(self, states: Tensor, count: int, warp: Warp, steps_ahead: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftKernels`."""
        with on_device_of(states):
            return ranked(states, self._head, count, warp, steps_ahead, ids)

    def _places(self, cache: SlotCache, at: DraftPass) -> Tokens:
        self._grow(cache.capacity)
        paths = None if at.paths is None else at.paths.to(torch.int32).contiguous()
        return self._tokens(at.rows, at.end, at.lengths, at.positions, paths, at.layout, at.before)


def _normed_side_by_side(parts: Sequence[Tensor], norms: Sequence[Norm | None]) -> Tensor:
    """Parts [T, n], each normed if it has a norm, as features of one tensor [T, the sum of n]."""
    made = torch.cat(tuple(parts), dim=1)
    first = 0
    for part, norm in zip(parts, norms, strict=True):
        last = first + part.shape[1]
        if norm is not None:
            normalize(made[:, first:last], norm, made=made[:, first:last])
        first = last
    return made
