"""Configurations of drafters: the fields that all kinds have, and the fields that several kinds share.

A configuration holds only what changes the computation. A kind adds its own fields in its file in `kinds/`; `formats/`
reads them from published files.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from transformers.activations import ACT2FN

from eyas.config import StrictModel
from eyas.drafters.window.layers import FULL_LAYER, SLIDING_LAYER, SlidingWindow
from eyas.drafters.window.window import SINKS
from eyas.targets.taps import default_taps

Ownership = Literal["own", "shared"]

MAX_SIZE = 2**22
MAX_LAYERS = 64
"""The largest accepted size and number of layers: tables of these sizes are allocated before any weight is read."""

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies don't change with the length of a sequence."""

MAX_TAPS = 64
"""Maximum number of taps that a drafter may read."""


class DrafterConfig(StrictModel):
    """Sizes, ownership of embedding and head, and the taps (aux hidden states) that the drafter reads.

    Taps are boundaries of the target: k = the residual stream entering layer k, n + 1 = after the final norm.
    """

    is_block: ClassVar[bool] = False
    """Whether it drafts a block of slots that one pass fills (`drafters/block/`)."""
    reads_target: ClassVar[bool] = False
    """Whether it reads the target's cache (`NetworkPairs.target`), at the target's positions."""

    hidden_size: int = Field(ge=1, le=MAX_SIZE)
    vocab_size: int = Field(ge=1, le=MAX_SIZE)
    draft_vocab_size: int = Field(ge=1, le=MAX_SIZE)
    target_hidden_size: int = Field(ge=1, le=MAX_SIZE)
    embedding: Literal["own", "shared", "none"] = "own"
    """`shared`: the target's own weight, not in the file. `none`: the network reads no tokens."""
    head: Ownership = "own"
    """`shared`: the target's own head, with any scaling or capping that the target applies to its logits."""
    taps: tuple[int, ...] | None = None
    """None = not written in the checkpoint: the kind's default boundaries of the target."""
    default_tree: str | None = None
    """The tree that the drafter was tuned for, such as `chain:4`, or `auto` where no fixed tree is sure to pay; None =
    unknown."""

    @model_validator(mode="after")
    def _vocabularies_agree(self) -> DrafterConfig:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        return self

    @property
    def embedding_size(self) -> int:
        """The width of the embeddings that it reads."""
        return self.hidden_size

    @property
    def tap_count(self) -> int:
        """How many taps the network's `fuse` reads."""
        return 1

    @property
    def guesses(self) -> int | None:
        """How many tokens it guesses in one pass, at most; None = it guesses one after another, without a limit."""
        return None

    def default_taps(self, layers: int) -> tuple[int, ...]:
        """The boundaries read from a target with `layers` layers if the files name none: here the final norm's."""
        return (layers + 1,)

    def window_refusal(self, pairs: int) -> str | None:  # noqa: ARG002
        """Why it can't decode in a window of `pairs` pairs; None = it can."""
        return "it has no attention to earlier pairs with RoPE of its own"

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The boundaries that it reads from a target with `layers` layers."""
        return self.taps or self.default_taps(layers)


class FeatureConfig(DrafterConfig):
    """A drafter that predicts the target's features: it reads one tap and is as wide as the target."""

    @model_validator(mode="after")
    def _as_wide_as_the_target(self) -> FeatureConfig:
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, but this kind "
                "feeds its output back in place of the target's state"
            )
        return self


