"""What every drafter kind is described by, and what the kinds with decoder layers add.

Only what changes the computation is kept here; a kind's own `config.py` adds its fields and reads the field's files.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from transformers.activations import ACT2FN

from eyas.config import StrictModel
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.rope import read_rope
from eyas.errors import ConfigError

Ownership = Literal["own", "shared"]

WIDEST, DEEPEST = 2**22, 64
"""No size and no number of layers beyond these is believed: tables of a size are made before any weight is read."""


class DrafterConfig(StrictModel):
    """Sizes and ownership; `taps` are target boundaries (k = the residual entering layer k, n + 1 = the final norm)."""

    hidden_size: int = Field(ge=1, le=WIDEST)
    vocab_size: int = Field(ge=1, le=WIDEST)
    draft_vocab_size: int = Field(ge=1, le=WIDEST)
    target_hidden_size: int = Field(ge=1, le=WIDEST)
    embedding: Literal["own", "shared", "none"] = "own"
    """`shared`: the target's own weight, lent at load and not in the file. `none`: the network reads no tokens."""
    head: Ownership = "own"
    """`shared`: the target's own head, with whatever the target does to its logits."""
    taps: tuple[int, ...] | None = None
    """None = not written in the checkpoint: the kind's default boundaries of the target."""
    default_tree: str | None = None
    """The tree setting the drafter was tuned for, if any."""

    @model_validator(mode="after")
    def _vocabularies_agree(self) -> DrafterConfig:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        return self

    @property
    def tap_count(self) -> int:
        """How many taps `fuse` reads."""
        return 1

    def default_taps(self, layers: int) -> tuple[int, ...]:
        """The boundaries of a target with `layers` layers when none are written: here, what its head reads."""
        return (layers + 1,)


class FeatureConfig(DrafterConfig):
    """A drafter whose states are the target's features themselves: one tap, and as wide as the target."""

    @model_validator(mode="after")
    def _as_wide_as_the_target(self) -> FeatureConfig:
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, but this kind "
                "feeds its output back in the place of the target's state"
            )
        return self


class TransformerConfig(DrafterConfig):
    """A drafter with decoder layers."""

    intermediate_size: int = Field(ge=1, le=WIDEST)
    num_attention_heads: int = Field(ge=1, le=WIDEST)
    num_hidden_layers: int = Field(default=1, ge=1, le=DEEPEST)
    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False

    @field_validator("hidden_act")
    @classmethod
    def _known_activation(cls, value: str) -> str:
        if value not in ACT2FN:
            raise ValueError(f"no activation is called {value!r}")
        return value

    @model_validator(mode="after")
    def _factor_for_every_frequency(self) -> TransformerConfig:
        for key in ("short_factor", "long_factor"):
            factors = self.rope_parameters.get(key)
            if factors is not None and len(factors) != self.rope_size // 2:
                raise ValueError(f"{key} has {len(factors)} numbers for {self.rope_size // 2} frequencies")
        return self

    @property
    def rope_size(self) -> int:
        """Channels of a head that are rotated."""
        raise NotImplementedError


class GroupedConfig(TransformerConfig):
    """... whose attention is grouped-query attention."""

    num_key_value_heads: int = Field(ge=1, le=WIDEST)
    head_dim: int = Field(ge=2, le=WIDEST, multiple_of=2)

    @model_validator(mode="after")
    def _heads_divide(self) -> GroupedConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads can't share {self.num_key_value_heads} key-value heads evenly"
            )
        return self

    @property
    def rope_size(self) -> int:
        return self.head_dim


# Reading the field's config.json files: what drafter kinds with decoder layers have in common.


def read_ownership(fields: Fields) -> None:
    """Whose embedding and head a checkpoint uses: the target's, where the file has none."""
    if fields.names is not None:
        for part, tensor in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
            fields.values[part] = "own" if tensor in fields.names else "shared"


def read_decoder(fields: Fields) -> None:
    """Bring the keys of a decoder's config into our form; refuse what the layers here can't do."""
    where = fields.where
    fields.values["rope_parameters"] = read_rope(fields)
    if fields.take("tie_word_embeddings", bool, default=False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but a drafter's head is never its embedding")
    window = fields.values.pop("sliding_window", None)
    if fields.take("use_sliding_window", bool, default=True) and window is not None:
        raise ConfigError(f"{where}: eyas has no sliding-window drafter; set sliding_window to null")
    if any(kind != "full_attention" for kind in fields.take("layer_types", list, default=[])):
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    fields.default("target_hidden_size", fields.values.get("hidden_size"))
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))


def read_grouped_heads(fields: Fields) -> None:
    """Fill in the head size and the number of key-value heads."""
    heads, size = fields.values.get("num_attention_heads"), fields.values.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(size, int):
        if not fields.values.get("head_dim"):
            fields.values.pop("head_dim", None)
        fields.default("head_dim", size // heads)
    fields.default("num_key_value_heads", heads)


def decoder_dict(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """The config.json form that other engines read: RoPE in both places, ownership left to the tensors."""
    values = config.model_dump(exclude={"taps", "default_tree", "embedding", "head"}, exclude_none=True)
    values["architectures"] = [architecture]
    values["model_type"] = "llama" if isinstance(config, GroupedConfig) else "deepseek_v3"
    values["tie_word_embeddings"] = False
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.default_tree is not None:
        values["default_tree"] = config.default_tree
    return values
