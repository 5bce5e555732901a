"""Domino (arXiv 2605.29707): DFlash's block, and a GRU over the block's tokens so far that corrects its logits.

The GRU reads the embeddings of the anchor and of the tokens chosen after it. Its state and the slot's, concatenated, go
through a bottleneck to a bias on the logits. The first guesses can be left uncorrected. It reads SpecForge's files,
where `shift_label` says that the anchor predicts as well.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork, Followed
from eyas.drafters.config import MAX_SIZE
from eyas.drafters.formats.fields import NESTED, Fields
from eyas.drafters.kinds.dflash import BLOCK_LOSS, block_kind, read_block, write_block


class DominoConfig(BlockConfig):
    """Sizes of DFlash's block and of the GRU."""

    gru_hidden_dim: int = Field(default=1024, ge=1, le=MAX_SIZE)
    emb_dim: int = Field(default=256, ge=1, le=MAX_SIZE)
    """M, the width of the bottleneck."""
    pure_draft_prefix_len: int = Field(default=0, ge=0)
    """How many of the first guesses are left uncorrected."""


def read(fields: Fields) -> DominoConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    nested = dict(fields.values.get(NESTED) or {})
    shifted = nested.pop("shift_label", None)
    fields.values |= {NESTED: nested} | ({} if shifted is None else {"sample_from_anchor": shifted})
    made: DominoConfig = read_block(DominoConfig, "domino", fields)
    return made


def write(config: DominoConfig) -> dict[str, Any]:
    """The config.json that SpecForge and eyas read."""
    values = write_block("DominoDraftModel", ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"), config)
    values.pop("sample_from_anchor", None)
    values[NESTED] |= {"projector_type": "domino", "shift_label": config.sample_from_anchor}
    return values


class DominoNetwork(BlockNetwork):
    """The block's layers, the GRU and the bottleneck."""

    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        size, width = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = nn.GRU(size, width, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + width, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )
        nn.init.zeros_(self.readout().weight)  # no correction before training

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:
        gru: Any = self.prefix_gru
        read = F.linear(self.embed(tokens), gru.weight_ih_l0)  # [R, W, 3 m]
        memory = read.new_zeros(*tokens.shape, self.config.gru_hidden_dim) if memory is None else memory
        (reset, update, new), kept = read.chunk(3, dim=-1), F.linear(memory, gru.weight_hh_l0).chunk(3, dim=-1)
        candidate = torch.tanh(new + torch.sigmoid(reset + kept[0]) * kept[2])
        memory = torch.lerp(candidate, memory.to(candidate.dtype), torch.sigmoid(update + kept[1]))
        states = block.guess(slot).expand(-1, tokens.shape[1], -1)
        latent = self.embed_proj[:2](torch.cat((states, memory.to(states.dtype)), dim=-1))
        return latent * (slot >= self.config.pure_draft_prefix_len), memory

    def readout(self) -> Any:
        return self.embed_proj[2]


KIND = block_kind(
    "domino", DominoConfig, DominoNetwork, ("DominoDraftModel",), marks=("prefix_gru.", "embed_proj."), read=read,
    write=write, loss={**BLOCK_LOSS, "base_weight": 0.5},
)  # fmt: skip
