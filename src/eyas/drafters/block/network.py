"""The trunk of block drafters: all guesses of a draft come out of one pass over a block of masked tokens.

The target's taps, fused by `fc` and a norm, are the context: each layer computes its keys and values from the context
alone. A block is the last token (the anchor) and mask tokens at the positions that follow. Its slots attend to the
context and to each other, in both directions or (JetSpec) backwards only. Each slot predicts the token at its own
position; where the anchor predicts as well, each slot predicts the token after it. Plain DFlash (arXiv 2602.06036) adds
nothing to this.

The other kinds correct a slot's logits for the tokens chosen before it: `follow` makes a `latent` of such a path, and
`corrected` applies it to the logits. So every kind drafts trees, and training runs `follow` along the true tokens.

Shapes: R rows, S positions, A taps, Ht target hidden, H draft hidden, B block size, D guesses of a block, W frontier
nodes, M latent, m memory, k candidates, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from eyas.drafters.config import MAX_SIZE, MAX_TAPS, MaskedConfig, WindowedConfig
from eyas.drafters.network import (
    Attend,
    Attention,
    DecoderLayer,
    DraftNetwork,
    RMSNorm,
    Rotary,
    described,
    grouped_heads,
    rotate,
)
from eyas.drafters.window.layers import SLIDING_LAYER, SlidingWindow
from eyas.targets.native.decoder import DecoderDescription, DecoderForm, Fusion, NativeDecoder
from eyas.targets.slots import KVShape
from eyas.targets.taps import spread_taps

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [R, heads, S, D], values) of context positions."""


class LayerView(NamedTuple):
    """What the slots of a block see in a layer."""

    causal: bool
    """No later slots."""
    window: SlidingWindow | None
    """None = the whole context."""


class BlockConfig(WindowedConfig, MaskedConfig):
    """Sizes of a block drafter, and the form of its blocks."""

    is_block = True

    num_aux_hidden_states: int = Field(ge=1, le=MAX_TAPS)
    block_size: int = Field(ge=2, le=256)
    sample_from_anchor: bool = False
    """Every slot, including the anchor's, predicts the token after it; else the slots after the anchor their own."""
    causal: bool = False
    """A slot sees no later slot (JetSpec, arXiv 2606.18394); else the slots see each other in both directions."""
    qk_norm: bool = True
    sliding_window: int | None = Field(default=None, ge=2, le=MAX_SIZE)
    sliding_causal: bool = False
    """In layers with a window a slot sees no later slot, even where it does in the others."""

    whole_draft: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, values: Any) -> Any:
        """Write causality in one way where all layers have a window."""
        if not isinstance(values, dict) or not values.get("sliding_window") or not values.get("sliding_causal"):
            return values
        if set(map(str, values.get("layer_types") or (SLIDING_LAYER,))) != {SLIDING_LAYER}:
            return values
        return {**values, "causal": True, "sliding_causal": False}

    @model_validator(mode="after")
    def _causality_agrees(self) -> BlockConfig:
        if self.sliding_causal and self.sliding_window is None:
            raise ValueError("sliding_causal needs a sliding_window")
        if self.sliding_causal and self.causal:
            raise ValueError("sliding_causal says nothing more where causal is true: keep one")
        return self

    @property
    def views(self) -> tuple[LayerView, ...]:
        """What slots see in each layer."""
        return tuple(
            LayerView(self.causal or (window is not None and self.sliding_causal), window)
            for window in self.layer_windows
        )

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
    """The output of a block's pass and its context: all that corrections depend on, apart from the path."""

    states: Tensor  # [R, B, H] after the final norm
    known: Tensor  # [R, 2] the token before the anchor (the anchor itself if it isn't known), and the anchor
    context: Tensor  # [R, H] the fused state before the anchor
    first: int  # the first slot that guesses
    hints: tuple[Tensor, ...] = ()  # what `BlockNetwork.begin` computes from the above

    def guess(self, slot: int) -> Tensor:
        """The state [R, 1, H] of guess `slot`."""
        return self.states[:, self.first + slot].unsqueeze(1)

    def guesses(self, count: int) -> Tensor:
        """The states [R, count, H] of the first `count` guesses."""
        return self.states[:, self.first : self.first + count]


