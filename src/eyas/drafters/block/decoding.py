"""Block drafters: networks that guess a whole draft in one pass over a block of masked tokens, and decoding with them.

The target's states at some boundaries, fused by `fc` and a norm, are the context: every layer makes its keys and
values of them, and of nothing else. A block is the last token (the anchor) and mask tokens at the positions that
follow. Its slots attend to the context and to each other, in both directions, and each predicts the token at its own
position; where the anchor predicts as well (DSpark), each slot predicts the token after it. DFlash is arXiv 2602.06036.
P-EAGLE reads and keeps true pairs as EAGLE-3 does, and its block is causal: the same masked pair in every slot after a
row's last true pair.

The context lies in the slot cache; a block is run in staging columns and forgotten. Slot i's guesses are the children
of all nodes at depth i: best-first growth makes trees of them by their summed log-probability, corrected for each
parent where the network can do that (DSpark). Where trees are sized by what their nodes turned out to be worth, a
network's confidence weighs the probabilities of its guesses. On a CPU a block, and the reading of pairs, are native
passes where those compute what the modules do.

Shapes: R rows (a contiguous range of slots), S positions, Q pairs, A taps, Ht target hidden, H draft hidden, B block
size, D guesses of a block, W frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.config import MOST_TAPS, GroupedConfig, MaskedConfig
from eyas.drafters.decoding import NetworkDrafter, Stage, best_children
from eyas.drafters.levels import Levels, SlotLevels
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
from eyas.runtime import to_device
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import RaggedLayout
from eyas.targets.graphs import Record
from eyas.targets.native.decoder import NativeDecoder, Staged
from eyas.targets.taps import spread_taps
from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Coupling

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

    def decoder(self) -> NativeDecoder | None:
        """The layers as a native pass: it computes `block`, and in its other form `read`."""
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


_LOG = logging.getLogger("eyas")
_TRIAL_PAIRS = 3, 300
"""What rows have read in the two trials of native blocks: few pairs, and more than most windows."""


class BlockDrafter(NetworkDrafter):
    """A drafter that guesses all tokens of a block at once."""

    network: BlockNetwork

    def __init__(self, network: BlockNetwork, taps: tuple[int, ...], record: Record | None = None) -> None:
        super().__init__(network, taps, record)
        native, self._decoder = self._decoder, None
        if native is not None:
            expected = [self._trial(pairs) for pairs in _TRIAL_PAIRS]
            self._decoder = native
            for pairs, states in zip(_TRIAL_PAIRS, expected, strict=True):
                if not logits_agree(self._trial(pairs), states, network.dtype):
                    _LOG.warning("the block drafter runs its modules: native states differ behind %d pairs", pairs)
                    self._decoder = None
                    break
        self.resize(0)

    @torch.inference_mode()
    def _trial(self, pairs: int) -> Tensor:
        """The states of the blocks of two rows, of which one has read so many pairs and the other one less."""
        self.resize(2)
        config, rows = self.network.config, range(2)
        shape, device = (2, pairs, config.tap_count, config.target_hidden_size), self._ids.device
        taps = torch.linspace(-3.0, 5.0, math.prod(shape), device=device).cos().to(self.network.dtype).view(shape)
        self._read(rows, self._ids[:1].expand(2, pairs), taps, [pairs, pairs - 1])
        return self._run_block(rows)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        # the last token of each slot: its own state isn't known yet, and a block begins with it
        self._anchors = torch.zeros(slots, dtype=torch.int64, device=self._ids.device)

    @torch.inference_mode()
    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self._anchors = F.pad(self._anchors[:slots], (0, max(0, slots - len(self._anchors))))

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._anchors[target] = self._anchors[source]

    @torch.inference_mode()
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        grown = self._ready(rows, drafting)
        if not any(grown):
            return DraftTree.empty(len(rows), self._ids.device)
        growth = spec.start(len(rows), self._ids.device, None if all(grown) else grown)
        depth = min(spec.depth, self.network.config.guesses)
        network, native = self.network, self._decoder is not None
        states = self._run_block(rows)[:, :depth]  # [R, D, H]
        logits = network.logits(states)  # [R, D, Vd]
        tokens, memory = self._anchors[rows.start : rows.stop].unsqueeze(1), None  # [R, W]
        for level in range(depth):
            slot, width = slice(level, level + 1), tokens.shape[1]
            following, memory = network.follow(logits[:, slot], states[:, slot], tokens, memory)
            score, children = best_children(following, growth.fanout, coupling, level, self._ids, native)
            sure = network.confidence(states[:, slot].expand(-1, width, -1), tokens) if growth.calibrates else None
            if sure is not None:  # the guesses are drawn from its distribution only as far as that is the target's
                score = score + F.logsigmoid(sure.float()).unsqueeze(2)
            frontier = growth.expand(score.expand(-1, width, -1), children.expand(-1, width, -1))
            if frontier is None:
                break
            tokens = frontier.tokens
            if memory is not None:
                memory = memory.gather(1, frontier.parents.unsqueeze(2).expand(-1, -1, memory.shape[2]))
        return growth.tree()

    def _run_block(self, rows: range) -> Tensor:
        """The states [R, D, H] of the slots that guess, in each row's next block."""
        config = self.network.config
        anchors = self._anchors[rows.start : rows.stop].unsqueeze(1)
        tokens = F.pad(anchors, (0, config.block_size - 1), value=config.mask_token_id)  # [R, B]
        self._cache.reserve(self._cache.start(rows) + config.block_size)
        if self._decoder is not None:
            staged = Staged(rows, config.block_size, None, self._cache.lengths[rows.start : rows.stop], None)
            final = self._decoder.run(self._cache, staged, tokens, final=True, blocks=True).final
            assert final is not None
            return self._guessing(final.view(*tokens.shape, -1))

        def compute(rows: range, end: int | None, lengths: Tensor, tokens: Tensor) -> tuple[Tensor]:
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            seen = torch.ones(1, len(steps), len(steps), dtype=torch.bool, device=tokens.device)
            attend = self.attend(rows, Stage(lengths, seen, end=end))
            return (self.network.block(tokens, lengths.unsqueeze(1) + steps, attend),)

        return self._guessing(self.run_pass("block", rows, (tokens,), compute, tokens.shape[1])[0])

    def _guessing(self, states: Tensor) -> Tensor:
        """The states [R, D, H] of the slots that guess, of those of all slots [R, B, H]."""
        return states if self.network.config.sample_from_anchor else states[:, 1:]

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        if not any(counts):
            return
        width, layout, (taps,) = self._arranged(rows, counts, taps)
        context = self.network.fuse(taps)
        self._cache.reserve(self._cache.start(rows) + width)
        if self._decoder is not None:
            cells = None if layout is None else layout.cell_index
            staged = Staged(rows, width, cells, self._cache.lengths[rows.start : rows.stop], None)
            self._decoder.read(self._cache, staged, context.flatten(0, 1))
        else:
            self._run_read(rows, width, context, layout)
        self._cache.commit(rows, [range(count) for count in counts])
        last = to_device([max(0, count - 1) for count in counts], taps.device).unsqueeze(1)
        kept = self._anchors[rows.start : rows.stop]
        changed = to_device([count > 0 for count in counts], taps.device)
        torch.where(changed, next_tokens.gather(1, last).squeeze(1), kept, out=kept)

    def _run_read(self, rows: range, width: int, context: Tensor, layout: RaggedLayout | None) -> None:
        """Stage what the modules make of fused states: [R, width, H], or end to end in a `layout`."""

        def compute(rows: range, end: int | None, lengths: Tensor, context: Tensor) -> tuple[()]:
            positions = lengths.unsqueeze(1) + torch.arange(width, device=context.device)
            staging = self._cache.staging(rows, width, 0, lengths, end)

            def store(layer: int, keys: Tensor, values: Tensor) -> None:
                if layout is not None:
                    keys, values = layout.pad_heads(keys), layout.pad_heads(values)
                self._cache.write(layer, keys, values, staging)

            self.network.read(context, positions if layout is None else layout.gather(positions), store)
            return ()

        self.run_pass("pairs", rows, (context,), compute, width, layout)


class ParallelDrafter(NetworkDrafter):
    """A drafter whose network has a masked pair (P-EAGLE)."""

    @torch.inference_mode()
    def __init__(self, network: DraftNetwork, taps: tuple[int, ...], record: Record | None = None) -> None:
        super().__init__(network, taps, record)
        pair = network.masked_pair()
        assert pair is not None
        self._masked = pair._replace(state=pair.state.to(network.dtype))  # the same in every draft

    def _start(self, rows: range, depth: int) -> tuple[Levels, Tensor]:
        logits = self.network.logits(self._slots(rows, depth))
        levels = SlotLevels(lambda slot, _: logits[:, slot : slot + 1])
        return levels, levels.first()

    def _slots(self, rows: range, depth: int) -> Tensor:
        """The states [R, D, H] that the head reads in each row's next `depth` slots."""
        known = self._normed[rows.start : rows.stop].unsqueeze(1)
        count, more = len(rows), depth - 1
        if not more:
            return known
        tokens = torch.full((count, more), self._masked.token, device=self._ids.device)
        _, normed = self._run_pairs(rows, tokens, self._masked.state.expand(count, more, -1), more)
        return torch.cat((known, normed.view(count, more, -1)), dim=1)
