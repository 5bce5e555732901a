"""XPress (arXiv 2608.02438): DFlash's block, and a refiner that causally mixes its slots.

Each slot's state, the block's mean state and the token before the slot become one vector of size r. A triangular matrix
per channel adds the vectors of earlier slots, an MLP follows, and a projection makes a bias of the result. Published
engines run this several times over the whole block, from its own best guesses: each pass settles one more guess (Jacobi
iteration). Here a slot is computed once its path is known, which gives the fixed point of those passes.

It reads files of the authors' vLLM branch: `xpress_head.*`, with the mixer `mix.L` as trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork, Followed
from eyas.drafters.config import MAX_SIZE
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kinds.dflash import BLOCK_LOSS, block_kind, read_block, write_block
from eyas.errors import ConfigError


class XPressConfig(BlockConfig):
    """Sizes of DFlash's block and of the refiner."""

    xpress_rank: int = Field(default=256, ge=1, le=MAX_SIZE)
    xpress_mlp_hidden: int = Field(default=512, ge=1, le=MAX_SIZE)


def read(fields: Fields) -> XPressConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    size = fields.take("xpress_block_size", int)
    fields.ignore("xpress_num_passes", "here a slot is computed once its path is known")
    fields.ignore("xpress_topc", "of the target's tokens, all are scored")
    if fields.values.setdefault("block_size", size) != size and size is not None:
        raise ConfigError(f"{fields.where}: block_size is {fields.values['block_size']} and xpress_block_size {size}")
    made: XPressConfig = read_block(XPressConfig, "xpress", fields)
    return made


def write(config: XPressConfig) -> dict[str, Any]:
    """The config.json that the authors' branch of vLLM and eyas read."""
    return write_block("XPressDraftModel", (), config) | {"xpress_block_size": config.block_size}


class Refiner(nn.Module):
    """The tensors of the causal mixer that refines a block's guesses, under their published names."""

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        size = config.hidden_size
        rank = config.xpress_rank
        width = config.xpress_mlp_hidden
        linear = partial(nn.Linear, bias=False)
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w2 = linear(rank, config.draft_vocab_size)
        nn.init.zeros_(self.w2.weight)  # no bias before training
        self.down_h = linear(size, rank)
        self.down_g = linear(size, rank)
        self.in_proj = linear(3 * rank, rank)
        self.mix = nn.ParameterDict({"L": nn.Parameter(torch.zeros(rank, config.block_size, config.block_size))})
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(rank, width), "up_proj": linear(rank, width), "down_proj": linear(width, rank)}
        )


class XPressNetwork(BlockNetwork):
    """The block's layers and the refiner."""

    config: XPressConfig

    def __init__(self, config: XPressConfig) -> None:
        super().__init__(config)
        self.xpress_head = Refiner(config)

    def begin(self, block: Block) -> Block:
        """Add the part [R, B, 2 r] of `in_proj`'s input that doesn't depend on the token before."""
        head = self.xpress_head
        mean = block.states.mean(1, keepdim=True)
        known = torch.cat((head.down_h(block.states), head.down_g(mean).expand(-1, block.states.shape[1], -1)), dim=-1)
        return block._replace(hints=(known,))

    def _entering(self, block: Block, at: int, tokens: Tensor) -> Tensor:
        """The vectors [R, W, r] of slot `at` after `tokens` [R, W], before mixing."""
        known = block.hints[0][:, at].unsqueeze(1).expand(-1, tokens.shape[1], -1)
        out: Tensor = self.xpress_head.in_proj(torch.cat((known, self.xpress_head.w1(tokens).to(known.dtype)), dim=-1))
        return out

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:
        """See `BlockNetwork.follow`; the memory holds the vectors of all slots so far, including the anchor's."""
        at = block.first + slot
        head = self.xpress_head
        if memory is None and at:
            memory = self._entering(block, 0, block.known[:, :1])
        own = self._entering(block, at, tokens)
        memory = own if memory is None else torch.cat((memory, own), dim=-1)  # [R, W, (at + 1) r]
        slots = memory.view(*own.shape[:2], at + 1, -1)
        mixed = own + (slots * head.mix["L"][:, at, : at + 1].T).sum(-2)
        mlp = head.mlp
        return mixed + mlp["down_proj"](F.silu(mlp["gate_proj"](mixed)) * mlp["up_proj"](mixed)), memory

    def readout(self) -> Any:
        return self.xpress_head.w2


KIND = block_kind(
    "xpress", XPressConfig, XPressNetwork, ("XPressDraftModel", "Qwen3XPressModel"), marks=("xpress_head.",), read=read,
    write=write, loss={**BLOCK_LOSS, "base_weight": 0.6},
)  # fmt: skip