class TransformerConfig(DrafterConfig):
    """A drafter made of decoder layers like the target's."""

    intermediate_size: int = Field(ge=1, le=MAX_SIZE)
    num_attention_heads: int = Field(ge=1, le=MAX_SIZE)
    num_hidden_layers: int = Field(default=1, ge=1, le=MAX_LAYERS)
    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False
    draft_window: int | None = Field(default=None, ge=1)
    """It attends to the first pairs (sinks) and the last `draft_window` pairs (`window/window.py`); None = to all."""

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

    @model_validator(mode="after")
    def _window_fits(self) -> TransformerConfig:
        refusal = None if self.draft_window is None else self.window_refusal(self.draft_window)
        if refusal is not None:
            raise ValueError(f"draft_window {self.draft_window}: {refusal}")
        return self

    def window_refusal(self, pairs: int) -> str | None:
        if self.guesses is not None:
            return "it makes its guesses in one pass, which has no window: use a drafter like EAGLE's"
        if self.rope_parameters.get("rope_type", "default") not in PLAIN_ROPE:
            return (
                f"its RoPE of type {self.rope_parameters['rope_type']} changes with the length of a row; a window "
                f"needs one of {', '.join(PLAIN_ROPE)}"
            )
        most = self.max_position_embeddings - SINKS
        if pairs > most:
            return (
                f"with its {SINKS} sinks the window takes {pairs + SINKS} positions, and the drafter has "
                f"{self.max_position_embeddings}: use a window of at most {most}"
            )
        return None

    @property
    def rope_size(self) -> int:
        """How many channels of a head are rotated."""
        raise NotImplementedError


class GroupedConfig(TransformerConfig):
    """A drafter made of decoder layers with grouped-query attention."""

    num_key_value_heads: int = Field(ge=1, le=MAX_SIZE)
    head_dim: int = Field(ge=2, le=MAX_SIZE, multiple_of=2)

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


class WindowedConfig(GroupedConfig):
    """A drafter whose layers may have a sliding window."""

    sliding_window: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """The window of layers of type `sliding_attention`, in positions (`window/layers.py`)."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """The type of each layer; None = all see everything. With a window and no types, all layers have it."""
    sliding_anchored: bool = False
    """The window counts from where a draft begins, not from each guess."""

    whole_draft: ClassVar[bool] = True
    """Whether guesses see each other however small the window is."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_layers(cls, values: Any) -> Any:
        """Name the layers that have the window if none are named: all of them."""
        if not isinstance(values, dict) or not values.get("sliding_window") or values.get("layer_types") is not None:
            return values
        layers = values.get("num_hidden_layers", 1)
        count = min(layers, MAX_LAYERS) if isinstance(layers, int) else 0  # others: refused below
        return {**values, "layer_types": (SLIDING_LAYER,) * count}

    @model_validator(mode="after")
    def _windows_agree(self) -> WindowedConfig:
        types = self.layer_types
        if types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(types)} layers, and num_hidden_layers is {self.num_hidden_layers}"
            )
        windowed = SLIDING_LAYER in (types or ())
        if windowed is not (self.sliding_window is not None):
            raise ValueError("sliding_window and layers of type sliding_attention need each other")
        if self.sliding_anchored and not windowed:
            raise ValueError("sliding_anchored needs a sliding_window")
        return self

    @property
    def layer_windows(self) -> tuple[SlidingWindow | None, ...]:
        """The window of each layer; None = it sees everything."""
        if self.sliding_window is None:
            return (None,) * self.num_hidden_layers
        window = SlidingWindow(self.sliding_window, self.sliding_anchored, self.whole_draft)
        return tuple(None if each == FULL_LAYER else window for each in self.layer_types or ())

    def window_refusal(self, pairs: int) -> str | None:
        if self.sliding_window is not None:
            return "its layers have sliding windows of their own"
        return super().window_refusal(pairs)


class MaskedConfig(DrafterConfig):
    """A drafter that makes several guesses in one pass, in slots whose tokens are not known yet."""

    mask_token_id: int = Field(ge=0)
    """The token whose embedding stands in those slots."""

    @model_validator(mode="after")
    def _mask_is_a_token(self) -> MaskedConfig:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is not in the vocabulary of {self.vocab_size}")
        return self


class FusedTapsConfig(TransformerConfig):
    """A drafter that fuses several taps of the target with `fc`: EAGLE-3, with any kind of attention."""

    num_aux_hidden_states: int = Field(default=3, ge=1, le=MAX_TAPS)
    fc_norm: bool = False
    """EAGLE-3.1: every tap has its own norm before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: the state fed back is the one after the final norm."""
    norm_before_residual: bool = False
    """The first layer's residual stream starts from the normed state."""
    norm_before_fc: bool = False
    """The concatenated taps have one norm before `fc`."""

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return default_taps(layers)
