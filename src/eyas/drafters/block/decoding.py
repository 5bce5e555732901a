"""Decoding with a block drafter: a draft is one pass over a block, however deep the tree that grows from it.

What the target has committed lies in the slot cache as keys and values, made of its states alone. A block is run in
staging columns and forgotten. Slot i's guesses are the children of all nodes at depth i: best-first growth makes trees
of them by their summed log-probability, corrected for each parent where the network can do that (DSpark). Where trees
are sized by what their nodes turned out to be worth, a network's confidence weighs the probabilities of its guesses.

On a CPU a block, and the reading of pairs, are native passes where those compute what the modules do.

P-EAGLE reads and keeps true pairs as EAGLE-3 does, and its block is causal: the same masked pair in every slot after a
row's last true pair.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, B block size, D guesses of a block, W
frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.decoding import NetworkDrafter, Stage, best_children
from eyas.drafters.levels import Levels
from eyas.drafters.network import DraftNetwork
from eyas.runtime import to_device
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import RaggedLayout
from eyas.targets.graphs import Record
from eyas.targets.native.decoder import Staged
from eyas.targets.native.layer_trials import inputs_as_floats
from eyas.tree import DraftTree, Frontier, TreeSpec
from eyas.verify import Coupling

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
            with inputs_as_floats(network, native):
                expected = [self._trial(pairs) for pairs in _TRIAL_PAIRS]
                self._decoder = native
                agree = [
                    logits_agree(self._trial(pairs), states, network.dtype)
                    for pairs, states in zip(_TRIAL_PAIRS, expected, strict=True)
                ]
            if not all(agree):
                pairs = _TRIAL_PAIRS[agree.index(False)]
                _LOG.warning("the block drafter runs its modules: native states differ behind %d pairs", pairs)
                self._decoder = None
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
        levels = _SlotLevels(self.network.logits(self._slots(rows, depth)))
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


class _SlotLevels:
    """The levels of one draft, whose logits [R, D, Vd] are all known."""

    def __init__(self, logits: Tensor) -> None:
        self._logits, self._slot = logits, 0

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._logits[:, :1]

    def add(self, frontier: Frontier) -> Tensor:  # noqa: ARG002
        """The logits [R, 1, Vd] of what follows all of the next level's nodes."""
        self._slot += 1
        return self._logits[:, self._slot : self._slot + 1]
