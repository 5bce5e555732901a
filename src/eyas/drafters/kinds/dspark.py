"""DSpark (DeepSpec, 2026): DFlash's block, a Markov head that reads the token before a slot, and a confidence head.

The Markov head adds a low-rank bias to a slot's logits that depends on the token chosen before. This makes the guesses
of a block consistent, at the cost of one small matrix product per level. The confidence head predicts how probable it
is that a slot's guess is accepted.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork, Followed
from eyas.drafters.config import MAX_SIZE
from eyas.drafters.formats.fields import NESTED
from eyas.drafters.kind import DSPARK
from eyas.drafters.kinds.dflash import BLOCK_LOSS, block_kind, write_block


class DSparkConfig(BlockConfig):
    """Sizes of DFlash's block and options of the two heads."""

    sample_from_anchor: bool = True
    markov_rank: int = Field(default=256, ge=0, le=MAX_SIZE)
    """0 = there is no Markov head."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """`gated`: the slot's state weighs the bias; `rnn`: a recurrent state remembers all earlier tokens of the block."""
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    """The confidence head also reads the Markov head's embedding of the token before."""

    @model_validator(mode="after")
    def _heads_agree(self) -> DSparkConfig:
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs a markov_rank of at least 1")
        return self


def write(config: DSparkConfig) -> dict[str, Any]:
    """The config.json that DeepSpec's readers and eyas read: all settings at the top level."""
    values = write_block("Qwen3DSparkModel", (), config)
    return {**values, **values.pop(NESTED), "sample_from_anchor": config.sample_from_anchor}


class MarkovHead(nn.Module):
    """The bias that the preceding tokens add to a slot's logits."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)  # no bias before training
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, states: Tensor, tokens: Tensor, memory: Tensor | None) -> Followed:
        """The input of `markov_w2` after tokens [R, W] in slots with states [R, W, H], and the new memory."""
        embedded = self.markov_w1(tokens)  # [R, W, M]
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat((states, embedded), dim=-1))) * embedded
        elif self.kind == "rnn":
            memory = torch.zeros_like(embedded) if memory is None else memory
            gate, candidate, output = self.joint_proj(torch.cat((memory, embedded, states), dim=-1)).chunk(3, dim=-1)
            memory = torch.lerp(torch.tanh(candidate), memory, torch.sigmoid(gate))
            embedded = torch.tanh(output)
        return embedded, memory


class DSparkNetwork(BlockNetwork):
    """The block's layers and the two heads."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            more = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + more, 1)})

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:
        if not self.config.markov_rank:
            return None, memory
        out: Followed = self.markov_head(block.guess(slot).expand(-1, tokens.shape[1], -1), tokens, memory)
        return out

    def readout(self) -> Any:
        return self.markov_head.markov_w2 if self.config.markov_rank else None

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        if not self.config.enable_confidence_head:
            return None
        if self.config.confidence_head_with_markov:
            states = torch.cat((states, self.markov_head.markov_w1(tokens).to(states.dtype)), dim=-1)
        out: Tensor = self.confidence_head["proj"](states).squeeze(-1)
        return out


KIND = block_kind(
    "dspark", DSparkConfig, DSparkNetwork, ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"),
    marks=("markov_head.", "confidence_head."), family=DSPARK, write=write,
    loss={**BLOCK_LOSS, "token": "l1"},
)  # fmt: skip
