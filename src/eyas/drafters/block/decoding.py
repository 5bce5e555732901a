"""Decoding with a block drafter: a draft is one pass over a block, however deep the tree that grows from it.

What the target has committed lies in the slot cache as keys and values, made of its states alone. A block is run in
staging columns and forgotten. Slot i's guesses are the children of all nodes at depth i: best-first growth makes trees
of them by their summed log-probability, corrected for each path where the network can do that. Where trees are sized by
what their nodes turned out to be worth, a network's confidence weighs the probabilities of its guesses.

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
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import Block, BlockNetwork
from eyas.drafters.decoding import NetworkDrafter, NetworkPairs, Stage
from eyas.drafters.levels import Levels
from eyas.drafters.network import DraftNetwork
from eyas.runtime import inference, to_device
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import RaggedLayout
from eyas.targets.graphs import Record
from eyas.targets.native.decoder import Staged
from eyas.targets.native.layer_trials import inputs_as_floats
from eyas.tree import Frontier

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

    @inference
    def _trial(self, pairs: int) -> Tensor:
        """The states of the blocks of two rows, of which one has read so many pairs and the other one less."""
        self.resize(2)
        config, rows = self.network.config, range(2)
        shape, device = (2, pairs, config.tap_count, config.target_hidden_size), self._ids.device
        taps = torch.linspace(-3.0, 5.0, math.prod(shape), device=device).cos().to(self.network.dtype).view(shape)
        self._read(rows, self._ids[:1].expand(2, pairs), taps, [pairs, pairs - 1])
        return self._run_block(rows).states

    def resize(self, slots: int) -> None:
        super().resize(slots)
        # the last two tokens of each slot, -1 where they aren't known: a block begins with the very last, whose own
        # state isn't known yet; `_normed` is the fused state before it
        self._last = torch.full((slots, 2), -1, dtype=torch.int64, device=self._ids.device)

    @inference
    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self._last = F.pad(self._last[:slots], (0, 0, 0, max(0, slots - len(self._last))), value=-1)

    @inference
    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:  # noqa: ARG002
        """The first pair has the prompt's second token; the one before it is known from here alone."""
        self._last[slot, 1] = prompt[0] if prompt else -1

    @inference
    def load(self, slot: int, saved: NetworkPairs, count: int) -> None:
        super().load(slot, saved, count)
        self._last[slot] = -1

    @inference
    def truncate(self, slot: int, length: int) -> None:
        if length < self.length(slot):
            self._last[slot] = -1
        super().truncate(slot, length)

    @inference
    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._last[target] = self._last[source]

    def _start(self, rows: range, depth: int) -> Levels:
        return BlockLevels(self.network, self._run_block(rows), depth)

    def _run_block(self, rows: range) -> Block:
        """Run each row's next block: its last token, then masked slots."""
        config, chosen = self.network.config, slice(rows.start, rows.stop)
        anchors = self._last[chosen, 1:].clamp(min=0)
        before = self._last[chosen, :1].where(self._last[chosen, :1] >= 0, anchors)
        tokens = F.pad(anchors, (0, config.block_size - 1), value=config.mask_token_id)  # [R, B]
        self._cache.reserve(self._cache.start(rows) + config.block_size)
        if self._decoder is not None:
            staged = Staged(rows, config.block_size, None, self._cache.lengths[rows.start : rows.stop], None)
            run = self._decoder.run(self._cache, staged, tokens, final=True, blocks=not config.causal)
            assert run.final is not None
            states = run.final.view(*tokens.shape, -1)
        else:
            (states,) = self.run_pass("block", rows, (tokens,), self._run_modules, config.block_size)
        return Block(states, torch.cat((before, anchors), dim=1), self._normed[chosen], config.first)

    def _run_modules(self, rows: range, end: int | None, lengths: Tensor, tokens: Tensor) -> tuple[Tensor]:
        network, steps = self.network, torch.arange(tokens.shape[1], device=tokens.device)
        seen = torch.ones(1, len(steps), len(steps), dtype=torch.bool, device=tokens.device)
        seen = seen.tril() if network.config.causal else seen
        attend = self.attend(rows, Stage(lengths, seen, end=end, window=network.config.sliding_window))
        return (network.states(network.embed(tokens), lengths.unsqueeze(1) + steps, attend),)

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        if not any(counts):
            return
        width, layout, (arranged,) = self._arranged(rows, counts, taps)
        context = self.network.fuse(arranged)
        self._cache.reserve(self._cache.start(rows) + width)
        if self._decoder is not None:
            cells = None if layout is None else layout.cell_index
            staged = Staged(rows, width, cells, self._cache.lengths[rows.start : rows.stop], None)
            self._decoder.read(self._cache, staged, context.flatten(0, 1))
        else:
            self._run_read(rows, width, context, layout)
        self._cache.commit(rows, [range(count) for count in counts])
        begins = [row * width for row in range(len(rows))] if layout is None else [0, *accumulate(counts[:-1])]
        read, begin = to_device([list(counts), begins], taps.device).unsqueeze(2)  # [R, 1]
        chosen = slice(rows.start, rows.stop)
        known = torch.cat((self._last[chosen], next_tokens), dim=1)  # a row that reads nothing keeps its first two
        self._last[chosen] = known.gather(1, read + torch.arange(2, device=taps.device))
        latest = context.flatten(0, 1)[(begin + read - 1).clamp(min=0).squeeze(1)]
        self._normed[chosen] = torch.where(read > 0, latest, self._normed[chosen])

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


