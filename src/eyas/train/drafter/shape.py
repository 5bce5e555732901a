"""What drafter to train: its kind and sizes; whatever is left out is taken from the target."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from eyas.config import StrictModel, validated
from eyas.drafters.config import DrafterConfig, TransformerConfig
from eyas.drafters.kinds.eagle3 import FusedTapsConfig
from eyas.drafters.kinds.mla import MlaConfig
from eyas.drafters.kinds.mlp import MlpConfig
from eyas.drafters.network import DraftNetwork
from eyas.drafters.registry import KINDS
from eyas.errors import ConfigError
from eyas.targets import Target
from eyas.targets.architecture import FULL
from eyas.targets.taps import default_taps

_PRESETS: dict[str, dict[str, bool]] = {"eagle3.1": {"fc_norm": True, "norm_output": True}}
_LAYERED = ("eagle1", "eagle3", "mla")
_FUSED = ("eagle3", "mla")
_ONLY: dict[str, tuple[str, ...]] = {  # option -> the kinds that have it
    **dict.fromkeys(("intermediate_size", "heads", "layers"), _LAYERED),
    **dict.fromkeys(("kv_heads", "head_dim"), ("eagle1", "eagle3")),
    **dict.fromkeys(("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "hidden_size"), _FUSED),
    "bias": ("eagle1",),
    "taps": ("eagle3", "mla", "mlp"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), ("mla",)),
    **dict.fromkeys(("depth", "gate", "dropout"), ("mlp",)),
}
_FIELD = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""What the config calls an option, where it has another name."""


class DrafterShape(StrictModel):
    """Kind, sizes and options; None = the target's, or the kind's default. An option of another kind is refused."""

    kind: Literal["eagle1", "eagle3", "eagle3.1", "mla", "mlp"] = "eagle3"
    draft_vocab_size: int | None = Field(default=None, ge=1)
    taps: tuple[int, ...] | None = None
    default_tree: str | None = None
    # whose embedding and head, and whether own ones train
    embedding: Literal["own", "shared", "none"] | None = None
    head: Literal["own", "shared"] | None = None
    train_embedding: bool = False
    train_head: bool | None = None
    # decoder layers
    hidden_size: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    layers: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    # eagle1
    bias: bool | None = None
    # eagle3 and mla
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    # mla; q_lora_rank 0 = a plain query projection
    q_lora_rank: int | None = Field(default=None, ge=0)
    kv_lora_rank: int | None = Field(default=None, ge=1)
    qk_nope_head_dim: int | None = Field(default=None, ge=1)
    qk_rope_head_dim: int | None = Field(default=None, ge=2)
    v_head_dim: int | None = Field(default=None, ge=1)
    # mlp
    depth: int | None = Field(default=None, ge=1)
    gate: bool | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)

    @model_validator(mode="after")
    def _options_of_the_kind(self) -> DrafterShape:
        strange = [
            name for name, kinds in _ONLY.items() if getattr(self, name) is not None and self.family not in kinds
        ]
        if strange:
            raise ValueError(f"a drafter of kind {self.kind} has no {', '.join(strange)}")
        if self.embedding == "none" and self.kind != "mlp":
            raise ValueError(f"a drafter of kind {self.kind} reads the token embedding: write own or shared")
        if self.train_embedding and self.embedding_owner != "own":
            raise ValueError("train_embedding: only an embedding of its own can train (embedding: own)")
        if self.train_head and self.head_owner != "own":
            raise ValueError("train_head: only a head of its own can train (head: own)")
        return self

    @property
    def family(self) -> str:
        """The kind's name in the registry: presets are toggles on one."""
        return self.kind.removesuffix(".1")

    @property
    def embedding_owner(self) -> str:
        """`mlp` shares the target's by default; EAGLE's engines expect one in the file."""
        return self.embedding or ("shared" if self.kind == "mlp" else "own")

    @property
    def head_owner(self) -> str:
        """EAGLE-3 has its own head; where the states are the target's features, the target's head reads them."""
        return self.head or ("own" if self.family in _FUSED else "shared")


def drafter_config(shape: DrafterShape, target: Target) -> DrafterConfig:
    """Fill what the shape leaves open from the target's own config; the taps are written down. Raises ConfigError."""
    cls = KINDS[shape.family].config
    width = shape.hidden_size or target.hidden_size
    values: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "embedding": shape.embedding_owner,
        "head": shape.head_owner,
        "default_tree": shape.default_tree,
    }
    own = target.config
    if issubclass(cls, TransformerConfig):
        values |= decoder_sizes(own, target.max_length)
        heads = values["num_attention_heads"] = shape.heads or values["num_attention_heads"]
        values |= latent_sizes(own) if cls is MlaConfig else head_sizes(own, heads, width)
    given = {_FIELD.get(name, name): getattr(shape, name) for name in _ONLY if getattr(shape, name) is not None}
    values |= {**_PRESETS.get(shape.kind, {}), **given}
    if values.get("q_lora_rank") == 0:
        values["q_lora_rank"] = None
    taps = values.get("taps")
    if taps is None:
        fused = issubclass(cls, FusedTapsConfig)
        taps = default_taps(target.num_layers) if fused else (target.final_boundary,)
    target.check_taps(taps)
    values["taps"] = tuple(taps)
    if issubclass(cls, FusedTapsConfig):
        values["num_aux_hidden_states"] = len(taps)
    if cls is MlpConfig:
        values["norm"] = tuple(taps) != (target.final_boundary,)
    values["rms_norm_eps"] = getattr(own, "rms_norm_eps", None) or 1e-6
    return validated(cls, values, f"the shape of the {shape.kind} drafter")


