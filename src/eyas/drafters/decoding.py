"""Decoding with a draft network of any kind: pairs that were read lie in the slot cache, guesses in staging columns.

A network without attention has a cache without layers. Pairs of rows that aren't drafting are deferred: only copied,
and read before the row's next draft.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, W frontier nodes, F staged guesses so
far, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.base import DeferredPairs, Drafter, SlotPairs
from eyas.drafters.levels import DraftLogits, HeadLevels, HeadsNetwork, Levels
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
from eyas.drafters.window.layers import SlidingWindow
from eyas.errors import UsageError
from eyas.runtime import inference, to_device
from eyas.targets.attention import RaggedLayout
from eyas.targets.draft_kernels import DraftKernels, DraftPass, UnreadLogits
from eyas.targets.graphs import Compute, PassGraphs, Record, filled_up
from eyas.targets.native.decoder import DraftStart, NativeDecoder, Staged, TargetStates
from eyas.targets.native.levels import NativeLevels
from eyas.targets.native.ops import native_guesses
from eyas.targets.shapes import recurring
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree, Frontier, Growth, TreeSpec
from eyas.types import Owner
from eyas.verify import Coupling, Warp

_CHUNK = 512
"""Maximum number of deferred pairs that one pass reads, over all rows."""
_MAX_SPLIT_PAIRS = 16
"""Up to this many pairs, one pass over all is faster than one for all but each row's last, and another for those."""


class SavedNetworkPairs(NamedTuple):
    """Pairs copied out of a slot: first those that were read, then the deferred ones."""

    start: int
    """The index of the first pair in its row."""
    read: int
    columns: Any
    """The cache columns of the pairs that were read."""
    deferred: tuple[Tensor, Tensor] | None  # tokens [1, n], taps [1, n, A, Ht]

    @property
    def unread(self) -> int:
        return 0 if self.deferred is None else self.deferred[0].shape[1]


