"""A drafter whose weights are swapped while it serves: every row keeps the generation that it began with.

A swap changes no token: only the target's logits and the sampler's seeded noise decide which tokens are emitted
(`docs/lossless.md`), whichever tree a drafter offers. A drafter's slot must also be consistent, and it is: a single
generation reads, saves, loads and drafts from a row's pairs, from `begin` until the slot is emptied. In a batch with
rows of several generations, each generation drafts in turn, and the trees are merged side by side. Prefixes that
another generation has read aren't loaded: the row reads them again.

Since rows finish with the old generation, a swap needs no pass over the pairs that a row has read, and no copy of its
states.

A client may have generations of its own, which no other client's rows get; the rest share those of the client "".

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, N nodes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.base import Drafter, SlotPairs
from eyas.drafters.decoding import NetworkDrafter
from eyas.engine.prefix_cache import BLOCK
from eyas.runtime import to_device
from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.tree.draft_tree import BeamCandidates
from eyas.types import Owner
from eyas.verify import Coupling


class Recorder(Protocol):
    """Receives the pairs of rows as they are committed. Its methods must not block or raise."""

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner) -> None:
        """A sequence of `owner` starts in a slot."""

    def skip(self, slot: int, count: int) -> None:
        """The slot's next `count` pairs came from the prefix cache, without states."""

    def pairs(self, rows: range, next_tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        """The first `counts[r]` pairs of each row, with the states [R, Q, A + 1, Ht] at all boundaries."""

    def finish(self, slot: int) -> None:
        """The sequence in a slot is complete."""

    def drop(self, slot: int) -> None:
        """The sequence in a slot is discarded."""

    def move(self, source: int, target: int) -> None:
        """A sequence moves to another slot."""


Generation = tuple[str, int]
"""The client that it belongs to ("" = shared), and its number."""


class SavedGenerationPairs(NamedTuple):
    """Pairs that one generation has read or deferred, copied out of a slot."""

    generation: Generation
    pairs: Any
    """As its drafter saved them."""

    @property
    def unread(self) -> int:
        count: int = self.pairs.unread
        return count


class Chooser(Protocol):
    """Chooses the generation of each row and receives its results; a `Canary`, for example."""

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations that it may choose, the one in service first."""

    def choose(self) -> int:
        """The generation of a row that begins."""

    def finished(self, generation: int, tokens: int, rounds: int) -> None:
        """A row of this generation has ended."""


@dataclass
class _SlotState:
    """The state of the sequence in a slot."""

    generation: Generation
    chooser: Chooser
    """The chooser of that generation."""
    tokens: int = 0
    """Tokens of its drafted rounds."""
    rounds: int = 0


class Generations:
    """The drafters that have slots, one per generation, and the choice among them for new rows."""

    def __init__(self, first: int, drafter: NetworkDrafter) -> None:
        self._lock = threading.Lock()
        self._offered: dict[Generation, NetworkDrafter] = {}
        self._choosers: dict[str, Chooser] = {"": _Always(first)}  # by client; replaced as a whole
        self._choosing = self._choosers  # as last taken over by the engine's thread
        self._current = {"": first}  # each client's generation in service, which has slots
        self.drafters: dict[Generation, NetworkDrafter] = {("", first): drafter}

    def fresh(self) -> Generations:
        """The same generations with slots of their own, without pending offers."""
        made = copy.copy(self)
        made._lock = threading.Lock()
        made._offered = {}
        made.drafters = {key: one.fresh() for key, one in self.drafters.items()}
        return made

    @property
    def numbers(self) -> list[int]:
        """The shared generations that have slots here, the default one last."""
        numbers = [number for client, number in self.drafters if not client]
        return sorted(numbers, key=lambda number: number == self._current[""])

    @property
    def begin_state(self) -> _SlotState:
        """The state of a slot that no row has begun in."""
        return _SlotState(("", self._current[""]), self._choosing[""])

    def offer(self, generation: int, drafter: NetworkDrafter, chooser: Chooser | None = None, client: str = "") -> None:
        """From the next row on, also serve this generation: to rows for which `chooser` chooses it, or to all.

        Only rows of `client` get it, and it shares no generation from then on; "" = all clients that share. Callable
        from any thread. The drafter must have the kind and taps of the first.
        """
        with self._lock:
            self._offered[client, generation] = drafter
            self._choosers = {**self._choosers, client: chooser or _Always(generation)}

    def serve_only(self, generation: int, client: str = "") -> None:
        """From the next row on, serve only `generation`, which was given or offered before. For any thread."""
        with self._lock:
            self._choosers = {**self._choosers, client: _Always(generation)}

    def take_over(self, used: Iterable[Generation], slots: int, columns: int) -> None:
        """Make slots for offered generations, and release those that aren't `used` and that no row will get."""
        with self._lock:
            offered = self._offered
            self._offered = {}
            choosers = self._choosers
        if choosers is self._choosing and len(self.drafters) == len(choosers):
            return
        for key, drafter in offered.items():
            if key not in self.drafters:  # else it has slots, for rows that finish with it
                self.drafters[key] = drafter.fresh()
                self.drafters[key].pairs.reshape(slots, columns)
        self._choosing = choosers
        for client, chooser in choosers.items():
            there = [number for number in chooser.generations if (client, number) in self.drafters]
            self._current = {**self._current, client: there[0] if there else self._current[client]}
        wanted = {(client, number) for client, chooser in choosers.items() for number in chooser.generations}
        wanted |= {*used, *self._current.items()}
        self.drafters = {key: one for key, one in self.drafters.items() if key in wanted}

    def choose(self, owner: Owner) -> _SlotState:
        """Choose the generation of a row of `owner` that begins."""
        client = owner.client if owner.client in self._choosing else ""
        chooser = self._choosing[client]
        chosen = client, chooser.choose()
        return _SlotState(chosen if chosen in self.drafters else (client, self._current[client]), chooser)


class GenerationPairs(SlotPairs):
    """Each row's pairs, kept by the generation that the row began with."""

    def __init__(self, generations: Generations, recorder: Recorder | None) -> None:
        self.generations = generations
        self._recorder = recorder
        self.forgets = any(one.pairs.forgets for one in generations.drafters.values())
        self.resize(0)

    def fresh(self) -> GenerationPairs:
        return GenerationPairs(self.generations.fresh(), self._recorder)

    @property
    def slots(self) -> int:
        return len(self.rows)

    def resize(self, slots: int) -> None:
        """Start over with `slots` empty slots; the generation in service stays."""
        for one in self.generations.drafters.values():
            one.pairs.resize(slots)
        self._shape = (slots, 0)
        self.rows = [self.generations.begin_state for _ in range(slots)]

    def reshape(self, slots: int, columns: int) -> None:
        for one in self.generations.drafters.values():
            one.pairs.reshape(slots, columns)
        self._shape = (slots, columns)
        self.rows = [*self.rows[:slots], *(self.generations.begin_state for _ in range(slots - len(self.rows)))]

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner, prediction: Sequence[int] = ()) -> None:
        generations, rows = self.generations, self.rows
        generations.take_over((row.generation for at, row in enumerate(rows) if self.length(at)), *self._shape)
        self.rows = [row if row.generation in generations.drafters else generations.begin_state for row in rows]
        self.rows[slot] = self._begun = generations.choose(owner)
        self._of(slot).begin(slot, prompt, owner, prediction)
        if self._recorder is not None:
            self._recorder.begin(slot, prompt, owner)

    def length(self, slot: int) -> int:
        return self._of(slot).length(slot)

    def unread(self, slot: int) -> int:
        return self._of(slot).unread(slot)

    def kept_from(self, slot: int) -> int:
        return self._of(slot).kept_from(slot)

    def save(self, slot: int, start: int, stop: int) -> SavedGenerationPairs:
        return SavedGenerationPairs(self.rows[slot].generation, self._of(slot).save(slot, start, stop))

    def load(self, slot: int, saved: SavedGenerationPairs, count: int) -> None:
        self._of(slot).load(slot, saved.pairs, count)
        if self._recorder is not None:
            self._recorder.skip(slot, count)

    def whole(self, saved: SavedGenerationPairs) -> bool:
        """Whether saved pairs are complete. Pairs of a released generation aren't, so that they get replaced."""
        drafter = self.generations.drafters.get(saved.generation)
        return drafter is not None and drafter.pairs.whole(saved.pairs)

    def reusable(self, saved: Sequence[SavedGenerationPairs], count: int) -> int:
        """How many of the first `count` pairs were read by the generation of the row that has just begun."""
        own = self._begun.generation
        mine = [*takewhile(lambda one: one.generation == own, saved)]
        if len(mine) < len(saved):
            count = min(count, len(mine) * BLOCK - 1)  # a block of tokens [a, b) holds the pairs [a - 1, b - 1)
        pairs = self.generations.drafters[own].pairs
        return pairs.reusable([one.pairs for one in mine], count) if count > 0 else count

    def truncate(self, slot: int, length: int) -> None:
        self._of(slot).truncate(slot, length)
        if not length and self._recorder is not None:
            self._recorder.drop(slot)

    def move(self, source: int, target: int) -> None:
        self._of(source).move(source, target)
        self.rows[target], self.rows[source] = self.rows[source], self.generations.begin_state
        if self._recorder is not None:
            self._recorder.move(source, target)

    def _of(self, slot: int) -> SlotPairs:
        return self.generations.drafters[self.rows[slot].generation].pairs


