"""What every drafter kind is described by, and what the kinds with decoder layers add.

Only what changes the computation is kept here; a kind's own `config.py` adds its fields and reads the field's files.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from eyas.config import StrictModel

Ownership = Literal["own", "shared"]


class DrafterConfig(StrictModel):
    """Sizes and ownership; `taps` are target boundaries (k = the residual entering layer k, n + 1 = the final norm)."""

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
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

    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_hidden_layers: int = Field(default=1, ge=1)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def rope_size(self) -> int:
        """Channels of a head that are rotated."""
        raise NotImplementedError


class GroupedConfig(TransformerConfig):
    """... whose attention is grouped-query attention."""

    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)

    @property
    def rope_size(self) -> int:
        return self.head_dim
