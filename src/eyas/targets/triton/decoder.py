"""A Llama-like decoder's pass on a GPU, made of Triton kernels: the same bits for a token in every pass.

Prompts run by the same kernels: how a prompt was cut, batched or cached doesn't change a bit either.

Shapes: R rows, Q columns of a pass, T tokens, A taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.errors import UnsupportedModelError
from eyas.targets.kernel_decoder import PassColumns
from eyas.targets.native.architectures import NOT_LIKE_LLAMA, described_decoder
from eyas.targets.native.decoder import DecoderDescription
from eyas.targets.slots import SlotCache
from eyas.targets.triton.attention import Tokens, paths_of
from eyas.targets.triton.choice import HeadLogits
from eyas.targets.triton.layers import TritonLayers, window_sight, without_triton_errors
from eyas.targets.triton.linear import Weight, on_device_of
from eyas.targets.triton.norm import normalize
from eyas.tree.draft_tree import cells


def triton_decoder(model: Any) -> TritonDecoder:
    """Make a decoder of a causal LM. Raises UnsupportedModelError if its layers are of another kind."""
    try:
        return TritonDecoder(described_decoder(model))
    except NOT_LIKE_LLAMA as error:
        why = f"{type(model).__name__} has no passes in Triton, which are for models like Llama: {error}"
        raise UnsupportedModelError(why) from error


class TritonDecoder(TritonLayers):
    """The layers, final norm and head of a decoder."""

    name = "triton"

    def __init__(self, description: DecoderDescription) -> None:
        """Raises UnsupportedModelError for parts that the kernels don't compute; no weight has been moved then."""
        form, head = description.form, description.head
        of_drafters = [part for layer in description.layers for part in (layer.embedding_norm, layer.normed_residual)]
        if description.heads.latent.rank:
            raise UnsupportedModelError("its attention is latent")
        if head is None or any((form.mix, form.fuse, form.returns_normed, *of_drafters)):
            raise UnsupportedModelError("it has parts that only drafters have")
        self._head = Weight.of(head)
        super().__init__(description)
        self._scale = form.embedding_scale
        self._positions = form.positions

    def run_columns(self, cache: SlotCache, columns: PassColumns, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `KernelDecoder`; of a tree, too, final states."""
        rows, end, _, tokens, tree, layout = columns
        lengths = columns.committed(cache)
        with on_device_of(tokens):
            self._grow(cache.capacity)
            count, width = tokens.shape
            depth = torch.arange(width, device=self._device).unsqueeze(0) if tree is None else tree.depth
            positions = (lengths.unsqueeze(1) + depth).expand(count, -1)
            paths = None
            if tree is not None and width > 1:
                paths = paths_of(tree.ancestors.expand(count, -1, -1), depth.expand(count, -1))
            at = self._tokens(rows, end, lengths, positions, paths, layout)
            seen = positions.to(torch.int32).contiguous()
            sights = {window: window_sight(seen, window) for window in {layer.window for layer in self._layers}}
            ids = tokens.flatten() if layout is None else layout.gather(tokens)[0]
            x = self._embedded(ids, at)
            kept = {}
            for number, layer in enumerate(self._layers):
                kept[number] = x
                x = self._run_layer(layer, x, at, sights[layer.window], *cache.of_layer(number), self._tables)
            kept[len(self._layers)] = x
            final = x if self._norm is None else normalize(x, self._norm)
            kept[len(self._layers) + 1] = final
            states = [kept[tap] for tap in taps]
            return final, torch.stack(states, dim=1) if states else x.new_empty(len(x), 0, x.shape[1])

    def logits(self, out: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> HeadLogits:
        """See `KernelDecoder`."""
        return self.logits_of_states(out, index, finish)

    def logits_of_states(self, final: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> HeadLogits:
        """See `KernelDecoder`."""
        return HeadLogits(final, index, self._head, finish)

    def allocate_states(self, slots: int) -> None:  # noqa: ARG002
        """See `KernelDecoder`: no layer is recurrent."""
        return

    def _embedded(self, ids: Tensor, at: Tokens) -> Tensor:
        x = F.embedding(ids, self._embedding)
        if self._scale != 1.0:
            x = x * self._scale
        if self._positions is not None:
            x = x + F.embedding(at.rotations.flatten()[at.cells], self._positions)
        return x

    # what trials at load ask (`layer_trials.TriedDecoder`)

    @property
    def ropes(self) -> int:
        """Number of RoPE tables."""
        return len(self._rope_tables)

    def rope(self, index: int) -> int:
        """Index of a layer's RoPE table, -1 = none."""
        found = self._layers[index].rope
        return -1 if found is None else found

    def rotate_by(self, index: int, rope: int) -> None:
        """Make a layer rotate queries and keys by a RoPE table, -1 = none."""
        self._layers[index] = replace(self._layers[index], rope=None if rope < 0 else rope)

    def kind(self, index: int) -> Any:
        """What tells a layer apart from others, except for its modules."""
        layer = self._layers[index]
        present = tuple(getattr(layer, name) is None for name in ("gate", "input_norm", "q_norm", "sinks"))
        return layer.rope, layer.window, layer.attention_factor, layer.mlp_factor, present

    @without_triton_errors()
    @torch.inference_mode()
    def whole(self, tokens: Tensor, shapes: Sequence[Any]) -> tuple[Sequence[Tensor], Tensor]:
        """See `TriedDecoder`."""
        count = tokens.shape[1]
        cache = SlotCache(shapes, 1, self._dtype, tokens.device, count)
        columns = PassColumns(range(1), count, None, tokens, None)
        final, taps = self.run_columns(cache, columns, range(len(self._layers) + 1))
        return taps.unbind(1), self.logits(final, cells(1, count, tokens.device), None).rows