class SwapDrafter(Drafter):
    """One generation of a network's drafter, or several while rows of each are in slots.

    Its taps are the network's and the boundary after the final norm, whose states train the next generation.
    """

    draws = True
    pairs: GenerationPairs

    def __init__(self, generation: int, drafter: NetworkDrafter, final: int, recorder: Recorder | None = None) -> None:
        """Begin with this generation; `final` is the target's boundary after the final norm."""
        self.pairs = GenerationPairs(Generations(generation, drafter), recorder)
        self._reads = drafter.taps
        self._recorder = recorder
        self.taps = drafter.taps if final in drafter.taps else (*drafter.taps, final)
        self.max_fanout = drafter.max_fanout
        self.max_depth = drafter.max_depth
        self.default_tree, self.fixed_tree = drafter.default_tree, drafter.fixed_tree
        self._drafted: Sequence[bool] | None = None
        """Which rows had a draft in the round whose pairs come next."""

    @property
    def generations(self) -> Generations:
        return self.pairs.generations

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        drafted = self._drafted
        self._drafted = None
        for slot, drafts, count in zip(rows, drafted or (), counts, strict=False):
            if drafts and count:
                row = self.pairs.rows[slot]
                row.tokens += count
                row.rounds += 1
        self._give(rows, next_tokens, taps, counts, deferring=False)

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self._give(rows, next_tokens, taps, counts, deferring=True)

    def _give(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int], *, deferring: bool) -> None:
        """Give each row's pairs to its generation, to be read now or later."""
        if self._recorder is not None and any(counts):
            self._recorder.pairs(rows, next_tokens, taps, counts)
        states = taps[:, :, : len(self._reads)]
        for drafter, mine in self._by_generation(rows):
            given = [count * own for count, own in zip(counts, mine, strict=True)]
            (drafter.defer if deferring else drafter.observe)(rows, next_tokens, states, given)

    def catch_up(self, rows: range, wanted: Sequence[bool], max_pairs: int | None = None) -> None:
        for drafter, mine in self._by_generation(rows):
            drafter.catch_up(rows, [want and own for want, own in zip(wanted, mine, strict=True)], max_pairs)

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else list(drafting)
        there = self._by_generation(rows)
        parts = [
            (drafter, part)
            for drafter, mine in there
            if any(part := [want and own for want, own in zip(wanted, mine, strict=True)])
        ] or [(there[0][0], wanted)]
        trees = [(drafter.draft(rows, spec, coupling, part), part) for drafter, part in parts]
        return trees[0][0] if len(trees) == 1 else padded_together(trees)

    def verified(self, rows: range, tree: DraftTree, logits: NodeLogits, drafting: Sequence[bool]) -> None:  # noqa: ARG002
        """Note which rows had a draft: their next pairs are the accepted ones."""
        self._drafted = drafting

    def finish(self, slot: int) -> None:
        row = self.pairs.rows[slot]
        row.chooser.finished(row.generation[1], row.tokens, row.rounds)
        if self._recorder is not None:
            self._recorder.finish(slot)

    def _by_generation(self, rows: range) -> list[tuple[NetworkDrafter, list[bool]]]:
        """The drafter of each generation among `rows`, and a mask [R] of the rows that have it."""
        own = [self.pairs.rows[slot].generation for slot in rows]
        return [(self.generations.drafters[key], [one == key for one in own]) for key in dict.fromkeys(own)]


