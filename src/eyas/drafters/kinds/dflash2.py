"""DFlash 2 (inco.ai and z-lab, August 2026): DFlash with convolutions within the block and a selector of candidates.

Each attention and each MLP has a depthwise convolution before and after it, whose taps are a slot and the slots before
it in the block. Its kernel is a learned one plus a projection of the input, one value per group of channels and tap.
The selector scores the k best candidates b of slot t after token a: U_t(b) + <A(a) * H(h_t), B(b)> with logits U.

Shapes: T taps of a convolution, G groups of channels; see `block/network.py` for the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.block.network import Block, BlockConfig, BlockNetwork, Followed, among
from eyas.drafters.config import MAX_SIZE
from eyas.drafters.kind import DFLASH2
from eyas.drafters.kinds.dflash import BLOCK_LOSS, block_kind, write_block
from eyas.drafters.network import Attend, Attention, DecoderLayer, Rope

CONVOLUTION = ("conv_kernel_size", "conv_group_size")


class ConvolvedConfig(BlockConfig):
    """A block drafter whose layers have convolutions."""

    conv_kernel_size: int = Field(default=2, ge=1, le=256)
    """T, the taps of a convolution."""
    conv_group_size: int = Field(default=16, ge=1, le=MAX_SIZE)
    """How many channels share the input-dependent part of the kernel."""

    @model_validator(mode="after")
    def _groups_divide(self) -> ConvolvedConfig:
        if self.conv_kernel_size and self.hidden_size % max(1, self.conv_group_size):
            raise ValueError(f"conv_group_size {self.conv_group_size} must divide hidden_size {self.hidden_size}")
        return self


class DFlash2Config(ConvolvedConfig):
    """Sizes of the block, its convolutions, and the selector."""

    selector_rank: int = Field(default=256, ge=1, le=MAX_SIZE)
    selector_top_k: int = Field(default=16, ge=1)
    """k, the candidates per slot."""

    @model_validator(mode="after")
    def _enough_tokens(self) -> DFlash2Config:
        if self.selector_top_k > self.draft_vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} exceeds draft_vocab_size {self.draft_vocab_size}")
        return self


class Convolution(nn.Module):
    """The convolutions before and after one sublayer, initialized to the identity."""

    def __init__(self, config: ConvolvedConfig) -> None:
        super().__init__()
        taps, size = config.conv_kernel_size, config.hidden_size
        self.group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // self.group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, x: Tensor) -> Tensor:
        """The kernels [2, ., B, T, H] before and after a sublayer with input x [., B, H]."""
        more = self.kernel_projection(x).unflatten(-1, (2, self.base_kernel.shape[1], -1))  # [., B, 2, T, G]
        out: Tensor = self.base_kernel[:, None, None] + more.repeat_interleave(self.group, dim=-1).movedim(2, 0)
        return out


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of x [., B, H] with kernel [., B, T, H]: tap t reads the slot t before; zero padding."""
    out = kernel[:, :, 0] * x
    for tap in range(1, min(kernel.shape[2], x.shape[1])):
        out = out + kernel[:, :, tap] * F.pad(x[:, :-tap], (0, 0, tap, 0))
    return out


class ConvolvedLayer(DecoderLayer):
    """A decoder layer whose sublayers have convolutions before and after them."""

    def __init__(self, config: ConvolvedConfig, index: int, attention: Attention) -> None:
        super().__init__(config, index, attention)
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def forward(self, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        x = self.input_layernorm(hidden)
        before, after = self.attention_conv.kernels(x)
        hidden = hidden + convolved(self.self_attn(convolved(x, before), rope, self.index, attend), after)
        x = self.post_attention_layernorm(hidden)
        before, after = self.mlp_conv.kernels(x)
        out: Tensor = hidden + convolved(self.mlp(convolved(x, before)), after)
        return out


class Selector(nn.Module):
    """The codebooks and the projection that score candidates. Initialized to change no score."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)


class ConvolvedNetwork(BlockNetwork):
    """A block drafter whose layers may have convolutions."""

    @staticmethod
    def make_layer(config: Any, index: int, attention: Attention) -> DecoderLayer:
        layer = ConvolvedLayer if config.conv_kernel_size else DecoderLayer
        made: DecoderLayer = layer(config, index, attention)
        return made


class DFlash2Network(ConvolvedNetwork):
    """The block's layers and the selector."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = Selector(config)

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:
        selector = self.candidate_selector
        gate = F.embedding(tokens, selector.predecessor_codebook) * selector.hidden_projection(block.guess(slot))
        return gate, memory

    def corrected(self, logits: Tensor, latent: Tensor) -> Tensor:
        best, ids = logits.topk(self.config.selector_top_k, dim=-1)
        successors = F.embedding(ids, self.candidate_selector.successor_codebook).to(latent.dtype)  # [..., k, M]
        return among(logits, ids, best + (successors @ latent.unsqueeze(-1)).squeeze(-1))

    def joined_parameters(self) -> tuple[nn.Parameter, ...]:
        own = self.candidate_selector.successor_codebook
        return (*super().joined_parameters(), *((own,) if own.requires_grad else ()))


KIND = block_kind(
    "dflash2", DFlash2Config, DFlash2Network, ("DFlash2DraftModel",), marks=("candidate_selector.",), family=DFLASH2,
    loss={**BLOCK_LOSS, "base_weight": 1.0},
    write=partial(
        write_block, "DFlash2DraftModel", ("block_size", *CONVOLUTION, "selector_rank", "selector_top_k")
    ),
)  # fmt: skip
