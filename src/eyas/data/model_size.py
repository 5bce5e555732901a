"""How big a model is, from its config alone: built without memory for its weights, and counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eyas.errors import UnsupportedModelError
from eyas.target.architecture import causal_lm_class, refuse_unsupported

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ModelSize(NamedTuple):
    """Parameters, and the widths that bytes and operations depend on."""

    layers: int
    hidden: int
    vocab: int
    query: int
    """Heads x head size: the width of attention."""
    key: int
    """The same of keys."""
    intermediate: int
    body: int
    """Parameters of the layers that one token passes: of experts, as many as are chosen."""
    total: int
    """All parameters, embedding and head included."""

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden


def model_size(config: Any) -> ModelSize:
    """Count a decoder of this transformers config. Raises UnsupportedModelError as loading it would."""
    kind = causal_lm_class(config)
    if kind is None:
        raise UnsupportedModelError(
            f"{config.model_type} is no decoder that transformers can build: name another model"
        )
    refuse_unsupported(kind, config)
    with torch.device("meta"):
        model = kind(config)
    text = config.get_text_config()
    experts = next((getattr(text, name) for name in _EXPERT_COUNTS if getattr(text, name, None)), 1)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    outside = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    body = total = 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if id(weight) not in outside:
            routed = ".experts." in name
            body += weight.numel() * chosen // experts if routed else weight.numel()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSize(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        query=heads * head_size,
        key=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        body=body,
        total=total,
    )