Followed = tuple[Tensor | None, Tensor | None]
"""The latent [R, W, M] of paths (None = no correction) and the memory [R, W, m] of the same paths."""


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

    def description(self) -> DecoderDescription | None:
        """The layers of `states`; see `DraftNetwork.description`."""
        if any(type(layer) is not DecoderLayer for layer in self.layers):
            return None
        made = described(
            self,
            grouped_heads(self.config),
            self.norm,
            self.rotary,
            DecoderForm(fuse=Fusion(self.fc, norm_after=self.hidden_norm)),
        )
        views = zip(made.layers, self.config.views, strict=True)
        return made._replace(layers=[replace(layer, causal=view.causal) for layer, view in views])

    def decoder(self) -> NativeDecoder | None:
        """The layers as a native pass that computes `states`; its own `stage` replaces `read` here."""
        return None if self.config.sliding_window is not None else super().decoder()

    def fuse(self, taps: Tensor) -> Tensor:
        out: Tensor = self.hidden_norm(self.fc(taps.flatten(2)))
        return out

    def read(self, context: Tensor, positions: Tensor, store: Store) -> None:
        """Compute every layer's keys and values from fused states [R, S, H] at positions [R, S]."""
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
        """Whether logits are corrected for the tokens before."""
        return type(self).follow is not BlockNetwork.follow

    @property
    def corrections_per_guess(self) -> int:
        """How often the matrices of a correction are multiplied per guess: once, or for each candidate."""
        return 1

    def begin(self, block: Block) -> Block:
        """The block with `hints`: values that the corrections of all paths share."""
        return block

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:  # noqa: ARG002
        """The latent of guess `slot` after `tokens` [R, W], and the memory of the paths that end with them.

        `memory` is what the previous call returned for the tokens' parents; None at the root. In this base class a slot
        doesn't depend on the tokens before it.
        """
        return None, memory

    def corrected(self, logits: Tensor, latent: Tensor) -> Tensor:
        """Correct a slot's `logits` [..., Vd] for the paths of `latent` [..., M]: by default with a low-rank bias."""
        out: Tensor = logits + self.readout()(latent)
        return out

    def readout(self) -> Any:
        """The layer that maps a latent to a bias; None = no corrections, or not of low rank."""
        return None

    def joined(self, block: Block, tokens: Tensor) -> Tensor:
        """All inputs of the logits along one path per row: tokens [R, D], each the one before a guess.

        Returns states and latents concatenated, [R, D, H + M]; states alone if nothing is corrected.
        """
        states = block.guesses(tokens.shape[1])
        memory = None
        latents = []
        for slot, token in enumerate(tokens.unbind(1)):
            latent, memory = self.follow(block, slot, token.unsqueeze(1), memory)
            if latent is None:
                return states
            latents.append(latent)
        return torch.cat((states, torch.cat(latents, dim=1)), dim=-1)

    def joined_logits(self, joined: Tensor) -> Tensor:
        """Logits [..., Vd] from the output [..., H + M] of `joined`."""
        states, latent = joined.tensor_split((self.config.hidden_size,), dim=-1)
        logits = self.logits(states)
        return self.corrected(logits, latent) if latent.shape[-1] else logits

    def joined_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters of `joined_logits`, without the head's if it is the target's."""
        parts = [*self.heads, *([] if self.readout() is None else [self.readout()])]
        return tuple(p for part in parts for p in part.parameters() if p.requires_grad)

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:  # noqa: ARG002
        """Logits [...] of the probability that guesses after tokens [...] are accepted; None without such a head."""
        return None


def among(logits: Tensor, candidates: Tensor, scores: Tensor) -> Tensor:
    """Redistribute the total probability of `candidates` [..., k] among them by `scores` [..., k].

    If they are the k best by `logits` [..., Vd], the candidate with the best score becomes the best of all tokens. All
    other tokens keep their probability.
    """
    logits, candidates = (x.expand(*scores.shape[:-1], -1) for x in (logits, candidates))
    total = logits.gather(-1, candidates).logsumexp(-1, keepdim=True)
    shared = total + scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return logits.scatter(-1, candidates, shared.to(logits.dtype))
