"""One more decoder layer of a target's own class, for drafters made of what the target is made of.

transformers' layer runs unpatched: attention is plugged in through transformers' own interface, where queries and keys
arrive rotated and go to the `attend` of whoever runs the drafter. So any block works whose attention is plain: experts,
latent attention, partial rotation and norms of heads are the layer's own business.

Shapes: B batch, S positions, N heads, D / Dv head size of keys / values, H hidden.
"""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eyas.drafters.network import Attend
from eyas.errors import UnsupportedModelError
from eyas.targets import Target
from eyas.targets.architecture import text_decoder
from eyas.targets.slots import KVShape

_ATTENTION = "eyas_drafter"
_NOT_COMPUTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Options of attention functions that change what is computed, and that `Attend` doesn't have."""


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, N, S, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # what is seen is up to `attend`
    *,
    attend: Attend,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers that leaves the attention to `attend`; -> [B, S, N, Dv]."""
    odd = [name for name in _NOT_COMPUTED if options.get(name) is not None]
    if odd:
        raise UnsupportedModelError(
            f"{type(module).__name__} has {', '.join(odd)}, which eyas's drafters don't compute"
        )
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # `attend` scales by D ** -0.5
    return attend(0, query, key, value).transpose(1, 2).contiguous(), None


class TargetBlock(nn.Module):
    """A decoder layer like the target's last one, as the layer after it would be; blank, on the meta device."""

    def __init__(self, target: Target) -> None:
        """Raises UnsupportedModelError for layers whose attention can't be run as a drafter's."""
        super().__init__()
        AttentionInterface.register(_ATTENTION, _attention)
        cls, index = type(target.layers[-1]), target.num_layers
        config = _longer(target.config)
        rotary: Any = getattr(text_decoder(target.model), "rotary_emb", None)
        self._rotary = (rotary,)  # in a tuple: it is the target's, no part of this module
        try:
            if rotary is None or "layer_type" in signature(rotary.forward).parameters:
                raise UnsupportedModelError("it has no RoPE, or several")
            with torch.device("meta"):
                self.layer: nn.Module = cls(config, index)
            self.kv_shape = self._probe(target)
        except (UnsupportedModelError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise UnsupportedModelError(f"a drafter can't be made of a {cls.__name__}: {error}") from error

    def _probe(self, target: Target) -> tuple[KVShape, KVShape]:
        """The shapes of the keys and values of one position."""
        found: list[KVShape] = []

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.extend((KVShape(k.shape[1], k.shape[3]), KVShape(v.shape[1], v.shape[3])))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        position = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        rope = self.rope(torch.zeros(1, 1, target.hidden_size, device=target.device), position)
        own: Any = self.layer.self_attn
        own(
            torch.zeros(1, 1, target.hidden_size, device="meta"),
            position_embeddings=tuple(table.to("meta") for table in rope),
            attention_mask=None,
            attend=attend,
        )
        keys, values = found
        return keys, values

    def rope(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines of the target's rotation at positions [B, S], in the type of x."""
        cos, sin = self._rotary[0](x, positions)
        return cos, sin

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, S, H] entering the layer -> the one leaving it."""
        out = self.layer(x, position_embeddings=self.rope(x, positions), attention_mask=None, attend=attend)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states


def _longer(config: Any) -> Any:
    """A copy of a text config for one layer more, which is like the last; it runs `_attention`."""
    longer = copy.deepcopy(config)
    layers = longer.num_hidden_layers
    for key, value in longer.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == layers and key != "architectures":
            setattr(longer, key, [*value, value[-1]])
    longer.num_hidden_layers = layers + 1
    longer._attn_implementation = _ATTENTION
    return longer
