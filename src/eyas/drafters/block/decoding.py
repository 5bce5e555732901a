"""Decoding with a block drafter: a draft is one pass over a block, however deep the tree that grows from it.

What the target has committed lies in the slot cache as keys and values, made of its states alone. A block is run in
staging columns and forgotten. Slot i's guesses are the children of all nodes at depth i: best-first growth makes trees
of them by their summed log-probability, corrected for each parent where the network can do that (DSpark).

P-EAGLE reads and keeps true pairs as EAGLE-3 does, and its block is causal: the same masked pair in every slot after a
row's last true pair.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, B block size, D guesses of a block, W
frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.decoding import Levels, NetworkDrafter, Stage, best_children
from eyas.drafters.network import DraftNetwork
from eyas.runtime import to_device
from eyas.targets.attention import RaggedLayout
from eyas.tree import DraftTree, Frontier, TreeSpec
from eyas.verify import Coupling


class BlockDrafter(NetworkDrafter):
    """A drafter that guesses all tokens of a block at once."""

    network: BlockNetwork

    @property
    def max_depth(self) -> int:
        return self.network.config.guesses

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
        depth = min(spec.depth, self.max_depth)
        states = self._run_block(rows)[:, :depth]  # [R, D, H]
        logits = self.network.logits(states)  # [R, D, Vd]
        tokens, memory = self._anchors[rows.start : rows.stop].unsqueeze(1), None  # [R, W]
        for level in range(depth):
            slot = slice(level, level + 1)
            following, memory = self.network.follow(logits[:, slot], states[:, slot], tokens, memory)
            frontier = growth.expand(*best_children(following, growth.fanout, coupling, level, self._ids, False))
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
        steps = torch.arange(config.block_size, device=tokens.device)
        lengths, start = self._lengths(rows), self._cache.start(rows)
        seen = torch.ones(1, len(steps), len(steps), dtype=torch.bool, device=tokens.device)
        self._cache.reserve(start + len(steps))
        attend = self._attend(rows, Stage(lengths, seen, start, start))
        states = self.network.block(tokens, lengths.unsqueeze(1) + steps, attend)
        return states if config.sample_from_anchor else states[:, 1:]

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        width = max(counts)
        if not width:
            return
        start, taps = self._cache.start(rows), taps[:, :width]
        positions = self._lengths(rows).unsqueeze(1) + torch.arange(width, device=taps.device)
        layout = None if sum(counts) == taps.shape[0] * width else RaggedLayout.of_counts(counts, taps.device)
        if layout is not None:
            taps, positions = layout.gather(taps), layout.gather(positions)
        self._cache.reserve(start + width)

        def store(layer: int, keys: Tensor, values: Tensor) -> None:
            if layout is not None:
                keys, values = layout.pad_heads(keys), layout.pad_heads(values)
            self._cache.write(layer, keys, values, rows, start)

        self.network.read(self.network.fuse(taps), positions, store)
        self._cache.commit(rows, [range(count) for count in counts])
        last = to_device([max(0, count - 1) for count in counts], taps.device).unsqueeze(1)
        kept = self._anchors[rows.start : rows.stop]
        changed = to_device([count > 0 for count in counts], taps.device)
        torch.where(changed, next_tokens.gather(1, last).squeeze(1), kept, out=kept)


class ParallelDrafter(NetworkDrafter):
    """A drafter whose network has a masked pair (P-EAGLE)."""

    @torch.inference_mode()
    def __init__(self, network: DraftNetwork, taps: tuple[int, ...]) -> None:
        super().__init__(network, taps)
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
