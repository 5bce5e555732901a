"""The trunk of block drafters: all guesses of a draft come out of one pass over a block of masked tokens.

The target's states at some boundaries, fused by `fc` and a norm, are the context: every layer makes its keys and
values of them, and of nothing else. A block is the last token (the anchor) and mask tokens at the positions that
follow. Its slots attend to the context and to each other, in both directions or (JetSpec) backwards only, and each
predicts the token at its own position; where the anchor predicts as well, each slot predicts the token after it. DFlash
(arXiv 2602.06036) is this and no more.

The other kinds correct what a slot predicts by the tokens chosen before it: `follow` makes a `latent` of such a path,
`corrected` applies it to the slot's logits. So every kind drafts trees, and training is `follow` along the true tokens.

Shapes: R rows, S positions, A taps, Ht target hidden, H draft hidden, B block size, D guesses of a block, W frontier
nodes, M latent, m memory, k candidates, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from eyas.drafters.config import MOST_TAPS, GroupedConfig, MaskedConfig
from eyas.drafters.network import Attend, Attention, DecoderLayer, DraftNetwork, RMSNorm, Rotary, native_decoder, rotate
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.slots import KVShape
from eyas.targets.taps import spread_taps

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [R, heads, S, D], values) of context positions."""


class BlockConfig(GroupedConfig, MaskedConfig):
    """Sizes of a block drafter, and what its blocks are."""

    is_block = True

    num_aux_hidden_states: int = Field(ge=1, le=MOST_TAPS)
    block_size: int = Field(ge=2, le=256)
    sample_from_anchor: bool = False
    """The anchor's slot predicts as well, the token that follows it; else a slot predicts its own token."""
    causal: bool = False
    """A slot sees no later one (JetSpec, arXiv 2606.18394); else the slots see each other both ways."""
    qk_norm: bool = True
    sliding_window: int | None = Field(default=None, ge=2)
    """A slot sees only positions that are less than so many from its own; None = all."""

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    @property
    def first(self) -> int:
        """The first slot that guesses: 0 if the anchor does, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def guesses(self) -> int:
        """D, how many tokens a block predicts."""
        return self.block_size - self.first

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return spread_taps(self.num_hidden_layers, layers)


class Block(NamedTuple):
    """A block's pass, and what it stood behind: what corrections depend on besides the path."""

    states: Tensor  # [R, B, H] after the final norm
    known: Tensor  # [R, 2] the token before the anchor (the anchor itself if it isn't known), and the anchor
    context: Tensor  # [R, H] the fused state before the anchor
    first: int  # the first slot that guesses
    hints: tuple[Tensor, ...] = ()  # what `BlockNetwork.begin` made of all this

    def guess(self, slot: int) -> Tensor:
        """The state [R, 1, H] of a guess."""
        return self.states[:, self.first + slot].unsqueeze(1)

    def guesses(self, count: int) -> Tensor:
        """The states [R, count, H] of the first guesses."""
        return self.states[:, self.first : self.first + count]


Followed = tuple[Tensor | None, Tensor | None]
"""The latent [R, W, M] of paths, None = nothing is corrected; and the memory [R, W, m] of the same paths."""


class BlockNetwork(DraftNetwork):
    """The layers of a block drafter."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.tap_count * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(
            self.make_layer(config, i, Attention(config, size, qk_norm=config.qk_norm))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(config)

    @staticmethod
    def make_layer(config: Any, index: int, attention: Attention) -> DecoderLayer:
        """A decoder layer with this attention."""
        return DecoderLayer(config, index, attention)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        return [layer.kv_shape for layer in self.layers if isinstance(layer, DecoderLayer)]

    def decoder(self) -> NativeDecoder | None:
        """The layers as a native pass: it computes `states`, and in its other form `read`."""
        if self.config.sliding_window is not None or any(type(layer) is not DecoderLayer for layer in self.layers):
            return None
        return native_decoder(self, self.config, self.norm, self.rotary)

    def fuse(self, taps: Tensor) -> Tensor:
        out: Tensor = self.hidden_norm(self.fc(taps.flatten(2)))
        return out

    def read(self, context: Tensor, positions: Tensor, store: Store) -> None:
        """Make every layer's keys and values of fused states [R, S, H] at positions [R, S]."""
        rope = self.rotary(context, positions)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            keys, values = (
                proj(context).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for proj in (attention.k_proj, attention.v_proj)
            )
            store(index, rotate(attention.k_norm(keys), rope), values)

    def states(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The normed states [R, B, H] of blocks with embeddings [R, B, H] at positions [R, B]."""
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rope, attend)
        out: Tensor = self.norm(hidden)
        return out

    @property
    def corrects(self) -> bool:
        """Whether logits are corrected by the tokens before."""
        return type(self).follow is not BlockNetwork.follow

    def begin(self, block: Block) -> Block:
        """The block with whatever its corrections share, whichever path they follow, as `hints`."""
        return block

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:  # noqa: ARG002
        """The latent of guess `slot` after `tokens` [R, W], and the memory of the paths that end with them.

        `memory` is what the same call gave for the tokens' parents; None at the root. Here a slot doesn't know which
        tokens come before it.
        """
        return None, memory

    def corrected(self, logits: Tensor, latent: Tensor) -> Tensor:
        """The logits [..., Vd] of a slot after the paths of which `latent` [..., M] is: a bias of low rank."""
        out: Tensor = logits + self.readout()(latent)
        return out

    def readout(self) -> Any:
        """What turns a latent into a bias; None = there are no corrections, or they aren't of low rank."""
        return None

    def joined(self, block: Block, tokens: Tensor) -> Tensor:
        """All that the logits depend on, along one path for each row: tokens [R, D], each of them before a guess.

        [R, D, H + M]: the states and the latents side by side.
        """
        states, memory, latents = block.guesses(tokens.shape[1]), None, []
        for slot, token in enumerate(tokens.unbind(1)):
            latent, memory = self.follow(block, slot, token.unsqueeze(1), memory)
            if latent is None:
                return states
            latents.append(latent)
        return torch.cat((states, torch.cat(latents, dim=1)), dim=-1)

    def joined_logits(self, joined: Tensor) -> Tensor:
        """Logits [..., Vd] of what `joined` gives [..., H + M]."""
        states, latent = joined.tensor_split((self.config.hidden_size,), dim=-1)
        logits = self.logits(states)
        return self.corrected(logits, latent) if latent.shape[-1] else logits

    def joined_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters of `joined_logits`; of the head none if it is the target's."""
        parts = [*self.heads, *([] if self.readout() is None else [self.readout()])]
        return tuple(p for part in parts for p in part.parameters() if p.requires_grad)

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:  # noqa: ARG002
        """Logits [...] of how probable it is that guesses after tokens [...] are accepted; None without such a head."""
        return None


def among(logits: Tensor, candidates: Tensor, scores: Tensor) -> Tensor:
    """Let `scores` [..., k] say how the probability of `candidates` [..., k] is shared among them.

    The best of the candidates by their scores is the best of all, if they are the k best by `logits` [..., Vd]; and
    what isn't among them keeps its probability.
    """
    logits, candidates = (x.expand(*scores.shape[:-1], -1) for x in (logits, candidates))
    total = logits.gather(-1, candidates).logsumexp(-1, keepdim=True)
    shared = total + scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return logits.scatter(-1, candidates, shared.to(logits.dtype))
