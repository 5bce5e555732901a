"""What drafter to train: its kind and sizes; whatever is left out is taken from the target."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from eyas.config import StrictModel
from eyas.drafters.config import DrafterConfig, Ownership
from eyas.drafters.kinds import KINDS
from eyas.drafters.network import DraftNetwork
from eyas.errors import ConfigError
from eyas.target import Target

PresetName = Literal["eagle3", "eagle3.1"]


class DrafterShape(StrictModel):
    """Kind, sizes and toggles; an option of another kind is refused."""

    kind: PresetName = "eagle3"
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    layers: int = Field(default=1, ge=1)
    draft_vocab_size: int | None = Field(default=None, ge=1)
    taps: tuple[int, ...] | None = None
    default_tree: str | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    embedding: Literal["own", "shared"] | None = None
    head: Ownership | None = None
    train_embedding: bool = False
    train_head: bool = True


def drafter_config(shape: DrafterShape, target: Target) -> DrafterConfig:
    """Fill what the shape leaves open from the target's own config."""
    own = target.config
    heads = shape.heads or own.num_attention_heads
    hidden = shape.hidden_size or own.hidden_size
    kind = KINDS[shape.kind.removesuffix(".1")]
    preset = shape.kind == "eagle3.1"
    config = kind.config.model_construct()
    taps = shape.taps or config.default_taps(target.num_layers)
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size or own.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.kv_heads or min(heads, getattr(own, "num_key_value_heads", heads)),
        "head_dim": shape.head_dim or getattr(own, "head_dim", None) or hidden // heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(taps),
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": getattr(own, "rms_norm_eps", 1e-6),
        "max_position_embeddings": target.max_length or own.max_position_embeddings,
        "rope_parameters": dict(
            getattr(own, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        ),
        "fc_norm": preset if shape.fc_norm is None else shape.fc_norm,
        "norm_output": preset if shape.norm_output is None else shape.norm_output,
        "norm_before_residual": bool(shape.norm_before_residual),
        "norm_before_fc": bool(shape.norm_before_fc),
        "embedding": shape.embedding or "own",
        "head": shape.head or "own",
        "taps": taps,
        "default_tree": shape.default_tree,
    }
    return kind.config.model_validate(values)


def fresh_network(shape: DrafterShape, target: Target, draft_ids: Tensor) -> DraftNetwork:
    """New weights on the target's device; own embedding and head start from the target's where the widths agree.

    draft_ids [Vd] are the target tokens it can draft, rising. Raises ConfigError for what can't be trained.
    """
    config = drafter_config(shape, target)
    if config.embedding == "own" and config.hidden_size != target.hidden_size and not shape.train_embedding:
        raise ConfigError(
            f"the drafter is {config.hidden_size} wide, the target {target.hidden_size}: the target's "
            "embedding doesn't fit, so set train_embedding to true"
        )
    network = KINDS[shape.kind.removesuffix(".1")].network(config)
    network.set_vocabulary(draft_ids)
    if config.hidden_size == target.hidden_size:
        with torch.no_grad():
            if config.embedding == "own":
                network.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
            if config.head == "own":
                rows = target.model.get_output_embeddings().weight[draft_ids.to(target.device)]
                network.lm_head.weight.copy_(rows)
    if config.embedding == "own":
        network.embed_tokens.weight.requires_grad_(shape.train_embedding)
    if config.head == "own":
        network.lm_head.weight.requires_grad_(shape.train_head)
    network = network.to(target.device)
    if "shared" in (config.embedding, config.head):
        network.borrow(target)
    return network