def fresh_network(shape: DrafterShape, target: Target, draft_ids: Tensor) -> DraftNetwork:
    """New weights on the target's device; own embedding and head start from the target's where the widths agree.

    draft_ids [Vd] are the target tokens it can draft, rising. Raises ConfigError for what can't be trained.
    """
    config = drafter_config(shape, target)
    same_width = config.hidden_size == target.hidden_size
    for part, owner, trains in (
        ("embedding", config.embedding, shape.train_embedding),
        ("head", config.head, shape.train_head is not False),
    ):
        if not same_width and (owner == "shared" or (owner == "own" and not trains)):
            raise ConfigError(
                f"the drafter is {config.hidden_size} wide, the target {target.hidden_size}: the target's {part} "
                f"doesn't fit, so set {part} to own and train_{part} to true"
            )
    if len(draft_ids) != config.draft_vocab_size:
        raise ConfigError(f"{len(draft_ids)} draft tokens for a draft vocabulary of {config.draft_vocab_size}")
    network = KINDS[shape.family].network(config)
    network.set_vocabulary(draft_ids)
    if config.embedding == "own":
        _start(network.embed_tokens, target.model.get_input_embeddings().weight, same_width, shape.train_embedding)
    if config.head == "own":
        rows = target.model.get_output_embeddings().weight[draft_ids.to(target.device)]
        _start(network.lm_head, rows, same_width, shape.train_head is not False)
    network = network.to(target.device)
    if "shared" in (config.embedding, config.head):
        network.borrow(target)
    return network


@torch.no_grad()
def _start(part: nn.Embedding | nn.Linear, weight: Tensor, fits: bool, trains: bool) -> None:
    """Begin with the target's rows [V or Vd, H], if they fit."""
    if fits:
        part.weight.copy_(weight)
    part.weight.requires_grad_(trains)


# Sizes a drafter takes over from its target's config, whatever architecture that is.


_THETA = 10000.0
_PLAIN_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies don't change with the length of a sequence."""
_LONG = 32768


def decoder_sizes(own: Any, max_length: int | None) -> dict[str, Any]:
    """MLP width, heads, norm and RoPE of a decoder like the target's. `own` is the target's text config."""
    return {
        "intermediate_size": getattr(own, "intermediate_size", None) or getattr(own, "n_inner", None)
        or 4 * own.hidden_size,
        "num_attention_heads": own.num_attention_heads,
        "max_position_embeddings": max_length or getattr(own, "max_position_embeddings", None) or _LONG,
        "rope_parameters": rope_of(own),
    }  # fmt: skip


def head_sizes(own: Any, heads: int, width: int) -> dict[str, int]:
    """Key-value heads and head size of grouped-query attention with `heads` heads, for a drafter `width` wide."""
    if getattr(own, "kv_lora_rank", None):  # latent attention: its head_dim is that of the rotated part alone
        return {"num_key_value_heads": heads, "head_dim": own.v_head_dim + own.v_head_dim % 2}
    shared = getattr(own, "num_key_value_heads", None) or heads
    if heads % shared:
        shared = heads
    return {
        "num_key_value_heads": shared,
        "head_dim": getattr(own, "head_dim", None) or max(2, width // heads // 2 * 2),
    }


def latent_sizes(own: Any) -> dict[str, int | None]:
    """Sizes of latent attention: the target's if it has some, else DeepSeek's proportions at this width."""
    if getattr(own, "kv_lora_rank", None):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: getattr(own, name) for name in names}
    head = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    rotated = max(2, head // 4 * 2)
    return {
        "q_lora_rank": None, "kv_lora_rank": 4 * head, "qk_nope_head_dim": head, "qk_rope_head_dim": rotated,
        "v_head_dim": head,
    }  # fmt: skip


def rope_of(own: Any) -> dict[str, Any]:
    """The target's RoPE, of its full-attention layers where they differ; theta alone where the type isn't plain."""
    rope = dict(getattr(own, "rope_parameters", None) or {})
    if isinstance(rope.get(FULL), dict):
        rope = dict(rope[FULL])
    theta = rope.get("rope_theta") or getattr(own, "rope_theta", None) or _THETA
    rope.pop("partial_rotary_factor", None)  # drafters rotate whole heads
    if rope.get("rope_type", "default") not in _PLAIN_TYPES:
        rope = {}
    return {"rope_type": "default", **rope, "rope_theta": theta}