class _Always:
    """Chooses one generation for all rows."""

    def __init__(self, generation: int) -> None:
        self.generations = (generation,)

    def choose(self) -> int:
        return self.generations[0]

    def finished(self, generation: int, tokens: int, rounds: int) -> None:
        """Do nothing, since there is nothing to compare."""


def padded_together(parts: Sequence[tuple[DraftTree, Sequence[bool]]]) -> DraftTree:
    """Merge batches of R trees into one: each row's tree is that of the part whose mask has the row, at most one."""
    width = max(tree.size for tree, _ in parts)
    wide = [_widened(tree, width) for tree, _ in parts]
    device = wide[0].tokens.device
    made = replace(wide[0], valid=wide[0].valid & to_device(list(parts[0][1]), device).unsqueeze(1))
    for tree, (_, mine) in zip(wide[1:], parts[1:], strict=True):
        rows = to_device(list(mine), device).unsqueeze(1)  # [R, 1]
        made = replace(
            made,
            tokens=tree.tokens.where(rows, made.tokens),
            parents=tree.parents.where(rows, made.parents),
            logprob=tree.logprob.where(rows, made.logprob),
            valid=tree.valid.where(rows, made.valid),
            max_depth=max(made.max_depth, tree.max_depth),
            network=replace(made.network, candidates=_joined(made.network.candidates, tree.network.candidates, rows)),
        )
    counts = [tree.counted for tree, _ in parts]
    total = None if None in counts else int(made.valid.sum()) if device.type == "cpu" else None
    return replace(made, shared_ancestors=None, counted=total)