class NetworkPairs(SlotPairs):
    """The pairs that a network has read, as columns of a slot cache, and its deferred pairs."""

    def __init__(self, network: DraftNetwork, fed: torch.dtype | None = None, record: Record | None = None) -> None:
        """Create pairs without slots for `network`, whose states are fed back in the dtype `fed` (None = its own).

        `record`, if given, records passes over the cache.
        """
        self.shapes = network.kv_shapes
        self.dtype = network.dtype
        self.device = network.target_ids.device
        self._sizes = network.state_size, network.config.hidden_size
        self._fed_dtype = fed or self.dtype
        self.record = record
        self._target: weakref.ref[SlotCache] | None = None  # borrowed: its bytes aren't the drafter's
        self.resize(0)

    @property
    def target(self) -> SlotCache | None:
        """The target's cache over the same slots; None until an engine attaches it."""
        return None if self._target is None else self._target()

    @property
    def slots(self) -> int:
        return self.cache.slots

    def attach(self, cache: SlotCache) -> None:
        self._target = weakref.ref(cache)

    def resize(self, slots: int) -> None:
        self.cache = self.make_cache(slots)
        if self.record is not None:
            self.cache.graphs, self.cache.drafts = PassGraphs(self.record), PassGraphs(self.record)
        self.deferred = DeferredPairs(slots)
        fed, normed = self._sizes
        self.fed = torch.zeros(slots, fed, dtype=self._fed_dtype, device=self.device)
        """[slots, S] the state to feed back after each slot's last pair that was read."""
        self.normed = torch.zeros(slots, normed, dtype=self.dtype, device=self.device)
        """[slots, H] the same state in the form that the head reads."""
        self.last = torch.zeros(slots, 2, dtype=torch.int64, device=self.device)
        """[slots, 2] the ids of the last two tokens plus 1, for networks that read them again; 0 = unknown."""

    def make_cache(self, slots: int) -> SlotCache:
        """An empty cache for the columns of pairs."""
        return SlotCache(self.shapes, slots, self.dtype, self.device)

    @inference
    def reshape(self, slots: int, columns: int) -> None:
        self.cache.reshape(slots, columns)
        self.deferred.reshape(slots)
        more = max(0, slots - self.fed.shape[0])
        kept = (self.fed, self.normed, self.last)
        self.fed, self.normed, self.last = (F.pad(state[:slots], (0, 0, 0, more)) for state in kept)
        if self.cache.drafts is not None:  # recorded drafts read the tensors just replaced
            self.cache.drafts.clear()

    @inference
    def begin(
        self,
        slot: int,
        prompt: Sequence[int],
        owner: Owner,  # noqa: ARG002
        prediction: Sequence[int] = (),  # noqa: ARG002
    ) -> None:
        """Keep the prompt's first token: the pairs begin with the second."""
        self.last[slot, 1] = prompt[0] + 1 if prompt else 0

    def length(self, slot: int) -> int:
        return self.cache.length(slot) + self.deferred.lengths[slot]

    def unread(self, slot: int) -> int:
        return self.deferred.lengths[slot]

    @inference
    def save(self, slot: int, start: int, stop: int) -> SavedNetworkPairs:
        read = self.cache.length(slot)
        between = min(max(read, start), stop)
        deferred = None if between == stop else self.deferred.copy_out(slot, between - read, stop - read)
        return SavedNetworkPairs(start, between - start, self.copy_out(slot, start, between), deferred)

    @inference
    def load(self, slot: int, saved: Any, count: int) -> None:
        read = min(count, saved.read)
        self.last[slot] = 0
        if read:
            if self.deferred.lengths[slot]:
                raise UsageError("pairs that were read can't follow deferred ones")
            self.copy_in(slot, saved, read)
        if saved.deferred is not None and count > read:
            tokens, taps = saved.deferred
            self.deferred.append(range(slot, slot + 1), tokens, taps, [count - read])

    def copy_out(self, slot: int, start: int, stop: int) -> Any:
        """A copy of the cached columns of a row's pairs `[start, stop)`."""
        return self.cache.copy_out(slot, start, stop)

    def copy_in(self, slot: int, saved: SavedNetworkPairs, count: int) -> None:
        """Append the first `count` pairs of `saved`, which were read."""
        self.cache.copy_in(slot, saved.columns, count)

    @inference
    def truncate(self, slot: int, length: int) -> None:
        if length < self.length(slot):
            self.last[slot] = 0
        read = self.cache.length(slot)
        self.cache.truncate(slot, length)
        self.deferred.truncate(slot, max(0, length - read))

    def parts(self, rows: range, counts: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:  # noqa: ARG002
        """Split the rows' next `counts` pairs into passes: each pass's first pair, and its number of pairs by row."""
        if any(counts):
            yield 0, counts

    def forget(self, slot: int, read: Callable[[list[int]], None], now: bool) -> None:  # noqa: ARG002
        """Forget those deferred pairs of a slot that it would drop as soon as they were read.

        `read` reads a given number of the first ones. With `now` the rest is read right after this; otherwise pairs may
        wait until there are many.
        """
        return

    @inference
    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.deferred.move(source, target)
        for state in (self.fed, self.normed, self.last):
            state[target] = state[source]


class Proposer:
    """Runs a network to read pairs and to guess what follows them. It is stateless: all state lies in the pairs."""

    kernels: DraftKernels | None = None
    """Run its passes and its head on a GPU instead of the modules; see `eyas.drafters.kernels`."""

    def __init__(self, network: DraftNetwork) -> None:
        self.network = network
        self.decoder = network.decoder()
        """Its layers as one native pass that replaces the modules; None = the modules run."""

    def levels(self, pairs: NetworkPairs, rows: range, depth: int, within: RecordedView | None = None) -> Levels:
        """The levels of a draft of `depth` levels; `within` is given while a draft is recorded."""
        network = self.network
        if isinstance(network, HeadsNetwork):
            return HeadLevels(network, pairs.normed[rows.start : rows.stop], depth)
        if self.kernels is not None:
            return KernelLevels(self.kernels, pairs, rows, within)
        if self.decoder is None:
            return ModuleLevels(self, pairs, rows, within)
        return NativeLevels(self.decoder, pairs.cache, rows, (pairs.fed, pairs.normed), network.logits)

    def read(self, pairs: NetworkPairs, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row, at least one in all: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        early = [max(0, count - 1) for count in counts]
        if self.decoder is not None and sum(early) > _MAX_SPLIT_PAIRS:  # only a row's last pair is drafted from
            self._stage(self.decoder, pairs, rows, next_tokens, taps, early)
            final = torch.arange(len(rows), device=taps.device), to_device(early, taps.device)
            next_tokens = next_tokens[final].unsqueeze(1)
            taps = taps[final].unsqueeze(1)
            counts = [min(count, 1) for count in counts]
        width, layout, (next_tokens, taps) = arranged(pairs.cache, rows, counts, next_tokens, taps)
        before = [row * width for row in range(len(rows))] if layout is None else [0, *accumulate(counts)]
        lasts = [first + count - 1 for first, count in zip(before, counts, strict=False)]
        known = [(slot, last) for slot, last, count in zip(rows, lasts, counts, strict=True) if count]
        if self.decoder is not None:
            staged = staged_pairs(pairs.cache, rows, width, layout)
            start = DraftStart(pairs.fed, pairs.normed, known)
            self.decoder.read(pairs.cache, staged, next_tokens, self._states(self.decoder, taps), start)
        else:
            fed, normed = self.run_pairs(pairs, rows, next_tokens, self.fuse(taps), width, layout)
            slots, last = to_device(known, taps.device).unbind(1)
            pairs.fed[slots] = fed[last]
            pairs.normed[slots] = normed[last]
        pairs.cache.commit(rows, [range(count) for count in counts])

    def _stage(
        self,
        decoder: NativeDecoder,
        pairs: NetworkPairs,
        rows: range,
        next_tokens: Tensor,
        taps: Tensor,
        counts: Sequence[int],
    ) -> None:
        """Commit the keys and values of the first `counts[r]` pairs of each row, without states to draft from."""
        cache = pairs.cache
        width, layout, (next_tokens, taps) = arranged(cache, rows, counts, next_tokens, taps)
        staged = staged_pairs(cache, rows, width, layout)
        decoder.read(cache, staged, next_tokens, self._states(decoder, taps), None)
        cache.commit(rows, [range(count) for count in counts])

    def fuse(self, taps: Tensor) -> Tensor:
        """The states [R, Q, H] of pairs with `taps` [R, Q, A, Ht]."""
        return self.network.fuse(taps) if self.kernels is None else self.kernels.fuse(taps)

    def logits(self, states: Tensor) -> DraftLogits:
        """The logits [R, W, Vd] of states [R, W, H] that the head reads."""
        return self.network.logits(states) if self.kernels is None else UnreadLogits(states, self.kernels)

    def _states(self, decoder: NativeDecoder, taps: Tensor) -> Tensor | TargetStates:
        """The states [R, Q, H] of pairs with `taps` [R, Q, A, Ht], or what the decoder makes them of."""
        return TargetStates(taps) if decoder.fuses else self.network.fuse(taps)

    def run_pairs(
        self,
        pairs: NetworkPairs,
        rows: range,
        tokens: Tensor,
        hidden: Tensor,
        width: int,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run up to `width` pairs after each row's own, in staging columns; returns what `DraftNetwork.step` does.

        Tokens [R, Q] and states [R, Q, H], or concatenated rows in a `layout`; the results are [R * Q, H] either way.
        """
        return self._run(pairs.cache, rows, (tokens, hidden), width, layout, guesses=False)

    def run_guesses(
        self, pairs: NetworkPairs, rows: range, tokens: Tensor, hidden: Tensor, within: RecordedView | None = None
    ) -> Tensor:
        """Run the pairs [R, Q] of guesses that each follow the one before; the states [R, Q, H] that the head reads."""
        count, width = tokens.shape
        if within is None:
            _, normed = self._run(pairs.cache, rows, (tokens, hidden), width, None, guesses=True)
        else:
            _, normed = self.pairs_pass(pairs.cache, width, guesses=True)(rows, *within, tokens, hidden)
        return normed.view(count, width, -1)

    def _run(
        self,
        cache: SlotCache,
        rows: range,
        given: tuple[Tensor, Tensor],
        width: int,
        layout: RaggedLayout | None,
        guesses: bool,
    ) -> tuple[Tensor, Tensor]:
        if self.decoder is None:
            compute = self.pairs_pass(cache, width, layout, guesses)
            fed, normed = run_pass(cache, "guesses" if guesses else "pairs", rows, given, compute, width, layout)
            return fed.flatten(0, 1), normed.flatten(0, 1)
        staged = staged_pairs(cache, rows, width, layout)._replace(guesses=guesses)
        done = self.decoder.run(cache, staged, *given, final=True)
        assert done.final is not None
        return done.states, done.final

    def pairs_pass(
        self, cache: SlotCache, width: int, layout: RaggedLayout | None = None, guesses: bool = False
    ) -> Compute:
        """The computation of `run_pairs`, or `run_guesses`, on tokens and states where it runs the modules."""

        def compute(rows: range, end: int | None, lengths: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            (tokens, hidden), steps = given, torch.arange(width, device=lengths.device)
            positions = lengths.unsqueeze(1) + steps
            # a pair that is read may be a row's last one: the first guess would follow it
            first = lengths.unsqueeze(1) if guesses else positions + 1
            if self.kernels is not None:
                at = DraftPass(rows, lengths, positions, first, staged_end(cache, rows, width, end), layout=layout)
                return shaped_as(tokens, self.kernels.run(cache, at, tokens, hidden))
            stage = StagedPass(lengths, (steps.unsqueeze(1) >= steps).unsqueeze(0), 0, layout, end=end)
            attend = self.attention(cache, rows, stage, positions, first)
            positions = positions if layout is None else layout.gather(positions)
            return self.network.step(tokens, hidden, positions, attend)

        return compute

    def run_level(
        self, cache: SlotCache, rows: range, tokens: Tensor, fed: Tensor, positions: Tensor, stage: StagedPass
    ) -> tuple[Tensor, Tensor]:
        """Run a level's nodes on their parents' states `fed`: the nodes' states [R, W, H], and the next logits."""
        attend = self.attention(cache, rows, stage, positions, stage.lengths.unsqueeze(1))
        fed, normed = self.network.step(tokens, fed, positions, attend)
        return fed, self.network.logits(normed)

    def attention(self, cache: SlotCache, rows: range, stage: StagedPass, positions: Tensor, first: Tensor) -> Attend:
        """Attention of tokens at `positions` [R, S], in the window of each layer; see `WindowView` for `first`."""

        def attend_in(window: SlidingWindow | None) -> Attend:
            sight = None if window is None else WindowView(window, positions, first)
            return staged_attention(cache, rows, stage._replace(sight=sight))

        return by_layer(self.network.layer_windows or (None,), attend_in)


class NetworkDrafter(Drafter):
    """A drafter with a network. A pair (state at i, token i + 1) predicts token i + 2."""

    draws = True
    pairs: NetworkPairs

    def __init__(self, proposer: Proposer, taps: tuple[int, ...], pairs: NetworkPairs) -> None:
        """Decode with `proposer`, whose network reads the boundaries `taps` of the target."""
        self.proposer = proposer
        self.pairs = pairs
        self.taps = taps
        self.network = self.module = proposer.network
        config = self.network.config
        self.default_tree = config.default_tree
        self.fixed_tree = self.network.fixed_tree
        self.max_fanout = config.draft_vocab_size
        self.max_depth = config.guesses
        self._ids = self.network.target_ids
        self._shapes: dict[TreeSpec, tuple[int, Tensor | None]] = {}
        """Depth and shared ancestors of the trees whose growth is recorded."""

    @inference
    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self.catch_up(rows, [count > 0 for count in counts])
        self._read(rows, next_tokens, taps, counts)

    @inference
    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self.pairs.deferred.append(rows, next_tokens, taps, counts)
        if self.pairs.forgets:
            self._forget(rows)

    @inference
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        grown = self._ready(rows, drafting)
        if not any(grown):
            return DraftTree.empty(len(rows), self._ids.device)
        replayed = self._replayed(rows, spec, coupling)
        if replayed is not None:
            return replayed.only(grown)
        levels = self.proposer.levels(self.pairs, rows, self._depth(spec))
        among = None if all(grown) else grown
        if isinstance(levels, NativeLevels) and levels.can_search:
            search = spec.search(len(rows), among)
            if search is not None and (warp := coupling.warp()) is not None:
                return search.finish(levels.search(search, self._ids, warp))
        return self._grow(levels, spec.start(len(rows), self._ids.device, among), self._depth(spec), coupling)

    def _depth(self, spec: TreeSpec) -> int:
        """The number of levels to draft: with copied passages, a tree may be deeper than the network can guess."""
        return min(spec.depth, self.max_depth or spec.depth)

    def _replayed(self, rows: range, spec: TreeSpec, coupling: Coupling) -> DraftTree | None:
        """The trees of all rows, from one recorded computation of passes and growth; None if it can't be recorded."""
        cache = self.pairs.cache
        if cache.drafts is None or not spec.recurs or self.proposer.decoder is not None:
            return None
        if (warp := coupling.warp()) is None:
            return None
        tokens = max(spec.columns, self.network.config.guesses or 0) + 1
        cache.reserve(cache.start(rows) + tokens)
        missing = tuple(part is None for part in warp)

        def compute(rows: range, end: int | None, lengths: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            parts = iter(given)
            its = Warp._make(None if absent else next(parts) for absent in missing)
            within = None if end is None else RecordedView(end, lengths)
            growth = spec.start(len(rows), self._ids.device)
            tree = self._grow(
                self.proposer.levels(self.pairs, rows, self._depth(spec), within), growth, self._depth(spec), its
            )
            self._shapes[spec] = tree.max_depth, tree.shared_ancestors
            return tree.tokens, tree.parents, tree.logprob

        given = [part for part in warp if part is not None]
        done = cache.drafts.run((spec, missing), cache, rows, tokens, given, compute, len(rows) * tokens)
        if done is None:
            return None
        found, parents, logprob = done
        depth, ancestors = self._shapes[spec]
        valid = torch.ones_like(found, dtype=torch.bool)
        return DraftTree(found, parents, logprob, valid, depth, ancestors, counted=found.numel())

    def _grow(self, levels: Levels, growth: Growth, depth: int, ranking: Coupling | Warp) -> DraftTree:
        """Grow trees level by level; `ranking` ranks the children."""
        logits = levels.first()
        width = 1
        for level in range(depth):
            native = self.proposer.decoder is not None
            score, tokens = best_children(logits, growth.fanout, ranking, level, self._ids, native)
            if growth.calibrates and levels.sure is not None:
                score = score + levels.sure.unsqueeze(2)
            if score.shape[1] < width:  # all nodes of the level have the same children
                score = score.expand(-1, width, -1)
                tokens = tokens.expand(-1, width, -1)
            frontier = growth.expand(score, tokens)
            if frontier is None:
                break
            if level + 1 < depth:
                width = frontier.tokens.shape[1]
                logits = levels.add(frontier)
        return growth.tree()

    def _ready(self, rows: range, drafting: Sequence[bool] | None) -> list[bool]:
        """Read the deferred pairs of the `drafting` rows (None = all); [R] which of these rows can draft."""
        wanted = [True] * len(rows) if drafting is None else list(drafting)
        self.catch_up(rows, wanted)
        # after a one-token prompt there is no state to draft from yet
        return [want and self.pairs.cache.lengths[slot] > 0 for want, slot in zip(wanted, rows, strict=True)]

    @inference
    def catch_up(self, rows: range, wanted: Sequence[bool], max_pairs: int | None = None) -> None:
        if self.pairs.forgets:
            self._forget([slot for slot, want in zip(rows, wanted, strict=True) if want], now=True)
        counts = [self.pairs.unread(slot) * want for slot, want in zip(rows, wanted, strict=True)]
        if max_pairs is not None:
            counts = [min(count, max_pairs) for count in counts]
        if not any(counts):
            return
        # a row far behind the others, such as one with a deferred prompt, would widen the passes of all rows
        widest = 2 * sum(counts) / len(rows)
        for row, count in enumerate(counts):
            if count > widest:
                self._read_deferred(rows[row : row + 1], [count])
        self._read_deferred(rows, [count if count <= widest else 0 for count in counts])
        for slot, count in zip(rows, counts, strict=True):
            if count:
                self.pairs.deferred.drop(slot, count)

    def _forget(self, slots: Iterable[int], *, now: bool = False) -> None:
        """Let slots forget the pairs that they would drop as soon as they were read; see `NetworkPairs.forget`."""
        for slot in slots:
            self.pairs.forget(slot, partial(self._read_deferred, range(slot, slot + 1)), now)

    def _read_deferred(self, rows: range, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` deferred pairs of each row, in passes of at most `_CHUNK` pairs."""
        width = max(1, _CHUNK // len(rows))
        for begin in range(0, max(counts), width):
            part = [min(max(count - begin, 0), width) for count in counts]
            self._read(rows, *self.pairs.deferred.part(rows, begin, begin + max(part)), part)

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        for begin, part in self.pairs.parts(rows, counts):
            end = begin + max(part)
            self.proposer.read(self.pairs, rows, next_tokens[:, begin:end], taps[:, begin:end], part)


def arranged(
    cache: SlotCache, rows: range, counts: Sequence[int], *pairs: Tensor
) -> tuple[int, RaggedLayout | None, list[Tensor]]:
    """The width and layout of a pass over the first `counts[r]` of each row's `pairs` [R, Q, ...], and its inputs.

    Rows of different lengths are concatenated; a recorded pass is a rectangle of a recurring width.
    """
    width = max(counts)
    pairs = tuple(each[:, :width] for each in pairs)
    if cache.graphs is not None and cache.graphs.takes(len(rows) * width):
        width = max(width, min(recurring(width), cache.capacity - cache.start(rows)))
        return width, None, [filled_up(each, len(rows), width) for each in pairs]
    if sum(counts) == len(rows) * width:
        return width, None, list(pairs)
    layout = RaggedLayout.of_counts(counts, pairs[0].device)
    return width, layout, [layout.gather(each) for each in pairs]


def staged_pairs(cache: SlotCache, rows: range, width: int, layout: RaggedLayout | None) -> Staged:
    """Room for a native pass over up to `width` pairs after each row's own, as `arranged` lays them out."""
    cache.reserve(cache.start(rows) + width)
    cells = None if layout is None else layout.cell_index
    return Staged(rows, width, cells, cache.lengths[rows.start : rows.stop], None)


def best_children(
    logits: DraftLogits, fanout: int, ranking: Coupling | Warp, level: int, ids: Tensor, native: bool
) -> tuple[Tensor, Tensor]:
    """The best children of each of W nodes at a `level`: scores and target tokens [R, W, K].

    They are taken from `logits` [R, W, Vd], whose columns stand for the target's `ids` [Vd]. `native`: the logits come
    from a native pass.
    """
    if isinstance(logits, UnreadLogits):
        warp = ranking if isinstance(ranking, Warp) else ranking.warp()
        if warp is not None and logits.kernels.ranks:
            return logits.kernels.best(logits.states, min(fanout, len(ids)), warp, level, ids)
        logits = logits.read()
    count = min(fanout, logits.shape[2])
    if native and isinstance(ranking, Coupling) and ranking.ranks_by_logits(level):
        return native_guesses(logits, count, ids)
    score, best = ranking.rank(logits, level, ids).topk(count, dim=2)
    return score, ids[best]


class ModuleLevels:
    """The levels of one draft, run by the network's modules."""

    sure: Tensor | None = None

    def __init__(
        self, proposer: Proposer, pairs: NetworkPairs, rows: range, within: RecordedView | None = None
    ) -> None:
        self._proposer = proposer
        self._cache = pairs.cache
        self._rows = rows
        self._within = within
        self._normed = pairs.normed[rows.start : rows.stop]
        # [R, W, H]
        self._level = 0
        self._fed = pairs.fed[rows.start : rows.stop].unsqueeze(1)
        self._seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=self._fed.device)  # [R, W, F]

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._proposer.network.logits(self._normed.unsqueeze(1))

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, Vd] of what follows them."""
        rows = len(self._rows)
        width = frontier.tokens.shape[1]
        seen, fed = self._seen, self._fed
        # a guess sees the committed pairs, the guesses above it, and itself
        itself = torch.eye(width, dtype=torch.bool, device=fed.device).expand(rows, width, width)
        if width > 1 or fed.shape[1] > 1:  # in a chain a guess's parent is the one before it
            parents = frontier.parents.unsqueeze(2)  # [R, W, 1]
            seen = seen.gather(1, parents.expand(-1, -1, seen.shape[2]))
            fed = fed.gather(1, parents.expand(-1, -1, fed.shape[2]))
        self._seen = torch.cat((seen, itself), dim=2)
        level = self._level
        before = self._seen.shape[2] - width

        def compute(rows: range, end: int | None, lengths: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            tokens, fed, seen = given
            positions = (lengths + level).unsqueeze(1).expand(-1, width)
            stage = StagedPass(lengths, seen, before, level=level, end=end)
            return self._proposer.run_level(self._cache, rows, tokens, fed, positions, stage)

        inputs = (frontier.tokens, fed, self._seen)
        self._fed, logits = run_pass(
            self._cache, ("level", level), self._rows, inputs, compute, before + width, within=self._within
        )
        self._level += 1
        return logits


class KernelLevels:
    """The levels of one draft, run by kernels on a GPU."""

    sure: Tensor | None = None

    def __init__(
        self, kernels: DraftKernels, pairs: NetworkPairs, rows: range, within: RecordedView | None = None
    ) -> None:
        self._kernels = kernels
        self._cache = pairs.cache
        self._rows = rows
        self._within = within
        self._normed = pairs.normed[rows.start : rows.stop]
        self._fed = pairs.fed[rows.start : rows.stop].unsqueeze(1)  # [R, W, H]
        self._paths: Tensor | None = None  # [R, W, P] staged columns; None = a chain so far
        self._level = 0
        self._staged = 0

    def first(self) -> UnreadLogits:
        """The logits [R, 1, Vd] of what follows the roots."""
        return UnreadLogits(self._normed.unsqueeze(1), self._kernels)

    def add(self, frontier: Frontier) -> UnreadLogits:
        """Run the next level's nodes; returns the logits [R, W, Vd] of what follows them."""
        count, width = frontier.tokens.shape
        before = self._staged
        level = self._level
        fed = self._fed
        if width > 1 or fed.shape[1] > 1:
            parents = frontier.parents.unsqueeze(2)  # [R, W, 1]
            own = torch.arange(before, before + width, device=fed.device).view(1, -1, 1).expand(count, -1, -1)
            above = self._paths
            if above is None:
                above = torch.arange(before, device=fed.device).expand(count, 1, -1)
            self._paths = torch.cat((above.gather(1, parents.expand(-1, -1, level)), own), dim=2)
            fed = fed.gather(1, parents.expand(-1, -1, fed.shape[2]))

        def compute(rows: range, end: int | None, lengths: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            tokens, fed, *paths = given
            positions = (lengths + level).unsqueeze(1).expand(-1, width)
            ends = staged_end(self._cache, rows, before + width, end, before)
            at = DraftPass(rows, lengths, positions, lengths.unsqueeze(1), ends, next(iter(paths), None), before)
            return shaped_as(tokens, self._kernels.run(self._cache, at, tokens, fed))

        inputs = (frontier.tokens, fed, *(() if self._paths is None else (self._paths,)))
        kind = ("level", level, before)
        self._fed, normed = run_pass(
            self._cache, kind, self._rows, inputs, compute, before + width, within=self._within
        )
        self._level += 1
        self._staged += width
        return UnreadLogits(normed, self._kernels)


def staged_end(cache: SlotCache, rows: range, staged: int, end: int | None, kept: int = 0) -> int:
    """The end of the columns of a pass that stages up to column `staged` behind each row's own: `end` if it is fixed.

    Makes room for them, and keeps the `kept` columns that earlier passes staged.
    """
    cache.reserve(cache.start(rows) + staged, kept)
    return cache.start(rows) + staged if end is None else end


def shaped_as(tokens: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """States [T, H] in the shape of their `tokens`."""
    fed, normed = states
    return fed.view(*tokens.shape, -1), normed.view(*tokens.shape, -1)