class BlockLevels:
    """The levels of one draft, all of which one block guesses."""

    def __init__(self, network: BlockNetwork, block: Block, depth: int) -> None:
        self._network, self._block = network, network.begin(block)
        self._logits = network.logits(self._block.guesses(depth))  # [R, D, Vd]
        self._slot, self._tokens = -1, self._block.known[:, 1:]  # [R, W]
        self._memory: Tensor | None = None  # [R, W, m]

    @property
    def sure(self) -> Tensor | None:
        """[R, W] the logarithm of how probable it is that the last logits are the target's; None if nobody knows."""
        states = self._block.guess(self._slot).expand(-1, self._tokens.shape[1], -1)
        sure = self._network.confidence(states, self._tokens)
        return None if sure is None else F.logsigmoid(sure.float())

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._after()

    def add(self, frontier: Frontier) -> Tensor:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""
        if self._memory is not None:
            above = frontier.parents.unsqueeze(2).expand(-1, -1, self._memory.shape[2])
            self._memory = self._memory.gather(1, above)
        self._tokens = frontier.tokens
        return self._after()

    def _after(self) -> Tensor:
        self._slot += 1
        network, block, logits = self._network, self._block, self._logits[:, self._slot : self._slot + 1]
        latent, self._memory = network.follow(block, self._slot, self._tokens, self._memory)
        return logits if latent is None else network.corrected(logits, latent)


class ParallelDrafter(NetworkDrafter):
    """A drafter whose network has a masked pair (P-EAGLE)."""

    @inference
    def __init__(self, network: DraftNetwork, taps: tuple[int, ...], record: Record | None = None) -> None:
        super().__init__(network, taps, record)
        pair = network.masked_pair()
        assert pair is not None
        self._masked = pair._replace(state=pair.state.to(network.dtype))  # the same in every draft

    def _start(self, rows: range, depth: int) -> Levels:
        return _SlotLevels(self.network.logits(self._slots(rows, depth)))

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

    sure: Tensor | None = None

    def __init__(self, logits: Tensor) -> None:
        self._logits, self._slot = logits, 0

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._logits[:, :1]

    def add(self, frontier: Frontier) -> Tensor:  # noqa: ARG002
        """The logits [R, 1, Vd] of what follows all of the next level's nodes."""
        self._slot += 1
        return self._logits[:, self._slot : self._slot + 1]
