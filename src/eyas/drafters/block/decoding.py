"""Decoding with a block drafter: a draft is one pass over a block, however deep the tree that grows from it.

The slot cache holds keys and values of committed positions, computed from the target's states alone. A block runs in
staging columns and is discarded. Slot i's guesses are the children of all nodes at depth i. Best-first growth makes
trees of them by summed log-probability, corrected for each path where the network can do that. Where trees are sized by
the measured acceptance of their nodes, the network's confidence scales the probabilities of its guesses.

On a CPU, blocks and the reading of pairs run as native passes if those compute what the modules do.

P-EAGLE reads and keeps true pairs as EAGLE-3 does. Its block is causal: the same masked pair in every slot after a
row's last true pair.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, B block size, D guesses of a block, W
frontier nodes, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import Block, BlockNetwork, LayerView
from eyas.drafters.decoding import NetworkPairs, Proposer, arranged, shaped_as, staged_end, staged_pairs
from eyas.drafters.levels import DraftLogits, Levels, logits_of_node
from eyas.drafters.network import (
    Attend,
    DraftNetwork,
    RecordedView,
    StagedPass,
    WindowView,
    by_layer,
    run_pass,
    staged_attention,
)
from eyas.runtime import inference, to_device
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import RaggedLayout
from eyas.targets.draft_kernels import DraftPass, UnreadLogits
from eyas.targets.native.decoder import Staged
from eyas.targets.native.layer_trials import inputs_as_floats
from eyas.targets.slots import SlotCache
from eyas.tree import Frontier

_LOG = logging.getLogger("eyas")
_TRIAL_PAIRS = 3, 300
"""How many pairs the rows have read in the two trials of native blocks: few, and more than most windows."""


class BlockProposer(Proposer):
    """Guesses all tokens of a block in one pass.

    A block begins with the last known token, whose own state isn't known yet; `normed` is the fused state before it.
    """

    network: BlockNetwork

    def __init__(self, network: BlockNetwork) -> None:
        super().__init__(network)
        native = self.decoder
        self.decoder = None
        if native is not None:
            with inputs_as_floats(network, native):
                expected = [self._trial(count) for count in _TRIAL_PAIRS]
                self.decoder = native
                agree = [
                    logits_agree(self._trial(count), states, network.dtype)
                    for count, states in zip(_TRIAL_PAIRS, expected, strict=True)
                ]
            if not all(agree):
                count = _TRIAL_PAIRS[agree.index(False)]
                _LOG.warning("the block drafter runs its modules: native states differ after %d pairs", count)
                self.decoder = None

    @inference
    def _trial(self, count: int) -> Tensor:
        """The states of two rows' blocks after the first row has read `count` pairs and the second `count` - 1."""
        pairs = NetworkPairs(self.network)
        rows = range(2)
        config = self.network.config
        pairs.resize(2)
        shape = 2, count, config.tap_count, config.target_hidden_size
        taps = torch.linspace(-3.0, 5.0, math.prod(shape), device=pairs.device).cos().to(self.network.dtype).view(shape)
        self.read(pairs, rows, self.network.target_ids[:1].expand(2, count), taps, [count, count - 1])
        return self.run_block(pairs, rows).states

    def levels(self, pairs: NetworkPairs, rows: range, depth: int, within: RecordedView | None = None) -> Levels:
        block = self.run_block(pairs, rows, within)
        logits = self.logits(block.guesses(depth))
        if isinstance(logits, UnreadLogits) and self.network.corrects:
            logits = logits.read()
        return BlockLevels(self.network, block, logits)

    def run_block(self, pairs: NetworkPairs, rows: range, within: RecordedView | None = None) -> Block:
        """Run each row's next block: its last token, then masked slots."""
        config = self.network.config
        cache = pairs.cache
        chosen = slice(rows.start, rows.stop)
        last = pairs.last[chosen] - 1
        anchors = last[:, 1:].clamp(min=0)
        before = last[:, :1].where(last[:, :1] >= 0, anchors)
        tokens = F.pad(anchors, (0, config.block_size - 1), value=config.mask_token_id)  # [R, B]
        cache.reserve(cache.start(rows) + config.block_size)
        if self.decoder is not None:
            staged = Staged(rows, config.block_size, None, cache.lengths[rows.start : rows.stop], None)
            run = self.decoder.run(cache, staged, tokens, final=True, blocks=not config.causal)
            assert run.final is not None
            states = run.final.view(*tokens.shape, -1)
        else:
            compute = partial(self._run_modules, cache)
            (states,) = run_pass(cache, "block", rows, (tokens,), compute, config.block_size, within=within)
        return Block(states, torch.cat((before, anchors), dim=1), pairs.normed[chosen], config.first)

    def _run_modules(
        self, cache: SlotCache, rows: range, end: int | None, lengths: Tensor, tokens: Tensor
    ) -> tuple[Tensor]:
        network = self.network
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        every = torch.ones(1, len(steps), len(steps), dtype=torch.bool, device=tokens.device)
        anchors = lengths.unsqueeze(1)
        positions = anchors + steps
        if self.kernels is not None:
            end = staged_end(cache, rows, len(steps), end)
            done = self.kernels.run(cache, DraftPass(rows, lengths, positions, anchors, end), tokens, None)
            return (shaped_as(tokens, done)[1],)

        def attend_in(view: LayerView) -> Attend:
            sight = None if view.window is None else WindowView(view.window, positions, anchors)
            seen = every.tril() if view.causal else every
            return staged_attention(cache, rows, StagedPass(lengths, seen, end=end, sight=sight))

        return (network.states(network.embed(tokens), positions, by_layer(network.config.views, attend_in)),)

    def read(self, pairs: NetworkPairs, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        cache = pairs.cache
        width, layout, (given,) = arranged(cache, rows, counts, taps)
        context = self.fuse(given)
        if self.decoder is not None:
            self.decoder.stage(cache, staged_pairs(cache, rows, width, layout), context.flatten(0, 1))
        else:
            cache.reserve(cache.start(rows) + width)
            self._run_read(cache, rows, width, context, layout)
        cache.commit(rows, [range(count) for count in counts])
        begins = [row * width for row in range(len(rows))] if layout is None else [0, *accumulate(counts[:-1])]
        read, begin = to_device([list(counts), begins], taps.device).unsqueeze(2)  # [R, 1]
        chosen = slice(rows.start, rows.stop)
        known = torch.cat((pairs.last[chosen], next_tokens + 1), dim=1)  # a row that reads nothing keeps its two tokens
        pairs.last[chosen] = known.gather(1, read + torch.arange(2, device=taps.device))
        latest = context.flatten(0, 1)[(begin + read - 1).clamp(min=0).squeeze(1)]
        pairs.normed[chosen] = torch.where(read > 0, latest, pairs.normed[chosen])

    def _run_read(
        self, cache: SlotCache, rows: range, width: int, context: Tensor, layout: RaggedLayout | None
    ) -> None:
        """Stage keys and values that the modules compute from fused states [R, width, H], or rows in a `layout`."""

        def compute(rows: range, end: int | None, lengths: Tensor, context: Tensor) -> tuple[()]:
            positions = lengths.unsqueeze(1) + torch.arange(width, device=context.device)
            if self.kernels is not None:
                ends = staged_end(cache, rows, width, end)
                self.kernels.stage(cache, DraftPass(rows, lengths, positions, positions, ends, layout=layout), context)
                return ()
            staging = cache.staging(rows, width, 0, lengths, end)

            def store(layer: int, keys: Tensor, values: Tensor) -> None:
                if layout is not None:
                    keys = layout.pad_heads(keys)
                    values = layout.pad_heads(values)
                cache.write(layer, keys, values, staging)

            self.network.read(context, positions if layout is None else layout.gather(positions), store)
            return ()

        run_pass(cache, "pairs", rows, (context,), compute, width, layout)


class BlockLevels:
    """The levels of one draft, all guessed by one block."""

    def __init__(self, network: BlockNetwork, block: Block, logits: DraftLogits) -> None:
        """`logits` [R, D, Vd] are those of the block's guesses, as tensors if the network corrects them."""
        self._network = network
        self._block = network.begin(block)
        self._logits = logits
        # [R, W]
        self._slot = -1
        self._tokens = self._block.known[:, 1:]
        self._memory: Tensor | None = None  # [R, W, m]

    @property
    def sure(self) -> Tensor | None:
        """[R, W] log-probability that guesses from the last logits are accepted; None if the network can't tell."""
        states = self._block.guess(self._slot).expand(-1, self._tokens.shape[1], -1)
        sure = self._network.confidence(states, self._tokens)
        return None if sure is None else F.logsigmoid(sure.float())

    def first(self) -> DraftLogits:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._after()

    def add(self, frontier: Frontier) -> DraftLogits:
        """The logits of what follows the next level's nodes: [R, W, Vd], or [R, 1, Vd] where all have the same."""
        if self._memory is not None:
            above = frontier.parents.unsqueeze(2).expand(-1, -1, self._memory.shape[2])
            self._memory = self._memory.gather(1, above)
        self._tokens = frontier.tokens
        return self._after()

    def _after(self) -> DraftLogits:
        self._slot += 1
        network = self._network
        block = self._block
        logits = logits_of_node(self._logits, self._slot)
        latent, self._memory = network.follow(block, self._slot, self._tokens, self._memory)
        return logits if latent is None or isinstance(logits, UnreadLogits) else network.corrected(logits, latent)


class ParallelProposer(Proposer):
    """Guesses with a network that has a masked pair (P-EAGLE)."""

    @inference
    def __init__(self, network: DraftNetwork) -> None:
        super().__init__(network)
        pair = network.masked_pair()
        assert pair is not None
        self._masked = pair._replace(state=pair.state.to(network.dtype))  # the same in every draft

    def levels(self, pairs: NetworkPairs, rows: range, depth: int, within: RecordedView | None = None) -> Levels:
        return _SlotLevels(self.logits(self.masked_states(pairs, rows, depth, within)))

    def masked_states(self, pairs: NetworkPairs, rows: range, depth: int, within: RecordedView | None = None) -> Tensor:
        """The states [R, D, H] that the head reads in each row's next `depth` slots."""
        known = pairs.normed[rows.start : rows.stop].unsqueeze(1)
        count = len(rows)
        more = depth - 1
        if not more:
            return known
        tokens = torch.full((count, more), self._masked.token, device=known.device)
        given = tokens, self._masked.state.expand(count, more, -1)
        return torch.cat((known, self.run_guesses(pairs, rows, *given, within)), dim=1)


class _SlotLevels:
    """The levels of one draft whose logits [R, D, Vd] are all known."""

    sure: Tensor | None = None

    def __init__(self, logits: DraftLogits) -> None:
        self._logits = logits
        self._slot = 0

    def first(self) -> DraftLogits:
        """The logits [R, 1, Vd] of what follows the roots."""
        return logits_of_node(self._logits, 0)

    def add(self, frontier: Frontier) -> DraftLogits:  # noqa: ARG002
        """The logits [R, 1, Vd] of what follows all of the next level's nodes."""
        self._slot += 1
        return logits_of_node(self._logits, self._slot)
