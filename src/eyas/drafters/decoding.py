"""Decoding with a draft network of any kind: what it has read lies in the slot cache, guesses in staging columns.

A network without attention has a cache without layers. Pairs whose row isn't drafted for are deferred: only copied, and
read before the row's next draft.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, W frontier nodes, F staged guesses so
far, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.base import Drafter
from eyas.drafters.levels import HeadLevels, HeadsNetwork, Levels
from eyas.drafters.network import Attend, DraftNetwork
from eyas.errors import UsageError
from eyas.runtime import inference, mapped_copy, to_device
from eyas.targets.attention import RaggedLayout, columns_seen, grouped_attention
from eyas.targets.graphs import Compute, PassGraphs, Record, filled_up, recurring
from eyas.targets.native.decoder import NativeLevels, Staged
from eyas.targets.native.linears import native_guesses
from eyas.targets.slots import Saved, SlotCache
from eyas.tree import DraftTree, Frontier, TreeSpec
from eyas.verify import Coupling

_CHUNK = 512
"""Most deferred pairs that one pass reads, of all rows together."""


class NetworkPairs(NamedTuple):
    """Pairs copied out of a slot: first those that were read, then the deferred ones."""

    read: int
    columns: Saved
    """The cache's columns of the pairs that were read."""
    deferred: tuple[Tensor, Tensor] | None  # tokens [1, n], taps [1, n, A, Ht]

    @property
    def unread(self) -> int:
        return 0 if self.deferred is None else self.deferred[0].shape[1]


class Stage(NamedTuple):
    """Where a pass of the network's modules stages its keys and values, and what it sees there."""

    lengths: Tensor  # [R] pairs that were read
    seen: Tensor  # [R or 1, S, F] bool: which staged columns each sees, besides the row's own pairs
    before: int = 0  # columns of each row that passes before this one staged
    layout: RaggedLayout | None = None  # of rows whose tokens lie end to end
    layer: int = 0  # the slot cache's layer that is the network's first
    first: int = 0  # the first of a row's own pairs that is seen
    end: int | None = None  # the columns that are read, where their number is fixed
    level: int = 0  # of a draft: 0 is that of the root's children
    window: int | None = None  # each sees positions less than so many from its own; None = all


