"""Medusa (arXiv 2401.10774): several heads on the target's last state, each of which guesses one token further.

The target's head predicts token t + 1 from the state at t; Medusa's head i predicts token t + 2 + i from the same
state, so head 0 guesses what follows the root. A head is a number of residual layers x + SiLU(W x + b), then a
projection to the vocabulary. It reads no tokens and keeps no cache.

config.json has the keys of vLLM's Medusa; FasterDecoding's keys are read as well. Both give few sizes, so most are
taken from the tensors.

Shapes: D heads, H hidden (the target's), Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import MAX_LAYERS, DrafterConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.medusa import HEADS, LAYERS, read_sizes
from eyas.drafters.kind import Kind
from eyas.drafters.levels import HeadsNetwork
from eyas.drafters.network import Attend
from eyas.errors import ConfigError

_MODEL_TYPE = "medusa"


class MedusaConfig(DrafterConfig):
    """The number of heads and their depth. The only tap is the boundary after the target's final norm."""

    num_heads: int = Field(default=5, ge=1, le=MAX_LAYERS)
    num_hidden_layers: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Residual layers of each head."""
    medusa_fc_bias: bool = True
    """Whether the residual layers have biases."""
    embedding: Literal["none"] = "none"

    @model_validator(mode="after")
    def _as_wide_as_the_target(self) -> MedusaConfig:
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, but Medusa's "
                "heads read the target's state unchanged"
            )
        return self

    @property
    def guesses(self) -> int:
        return self.num_heads


def read(fields: Fields) -> MedusaConfig:
    """The configuration in config.json, with sizes corrected from the tensors. Raises ConfigError."""
    if "taps" in fields.values:
        raise ConfigError(f"{fields.where}: taps: Medusa reads the target's state after its final norm, no other")
    read_sizes(fields)
    return fields.finish(MedusaConfig)


def write(config: MedusaConfig) -> dict[str, Any]:
    """The config.json that vLLM and eyas read."""
    values: dict[str, Any] = {
        "model_type": _MODEL_TYPE,
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        HEADS: config.num_heads,
        LAYERS: config.num_hidden_layers,
        "medusa_fc_bias": config.medusa_fc_bias,
    }
    return values if config.default_tree is None else values | {"default_tree": config.default_tree}


class MedusaBlock(nn.Module):
    """The residual layers of one head, initialized to the identity as in the paper's code."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        layers = [nn.Linear(size, size, bias=config.medusa_fc_bias) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            nn.init.zeros_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """States [..., H] -> states [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaNetwork(HeadsNetwork):
    """Medusa's heads; with `head: shared` all of them end in the target's own head."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))

    def make_heads(self) -> None:
        config = self.config
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.num_heads)
        )

    @property
    def heads(self) -> list[nn.Linear]:
        return [*self.lm_heads] if self.config.head == "own" else []

    def step(
        self,
        tokens: Tensor,  # noqa: ARG002
        hidden: Tensor,
        positions: Tensor,  # noqa: ARG002
        attend: Attend,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """See `DraftNetwork.step`; reading a pair just keeps its state, which all heads guess from."""
        return hidden, hidden

    def guess(self, states: Tensor, slot: int) -> Tensor:
        """The states [..., H] of head `slot` for `logits_at`, from the target's states [..., H]."""
        out: Tensor = self.blocks[slot](states)
        return out

    def logits_at(self, normed: Tensor, slot: int) -> Tensor:
        """Logits [..., Vd] of head `slot` from its states [..., H]."""
        out: Tensor = self.lm_heads[slot](normed) if self.config.head == "own" else super().logits(normed)
        return out

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., D, Vd] of the first D heads from their states [..., D, H]."""
        if self.config.head == "shared":
            return super().logits(normed)
        return torch.stack([self.logits_at(state, slot) for slot, state in enumerate(normed.unbind(-2))], dim=-2)

    def block(self, states: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        """The states themselves: each head runs when its level is drafted, or not at all if the draft ends earlier."""
        return states

    def follow(self, block: Tensor, slot: int, tokens: Tensor | None) -> Tensor:  # noqa: ARG002
        return self.logits_at(self.guess(block, slot), slot).unsqueeze(1)


KIND = Kind(
    "medusa",
    MedusaConfig,
    MedusaNetwork,
    read,
    write,
    architectures=frozenset({"MedusaModel"}),
    model_type=_MODEL_TYPE,
    fixed_taps=True,
    loss={"unroll": 5},
)