def _widened(tree: DraftTree, width: int) -> DraftTree:
    """The same trees with invalid nodes up to `width`."""
    more = (0, width - tree.size)
    return replace(
        tree,
        tokens=F.pad(tree.tokens, more),
        parents=F.pad(tree.parents, more, value=-1),
        logprob=F.pad(tree.logprob, more),
        valid=F.pad(tree.valid, more),
        shared_ancestors=None,
    )


def _joined(one: BeamCandidates | None, other: BeamCandidates | None, rows: Tensor) -> BeamCandidates | None:
    """The candidates of `rows` [R, 1] from `other`, the rest from `one`; None where they differ in shape."""
    if one is None or other is None:
        return None
    pairs = [*zip(one.scores, other.scores, strict=False), *zip(one.beams, other.beams, strict=False)]
    same = len(one.scores) == len(other.scores) and len(one.beams) == len(other.beams)
    if not same or any(a.shape != b.shape for a, b in pairs):
        return None
    keep: Callable[[Any, Any], Tensor] = lambda a, b: torch.where(rows.to(a.device), b, a)  # noqa: E731
    scores = tuple(keep(a, b) for a, b in zip(one.scores, other.scores, strict=True))
    return BeamCandidates(scores, tuple(keep(a, b) for a, b in zip(one.beams, other.beams, strict=True)))
