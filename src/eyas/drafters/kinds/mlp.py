"""A head of a few linear layers: from a target state and the next token's embedding to the next state.

    pred = SiLU(linear(... SiLU(linear(cat(embedding, state)))))
    output = s * pred + (1 - s) * state,   s = sigmoid(gate)

It has no attention, so a draft costs almost nothing and nothing is cached, but it guesses from a single state. Its
config.json is eyas's own format and holds exactly the fields of `MlpConfig`.

Shapes: B batch, S positions, H hidden (the target's).
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import FeatureConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import Kind
from eyas.drafters.network import Attend, DraftNetwork, RMSNorm

_MODEL_TYPE, _ARCHITECTURE = "eyas_mlp", "EyasMlpDrafter"


class MlpConfig(FeatureConfig):
    """Depth and options. With `embedding: none` the network reads the state alone."""

    depth: int = Field(default=2, ge=1)
    gate: bool = True
    """Mix the prediction with its input state by one learned weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The dropout rate in training; decoding drops nothing."""
    norm: bool = False
    """Normalize before the head: for features taken before the target's final norm."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _one_tap(self) -> MlpConfig:
        if self.taps is not None and len(self.taps) != 1:
            raise ValueError(f"taps {list(self.taps)}: an mlp drafter reads one boundary")
        return self


def read(fields: Fields) -> MlpConfig:
    """The configuration in config.json, which states what is shared. Raises ConfigError, also for unknown keys."""
    fields.values["target_hidden_size"] = fields.values.get("hidden_size")
    return fields.finish(MlpConfig)


def write(config: MlpConfig) -> dict[str, Any]:
    """The config.json that only eyas reads."""
    values = config.model_dump(mode="json", exclude={"target_hidden_size"}, exclude_none=True)
    return {"model_type": _MODEL_TYPE, "architectures": [_ARCHITECTURE]} | values


class MlpNetwork(DraftNetwork):
    """`depth` layers of linear, SiLU and dropout, then the gate."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        first = size if config.embedding == "none" else 2 * size
        self.layers = nn.ModuleList(nn.Linear(size if i else first, size) for i in range(config.depth))
        self.dropout = nn.Dropout(config.dropout)
        if config.gate:
            self.gate = nn.Parameter(torch.zeros(1))
        if config.norm:
            self.norm = RMSNorm(size, eps=config.rms_norm_eps)

    def step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,  # noqa: ARG002
        attend: Attend,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """See `DraftNetwork.step`; positions and `attend` are unused."""
        x = hidden if self.config.embedding == "none" else torch.cat((self.embed(tokens), hidden), dim=-1)
        for layer in self.layers:
            x = self.dropout(F.silu(layer(x)))
        if self.config.gate:
            share = self.gate.sigmoid()
            x = share * x + (1 - share) * hidden
        return x, (self.norm(x) if self.config.norm else x)


KIND = Kind(
    "mlp",
    MlpConfig,
    MlpNetwork,
    read,
    write,
    architectures=frozenset({_ARCHITECTURE}),
    model_type=_MODEL_TYPE,
    paired_inputs=("layers.0.weight",),
    loss={"token_weight": 0.1, "feature": "mse", "feature_weight": 1.0, "unroll": 1},
)
