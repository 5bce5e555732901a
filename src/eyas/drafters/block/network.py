"""Networks of block drafters: all guesses of a draft come out of one pass over a block of masked tokens.

The target's states at some boundaries, fused by `fc` and a norm, are the context: every layer makes its keys and
values of them, and of nothing else. A block is the last token (the anchor) and mask tokens at the positions that
follow. Its slots attend to the context and to each other, in both directions, and each predicts the token at its own
position; where the anchor predicts as well (DSpark), each slot predicts the token after it. DFlash is arXiv 2602.06036.

Shapes: R rows, S positions, A taps, Ht target hidden, H draft hidden, B block size, D guesses of a block, W frontier
nodes, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from eyas.drafters.config import MOST_TAPS, GroupedConfig, MaskedConfig
from eyas.drafters.network import (
    Attend,
    Attention,
    DecoderLayer,
    DraftNetwork,
    RMSNorm,
    Rotary,
    native_decoder,
    rotate,
)
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
    qk_norm: bool = True

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    @property
    def guesses(self) -> int:
        """D, how many tokens a block predicts."""
        return self.block_size - (not self.sample_from_anchor)

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return spread_taps(self.num_hidden_layers, layers)


class BlockNetwork(DraftNetwork):
    """The layers of a block drafter."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.tap_count * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, Attention(config, size, qk_norm=config.qk_norm))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(config)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        return [layer.kv_shape for layer in self.layers if isinstance(layer, DecoderLayer)]

    def decoder(self) -> NativeDecoder | None:
        """The layers as a native pass: it computes `block`, and in its other form `read`."""
        layers = [layer.parts() for layer in self.layers if isinstance(layer, DecoderLayer)]
        return native_decoder(self, self.config, layers, self.norm, self.rotary)

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

    def block(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The normed states [R, B, H] of blocks of tokens [R, B] at positions [R, B]."""
        return self.states(self.embed(tokens), positions, attend)

    def states(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The normed states [R, B, H] of blocks with embeddings [R, B, H] at positions [R, B]."""
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rope, attend)
        out: Tensor = self.norm(hidden)
        return out

    def follow(
        self,
        logits: Tensor,
        states: Tensor,  # noqa: ARG002
        tokens: Tensor,  # noqa: ARG002
        memory: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The logits [R, W, Vd] of what follows tokens [R, W], from a slot's own [R, 1, Vd] and its states [R, 1, H].

        They are [R, 1, Vd] where they are the same after all tokens. `memory` [R, W, M] is what the same call gave for
        the tokens' parents; None at the root. Here a slot doesn't know which tokens come before it.
        """
        return logits, memory

    def joined(self, states: Tensor, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """All that the logits of slots with states [n, D, H] depend on, where tokens [n, D] came before: [n, D, J]."""
        return states

    def joined_logits(self, joined: Tensor) -> Tensor:
        """Logits [..., Vd] of what `joined` gives [..., J]: those that `follow` gives after the same tokens."""
        return self.logits(joined)

    def joined_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters of `joined_logits`; empty if the head is the target's."""
        own = self.lm_head.parameters() if self.config.head == "own" else ()
        return tuple(parameter for parameter in own if parameter.requires_grad)

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:  # noqa: ARG002
        """Logits [...] of how probable it is that guesses after tokens [...] are accepted; None without such a head."""
        return None