class NetworkDrafter(Drafter):
    """A drafter that runs a network. A pair (state at i, token i + 1) predicts token i + 2."""

    draws = True

    def __init__(self, network: DraftNetwork, taps: tuple[int, ...], record: Record | None = None) -> None:
        """Decode with `network`, which reads the boundaries `taps` of the target. There are no slots yet.

        `record` records its passes, if given.
        """
        self.network = self.module = network
        self.taps, self.default_tree = taps, network.config.default_tree
        self.max_fanout, self.max_depth = network.config.draft_vocab_size, network.config.guesses
        self._ids = network.target_ids
        self._decoder = network.decoder()
        self.record = record
        self.resize(0)

    @property
    def slots(self) -> int:
        return self._cache.slots

    def resize(self, slots: int) -> None:
        dtype, device = self.network.dtype, self._ids.device
        self._cache = SlotCache(self.network.kv_shapes, slots, dtype, device)
        self._cache.graphs = None if self.record is None else PassGraphs(self.record)
        self._deferred = DeferredPairs(slots)
        # the state after each slot's last pair that was read: as it is fed back, and as the head reads it
        self._normed = torch.zeros(slots, self.network.config.hidden_size, dtype=dtype, device=device)
        fed = dtype if self._decoder is None else torch.float32
        self._fed = torch.zeros(slots, self.network.state_size, dtype=fed, device=device)

    @inference
    def reshape(self, slots: int, columns: int) -> None:
        self._cache.reshape(slots, columns)
        self._deferred.reshape(slots)
        more = max(0, slots - self._fed.shape[0])
        self._fed, self._normed = (F.pad(state[:slots], (0, 0, 0, more)) for state in (self._fed, self._normed))

    def length(self, slot: int) -> int:
        return self._cache.lengths[slot] + self._deferred.lengths[slot]

    def unread(self, slot: int) -> int:
        return self._deferred.lengths[slot]

    @inference
    def save(self, slot: int, start: int, stop: int) -> NetworkPairs:
        read = self._cache.lengths[slot]
        between = min(max(read, start), stop)
        columns = self._cache.copy_out(slot, start, between)
        deferred = None if between == stop else self._deferred.copy_out(slot, between - read, stop - read)
        return NetworkPairs(between - start, columns, deferred)

    @inference
    def load(self, slot: int, saved: Any, count: int) -> None:
        read = min(count, saved.read)
        if read:
            if self._deferred.lengths[slot]:
                raise UsageError("pairs that were read can't follow deferred ones")
            self._load_read(slot, saved, read)
        if saved.deferred is not None and count > read:
            tokens, taps = saved.deferred
            self._deferred.append(range(slot, slot + 1), tokens, taps, [count - read])

    def _load_read(self, slot: int, saved: Any, count: int) -> None:
        """Append the first `count` of `saved`, which were read."""
        self._cache.copy_in(slot, saved.columns, count)

    @inference
    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self.catch_up(rows, [count > 0 for count in counts])
        self._read(rows, next_tokens, taps, counts)

    @inference
    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._deferred.append(rows, next_tokens, taps, counts)

    @inference
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        grown = self._ready(rows, drafting)
        if not any(grown):
            return DraftTree.empty(len(rows), self._ids.device)
        # beside copied passages, a tree may be deeper than a network with few heads can guess
        depth, width = min(spec.depth, self.max_depth or spec.depth), 1
        growth = spec.start(len(rows), self._ids.device, None if all(grown) else grown)
        levels = self._start(rows, depth)
        if isinstance(levels, NativeLevels) and levels.can_search:
            search, warp = growth.search, coupling.warp()
            if search is not None and warp is not None:
                return search.finish(levels.search(search, self._ids, warp))
        logits = levels.first()
        for level in range(depth):
            native = self._decoder is not None
            score, tokens = best_children(logits, growth.fanout, coupling, level, self._ids, native)
            if growth.calibrates and levels.sure is not None:
                score = score + levels.sure.unsqueeze(2)
            if score.shape[1] < width:  # the same for all nodes of a level
                score, tokens = score.expand(-1, width, -1), tokens.expand(-1, width, -1)
            frontier = growth.expand(score, tokens)
            if frontier is None:
                break
            if level + 1 < depth:
                width = frontier.tokens.shape[1]
                logits = levels.add(frontier)
        return growth.tree()

    def _start(self, rows: range, depth: int) -> Levels:
        """What runs the levels of a draft `depth` deep."""
        network, normed = self.network, self._normed[rows.start : rows.stop]
        if isinstance(network, HeadsNetwork):
            return HeadLevels(network, normed, depth)
        fed = self._fed[rows.start : rows.stop].unsqueeze(1)  # [R, 1, H]
        if self._decoder is None:
            return ModuleLevels(self, rows, fed, normed)
        return NativeLevels(self._decoder, self._cache, rows, (fed, normed), network.logits)

    def _ready(self, rows: range, drafting: Sequence[bool] | None) -> list[bool]:
        """Read what rows that are `drafting` (None = all) have deferred; [R] which of them can be drafted for."""
        wanted = [True] * len(rows) if drafting is None else list(drafting)
        self.catch_up(rows, wanted)
        # after a one-token prompt there is no state to draft from yet
        return [want and self._cache.lengths[slot] > 0 for want, slot in zip(wanted, rows, strict=True)]

    @inference
    def truncate(self, slot: int, length: int) -> None:
        self._deferred.truncate(slot, max(0, length - self._cache.lengths[slot]))
        self._cache.truncate(slot, length)

    @inference
    def move(self, source: int, target: int) -> None:
        self._cache.move(source, target)
        self._deferred.move(source, target)
        self._fed[target], self._normed[target] = self._fed[source], self._normed[source]

    @inference
    def catch_up(self, rows: range, wanted: Sequence[bool]) -> None:
        counts = [self._deferred.lengths[slot] * want for slot, want in zip(rows, wanted, strict=True)]
        if not any(counts):
            return
        # a row far behind the others, such as one whose prompt was deferred, would widen the passes of all rows
        widest = 2 * sum(counts) / len(rows)
        for row, count in enumerate(counts):
            if count > widest:
                self._read_deferred(rows[row : row + 1], [count])
        self._read_deferred(rows, [count if count <= widest else 0 for count in counts])
        for slot, count in zip(rows, counts, strict=True):
            if count:
                self._deferred.truncate(slot, 0)

    def _read_deferred(self, rows: range, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` deferred pairs of each row, in passes of a limited size."""
        width = max(1, _CHUNK // len(rows))
        for begin in range(0, max(counts), width):
            part = [min(max(count - begin, 0), width) for count in counts]
            self._read(rows, *self._deferred.part(rows, begin, begin + max(part)), part)

    def _read(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read the first `counts[r]` pairs of each row: next_tokens [R, Q], taps [R, Q, A, Ht]."""
        if not any(counts):
            return
        width, layout, (next_tokens, taps) = self._arranged(rows, counts, next_tokens, taps)
        fed, normed = self._run_pairs(rows, next_tokens, self.network.fuse(taps), width, layout)
        self._cache.commit(rows, [range(count) for count in counts])
        before = [row * width for row in range(len(rows))] if layout is None else [0, *accumulate(counts)]
        lasts = [first + count - 1 for first, count in zip(before, counts, strict=False)]
        known = [(slot, last) for slot, last, count in zip(rows, lasts, counts, strict=True) if count]
        slots: Any
        slots, last = known[0] if len(known) == 1 else to_device(known, self._ids.device).unbind(1)
        self._fed[slots], self._normed[slots] = fed[last], normed[last]

    def _arranged(
        self, rows: range, counts: Sequence[int], *pairs: Tensor
    ) -> tuple[int, RaggedLayout | None, list[Tensor]]:
        """The first `counts[r]` of each row's `pairs` [R, Q, ...] as a pass takes them, after its width and layout.

        Rows lie end to end where they differ in length; a recorded pass is a rectangle of a recurring width.
        """
        width = max(counts)
        pairs = tuple(each[:, :width] for each in pairs)
        if self._cache.graphs is not None and self._cache.graphs.takes(len(rows) * width):
            width = max(width, min(recurring(width), self._cache.capacity - self._cache.start(rows)))
            return width, None, [filled_up(each, len(rows), width) for each in pairs]
        if sum(counts) == len(rows) * width:
            return width, None, list(pairs)
        layout = RaggedLayout.of_counts(counts, self._ids.device)
        return width, layout, [layout.gather(each) for each in pairs]

    def _run_pairs(
        self, rows: range, tokens: Tensor, hidden: Tensor, width: int, layout: RaggedLayout | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run up to `width` pairs that follow each row's own, in staging columns: what `DraftNetwork.step` returns.

        Tokens [R, Q] and states [R, Q, H], or end to end in a `layout`; the results are [R * Q, H] in both forms.
        """
        if self._decoder is None:

            def compute(rows: range, end: int | None, lengths: Tensor, *pairs: Tensor) -> tuple[Tensor, Tensor]:
                (tokens, hidden), steps = pairs, torch.arange(width, device=lengths.device)
                positions = lengths.unsqueeze(1) + steps
                stage = Stage(lengths, (steps.unsqueeze(1) >= steps).unsqueeze(0), 0, layout, end=end)
                positions = positions if layout is None else layout.gather(positions)
                return self.network.step(tokens, hidden, positions, self.attend(rows, stage))

            fed, normed = self.run_pass("pairs", rows, (tokens, hidden), compute, width, layout)
            return fed.flatten(0, 1), normed.flatten(0, 1)
        self._cache.reserve(self._cache.start(rows) + width)
        cells = None if layout is None else layout.cell_index
        staged = Staged(rows, width, cells, self._cache.lengths[rows.start : rows.stop], None)
        done = self._decoder.run(self._cache, staged, tokens, hidden.flatten(0, 1), final=True)
        assert done.final is not None
        return done.states, done.final

    def _lengths(self, rows: range) -> Tensor:
        return to_device(self._cache.lengths[rows.start : rows.stop], self._ids.device)

    def run_pass(
        self, kind: Hashable, rows: range, inputs: Sequence[Tensor], compute: Compute, staged: int,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """A pass of the modules up to column `staged` behind each row's pairs: recorded, or else as it is."""
        if self._cache.graphs is not None and layout is None:
            done = self._cache.graphs.run(kind, self._cache, rows, staged, inputs, compute)
            if done is not None:
                return done
        return compute(rows, None, self._lengths(rows), *inputs)

    def run_level(
        self, rows: range, tokens: Tensor, fed: Tensor, positions: Tensor, stage: Stage
    ) -> tuple[Tensor, Tensor]:
        """Run a level's nodes: their states [R, W, H], made of their parents' `fed`, and the logits of what follows."""
        fed, normed = self.network.step(tokens, fed, positions, self.attend(rows, stage))
        return fed, self.network.logits(normed)

    def attend(self, rows: range, stage: Stage) -> Attend:
        """Attention that stages its keys and values where `stage` says."""
        self._cache.reserve(self._cache.start(rows) + stage.seen.shape[2], stage.before)
        width = stage.seen.shape[2] - stage.before
        staging = self._cache.staging(rows, width, stage.before, stage.lengths, stage.end)
        columns = torch.arange(staging.end, device=stage.lengths.device)
        seen, layout = columns_seen(stage.lengths, stage.seen, columns).unsqueeze(1), stage.layout
        if stage.first:
            seen = seen & ((columns >= stage.first) | (columns >= stage.lengths.unsqueeze(1))).view(len(rows), 1, 1, -1)
        if stage.window is not None:
            own = stage.lengths.unsqueeze(1) + torch.arange(width, device=columns.device)  # [R, S]
            seen = seen & ((columns - own.unsqueeze(2)).abs() < stage.window).unsqueeze(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layout is not None:
                q, k, v = layout.pad_heads(q), layout.pad_heads(k), layout.pad_heads(v)
            keys, values = self._cache.write(stage.layer + layer, k, v, staging)
            out = grouped_attention(q, keys, values, seen)  # [R, heads, S, Dv]
            return out if layout is None else layout.gather(out.transpose(1, 2)).transpose(1, 2)

        return attend


def best_children(
    logits: Tensor, fanout: int, coupling: Coupling, level: int, ids: Tensor, native: bool
) -> tuple[Tensor, Tensor]:
    """The best guesses that follow each of W nodes of a `level`: scores and target tokens [R, W, K].

    They are given by `logits` [R, W, Vd], whose tokens are the target's `ids` [Vd]; `native` if they came out of a
    native pass.
    """
    count = min(fanout, logits.shape[2])
    if native and coupling.ranks_by_logits(level):
        return native_guesses(logits, count, ids)
    score, best = coupling.rank(logits, level, ids).topk(count, dim=2)
    return score, ids[best]


class ModuleLevels:
    """The levels of one draft, run by the network's modules."""

    sure: Tensor | None = None

    def __init__(self, drafter: NetworkDrafter, rows: range, fed: Tensor, normed: Tensor) -> None:
        self._drafter, self._rows, self._normed = drafter, rows, normed
        self._level, self._fed = 0, fed  # [R, W, H]
        self._seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=fed.device)  # [R, W, F]

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._drafter.network.logits(self._normed.unsqueeze(1))

    def add(self, frontier: Frontier) -> Tensor:
        """Run the next level's nodes; returns the logits [R, W, Vd] of what follows them."""
        rows, width = len(self._rows), frontier.tokens.shape[1]
        seen, fed = self._seen, self._fed
        # a guess sees the committed pairs, the guesses above it, and itself
        itself = torch.eye(width, dtype=torch.bool, device=fed.device).expand(rows, width, width)
        if width > 1 or fed.shape[1] > 1:  # in a chain every guess follows the one before
            parents = frontier.parents.unsqueeze(2)  # [R, W, 1]
            seen = seen.gather(1, parents.expand(-1, -1, seen.shape[2]))
            fed = fed.gather(1, parents.expand(-1, -1, fed.shape[2]))
        self._seen = torch.cat((seen, itself), dim=2)
        level, before = self._level, self._seen.shape[2] - width

        def compute(rows: range, end: int | None, lengths: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            tokens, fed, seen = given
            positions = (lengths + level).unsqueeze(1).expand(-1, width)
            stage = Stage(lengths, seen, before, level=level, end=end)
            return self._drafter.run_level(rows, tokens, fed, positions, stage)

        inputs = (frontier.tokens, fed, self._seen)
        self._fed, logits = self._drafter.run_pass(("level", level), self._rows, inputs, compute, before + width)
        self._level += 1
        return logits


_HELD = 16
"""Appends that are held until their pairs are sorted by slot, and pairs that one may have to be held."""


class _Piece(NamedTuple):
    """Pairs of a slot that follow each other."""

    tokens: Tensor  # [n]
    taps: Tensor  # [n, A, Ht]

    def part(self, begin: int, end: int) -> _Piece:
        return _Piece(self.tokens[begin:end], self.taps[begin:end])


class DeferredPairs:
    """The pairs of every slot that are yet to be read, in the order in which they came.

    Nothing is copied but the few pairs of plain rounds, some rounds at a time: many are never read, and copying each
    would take several percent of a small target's pass.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._pieces: list[list[_Piece]] = [[] for _ in range(slots)]
        self._held: list[tuple[Tensor, Tensor, list[tuple[int, int]]]] = []
        """Appended, not sorted yet: tokens [n], taps [n, A, Ht], and each pair's slot and index into them."""

    def reshape(self, slots: int) -> None:
        """Change to `slots` slots; those that stay keep their pairs."""
        self._sort()
        added = max(0, slots - len(self.lengths))
        self.lengths = self.lengths[:slots] + [0] * added
        self._pieces = self._pieces[:slots] + [[] for _ in range(added)]

    def append(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Add the first `counts[r]` of next_tokens [R, Q] and taps [R, Q, A, Ht] to each row's slot.

        The tensors are kept as long as pairs of them are, and must not change.
        """
        given = [(row, slot, count) for row, (slot, count) in enumerate(zip(rows, counts, strict=True)) if count]
        for _, slot, count in given:
            self.lengths[slot] += count
        if sum(counts) > _HELD:
            self._sort()
            for row, slot, count in given:
                self._pieces[slot].append(_Piece(next_tokens[row, :count], taps[row, :count]))
        elif given:
            width = next_tokens.shape[1]
            pairs = [(slot, row * width + i) for row, slot, count in given for i in range(count)]
            self._held.append((next_tokens.flatten(), taps.flatten(0, 1), pairs))
            if len(self._held) >= _HELD:
                self._sort()

    def _sort(self) -> None:
        """Give what is held to its slots."""
        if not self._held:
            return
        all_tokens, all_taps, all_pairs = zip(*self._held, strict=True)
        self._held = []
        found: dict[int, list[int]] = defaultdict(list)
        for start, pairs in zip(accumulate(map(len, all_tokens), initial=0), all_pairs, strict=False):
            for slot, index in pairs:
                found[slot].append(start + index)
        order = to_device([index for indices in found.values() for index in indices], all_tokens[0].device)
        tokens, taps = (torch.cat(parts).index_select(0, order) for parts in (all_tokens, all_taps))
        sorted_pairs, start = _Piece(tokens, taps), 0
        for slot, indices in found.items():
            self._pieces[slot].append(sorted_pairs.part(start, start + len(indices)))
            start += len(indices)

    def _parts(self, slot: int, begin: int, end: int) -> Iterator[_Piece]:
        """A slot's pairs [begin, end), in pieces."""
        self._sort()
        for piece in self._pieces[slot]:
            count = len(piece.tokens)
            if begin < count and end > 0:
                yield piece.part(max(begin, 0), end)
            begin, end = begin - count, end - count

    def part(self, rows: range, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The tokens [R, Q] and taps [R, Q, A, Ht] of columns [begin, end); zeros past a row's length."""
        self._sort()
        found = [list(self._parts(slot, begin, end)) for slot in rows]
        some = next((pieces[0] for pieces in found if pieces), None)
        if some is None:
            raise IndexError(f"no slot of {rows} has pairs from {begin} on")
        tokens = some.tokens.new_zeros(len(rows), end - begin)
        taps = some.taps.new_zeros(len(rows), end - begin, *some.taps.shape[1:])
        for row, pieces in enumerate(found):
            at = 0
            for piece in pieces:
                after = at + len(piece.tokens)
                tokens[row, at:after], taps[row, at:after] = piece
                at = after
        return tokens, taps

    def copy_out(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's pairs [begin, end): tokens [1, n], taps [1, n, A, Ht]."""
        tokens, taps = self.part(range(slot, slot + 1), begin, end)
        return tokens, mapped_copy(taps)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        if length < self.lengths[slot]:
            self._keep(slot, 0, length)

    def drop(self, slot: int, count: int) -> None:
        """Forget the first `count` of a slot's pairs."""
        self._keep(slot, count, self.lengths[slot])

    def _keep(self, slot: int, begin: int, end: int) -> None:
        self._pieces[slot] = list(self._parts(slot, begin, end))
        self.lengths[slot] = end - begin

    def move(self, source: int, target: int) -> None:
        """Give a slot's pairs to another, whose own are forgotten."""
        self._sort()
        self._pieces[target], self._pieces[source] = self._pieces[source], []
        self.lengths[target], self.lengths[source] = self.lengths[source], 0
