"""A drafter kind of two linear layers, and a method without weights: two things that this package adds to eyas."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import FeatureConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.history import History, LookupDrafter, TokenPairs
from eyas.drafters.kind import Kind
from eyas.drafters.network import Attend, DraftNetwork
from eyas.targets import Target
from eyas.tree.draft_tree import Proposal


class TwoLayerConfig(FeatureConfig):
    """What config.json holds, and what a recipe sets under `shape.options`."""

    width: int = Field(default=1024, ge=1)
    """The width between the two layers."""


class TwoLayerNetwork(DraftNetwork):
    """Predicts the target's next state from its last one and the next token's embedding. Nothing is cached."""

    config: TwoLayerConfig

    def __init__(self, config: TwoLayerConfig) -> None:
        super().__init__(config)
        self.up = nn.Linear(2 * config.hidden_size, config.width)
        self.down = nn.Linear(config.width, config.hidden_size)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Tokens [B, S] and states [B, S, H] to the next states, and what the head reads: here the same."""
        pair = torch.cat((self.embed(tokens), hidden), dim=-1)
        out = hidden + self.down(F.silu(self.up(pair)))
        return out, out


def read(fields: Fields) -> TwoLayerConfig:
    """config.json to a config; `finish` refuses keys that nobody reads."""
    fields.values["target_hidden_size"] = fields.values.get("hidden_size")
    return fields.finish(TwoLayerConfig)


def write(config: TwoLayerConfig) -> dict[str, Any]:
    """A config to config.json."""
    values = config.model_dump(mode="json", exclude={"target_hidden_size"}, exclude_none=True)
    return {"model_type": "eyas_two_layer", "architectures": ["TwoLayerDrafter"], **values}


KIND = Kind(
    "two_layer",
    TwoLayerConfig,
    TwoLayerNetwork,
    read,
    write,
    architectures=frozenset({"TwoLayerDrafter"}),
    model_type="eyas_two_layer",
    paired_inputs=("up.weight",),
    loss={"token_weight": 0.1, "feature": "smooth_l1", "feature_weight": 1.0, "unroll": 1},
)


class LastTime(LookupDrafter):
    """Proposes what followed the last token the last time it occurred in the sequence."""

    max_fanout = 1
    fixed_tree = "chain:4"
    pairs: TokenPairs[History]

    def __init__(self, target: Target) -> None:
        super().__init__(TokenPairs(History), target.device)

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:
        tokens = self.pairs[slot].tokens
        for at in range(len(tokens) - 2, -1, -1):
            if tokens[at] == tokens[-1]:
                following = tokens[at + 1 : at + 1 + depth]
                return Proposal.chain(following, [-0.7] * len(following))  # about one in two is accepted
        return Proposal()
