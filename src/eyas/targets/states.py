"""Recurrent states of the sequences in a slot cache, and the order in which a pass updates them.

A recurrent layer mixes every token into a state, and a token can't be removed again. So a pass only reads committed
states. It first runs the tokens that are always kept (a prompt's, a tree's roots) one after the other and stages
each row's state after them. A tree's guesses continue from there, level by level. Their states are dropped as soon as
the next level is done; only their inputs are staged. Committing runs the guesses of the accepted path through the same
steps once more. So committed states are bit-identical to those of plain decoding, and a tree needs memory for the
states of two levels in one layer, not for the states of every node in every layer.

A slot may keep copies of its states at earlier positions (`StateCopies`), from which other sequences with the same
prefix continue.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, T tokens of a pass, W tokens of a level, I inner
nodes of a level (those with children).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.errors import CacheMemoryError, InvariantError
from eyas.runtime import inference, mapped_zeros, out_of_memory_as, to_device
from eyas.targets.attention import RaggedLayout
from eyas.targets.transformers_names import Numbered, layers_of
from eyas.tree import DraftTree

_MAX_LEVEL_TOKENS = 6
"""Maximum number of guesses whose states are computed together: a step makes several copies of each state."""


class StateKey(NamedTuple):
    """Identifies a state, in the terms of transformers' cache."""

    layer: int
    kind: str
    """`conv` (the last inputs of a convolution) or `recurrent`."""
    number: int


class StateShape(NamedTuple):
    """Size and dtype of a state of one sequence."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the state takes for one sequence."""
        return math.prod(self.size) * self.dtype.itemsize


States = Mapping[StateKey, Tensor]
CopiesWanted = Mapping[int, Sequence[tuple[int, int]]]
"""Index of a next token (from 0) -> rows to copy after it, each with the number of tokens that it then has."""


class Level(NamedTuple):
    """Tokens of a pass whose states can be computed together."""

    tokens: Tensor  # [W] int64, indexes into the pass's T tokens
    above: Tensor  # [W] int64, the state each continues from: a row's, or an inner node's of the level above
    inner: Tensor | None = None  # [I] int64, which of the W guesses have children; None = none


class StepsOfPass(Protocol):
    """What a recurrent layer does with the tokens of one pass."""

    def prepared(self) -> AbstractContextManager[None]:
        """A context in which levels can be run: the layer computes with the inputs staged for the pass."""

    def __call__(self, tokens: Tensor, states: LevelStates) -> Tensor:
        """Return the outputs [W, H] of a level's `tokens` [W], and update its `states`."""


@dataclass(frozen=True)
class StatePath:
    """The order in which a recurrent layer runs the tokens of a pass, and the state that each continues from."""

    # A verification pass over the tokens [r0, a, b, c, r1, d], numbered from 0: a and b follow r0, c follows a, and d
    # follows r1. The states of `inner` nodes are handed down, those of b, c and d are dropped.
    #   sure     [tokens [0, 4], above [0, 1]]                     the roots, from their rows' committed states
    #   guesses  [tokens [1, 2, 5], above [0, 0, 1], inner [0]]    a, b and d, from the states after the roots
    #            [tokens [3], above [0]]                           c, from the first inner state: a's
    rows: range
    counts: Sequence[int]  # [R] number of a row's leading columns that are always kept
    indexes: Sequence[Sequence[int]]  # [R][Q] index of the pass's token in each column
    sure: Sequence[Level]  # of the tokens that are always kept; each continues from its row's state
    guesses: Sequence[Sequence[Level]] = ()  # each level in parts; the first one continues from the rows' states

    @property
    def steps(self) -> int:
        """Number of times that a layer's step runs."""
        return len(self.sure) + sum(map(len, self.guesses))

    @staticmethod
    def of_prompts(rows: range, counts: Sequence[int], layout: RaggedLayout | None, device: torch.device) -> StatePath:
        """The path of a pass over prompts: the first `counts[r]` columns of each row."""
        indexes = token_indexes(len(rows), max(counts), layout)
        taken = [index[:count] for index, count in zip(indexes, counts, strict=True)]
        return StatePath(rows, counts, indexes, _sequential_levels(taken, device))

    @staticmethod
    def of_trees(rows: range, tree: DraftTree, layout: RaggedLayout | None, device: torch.device) -> StatePath:
        """The path of a pass over roots, which are always kept, and their trees' valid nodes. Waits for the device."""
        indexes = token_indexes(len(rows), 1 + tree.size, layout)
        roots = _sequential_levels([index[:1] for index in indexes], device)
        guesses = _tree_levels(tree.parents.tolist(), tree.valid.tolist(), indexes, device) if tree.size else []
        return StatePath(rows, [1] * len(rows), indexes, roots, guesses)


def token_indexes(rows: int, width: int, layout: RaggedLayout | None) -> list[list[int]]:
    """[R][Q] index of the pass's token in each column."""
    if layout is None:
        return [list(range(row * width, (row + 1) * width)) for row in range(rows)]
    found: list[list[int]] = layout.token_index.tolist()
    return found


def _sequential_levels(tokens: Sequence[Sequence[int]], device: torch.device) -> list[Level]:
    """Levels that take each row's `tokens` one after the other."""
    found = []
    for number in range(max(map(len, tokens))):
        there = [row for row, of_row in enumerate(tokens) if number < len(of_row)]
        found.append(Level(*to_device([[tokens[row][number] for row in there], there], device)))
    return found


def _tree_levels(
    parents: Sequence[Sequence[int]],
    valid: Sequence[Sequence[bool]],
    indexes: Sequence[Sequence[int]],
    device: torch.device,
) -> list[list[Level]]:
    """The levels of the trees' valid nodes, in parts of at most `_MAX_LEVEL_TOKENS`."""
    levels: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (row, node)
    depths: dict[tuple[int, int], int] = {}
    followed = set()
    for row, of_row in enumerate(parents):
        for node, parent in enumerate(of_row):
            if valid[row][node]:
                depths[row, node] = depths.get((row, parent), -1) + 1
                levels[depths[row, node]].append((row, node))
                followed.add((row, parent))
    positions = {(row, -1): row for row in range(len(parents))}  # of the nodes with children, in the level above
    made: list[list[Level]] = []
    for depth in range(len(levels)):
        made.append([])
        inner: list[tuple[int, int]] = []
        for start in range(0, len(levels[depth]), _MAX_LEVEL_TOKENS):
            part = levels[depth][start : start + _MAX_LEVEL_TOKENS]
            indexed = [indexes[row][node + 1] for row, node in part]
            upon = [positions[row, parents[row][node]] for row, node in part]
            gone_on_from = [at for at, one in enumerate(part) if one in followed]
            inner += [part[at] for at in gone_on_from]
            tokens, above = to_device([indexed, upon], device)
            made[-1].append(Level(tokens, above, to_device(gone_on_from, device) if gone_on_from else None))
        positions = {one: position for position, one in enumerate(inner)}
    return made


class SlotStates(ABC):
    """The recurrent states of the sequences in a cache's slots: zeros where no token has been read yet."""

    def __init__(self, slots: int) -> None:
        self.copies = StateCopies(slots)
        self.path: StatePath | None = None
        """The path of the pass that is running, or has run but isn't committed yet."""
        self._lengths: Sequence[int] = ()  # [R] number of tokens that the rows' committed states have seen

    @abstractmethod
    def nbytes(self) -> int:
        """Size of all committed states, in bytes."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Size of one sequence's states, in bytes."""

    @abstractmethod
    def load(self, slot: int, states: States) -> None:
        """Fill an empty slot with copies of another sequence's states."""

    @abstractmethod
    def begin(
        self, rows: range, tokens: Sequence[int] | DraftTree, layout: RaggedLayout | None, lengths: Sequence[int]
    ) -> None:
        """Begin a pass over rows of `lengths` [R] tokens, dropping what the previous pass staged.

        `tokens` is the number of prompt tokens of each row [R], or the trees that the rows' roots have.
        """

    def commit(self, rows: range, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's state after the last column in its path; rows with an empty path stay as they are."""
        kept = {slot: path for slot, path in zip(rows, paths, strict=True) if len(path)}
        if not kept:
            return
        done = self.path
        if done is None or not set(rows) <= set(done.rows):
            raise InvariantError(f"slots {rows} have no staged states to commit: run their pass first")
        accepted: list[list[int]] = [[] for _ in done.rows]
        for slot, path in kept.items():
            row = slot - done.rows.start
            if [*path[: done.counts[row]]] != [*range(done.counts[row])]:
                raise InvariantError(f"slot {slot} must commit the first {done.counts[row]} columns of its pass")
            accepted[row] = [done.indexes[row][column] for column in path[done.counts[row] :]]
        lengths = [length + count for length, count in zip(self._lengths, done.counts, strict=True)]
        self._advance(done, accepted, self.copies.wanted([len(tokens) for tokens in accepted], lengths))
        self.copies.keep(kept)
        self._keep(done, list(kept))
        self.path = None

    @abstractmethod
    def _advance(self, done: StatePath, accepted: Sequence[Sequence[int]], copied: CopiesWanted) -> None:
        """Advance the staged states of a finished pass by each row's accepted tokens, making the copies wanted."""

    @abstractmethod
    def _keep(self, done: StatePath, slots: Sequence[int]) -> None:
        """Commit what is staged for these slots, and drop what is staged for others."""

    @abstractmethod
    def reshape(self, slots: int) -> None:
        """Change the number of slots, keeping the states of the slots that remain."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Reset a slot's states to zeros, as before a sequence's first token."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Move a sequence's states to another slot, leaving zeros."""


class RecurrentStates(SlotStates):
    """The states of layers that run as modules: one tensor [slots, ...] per state that a module keeps."""

    def __init__(self, shapes: Mapping[StateKey, StateShape], slots: int, device: torch.device) -> None:
        """Allocate the states of `slots` empty slots. Raises CacheMemoryError."""
        super().__init__(slots)
        self._shapes = shapes
        self._device = device
        self._held = self._zeros(slots)  # [slots, ...] each
        self._staged: dict[StateKey, Tensor] = {}  # [R, ...] each
        self._steps: list[StepsOfPass] = []  # of the layers that have run guesses

    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._held.values())

    @property
    def slot_bytes(self) -> int:
        return sum(shape.nbytes for shape in self._shapes.values())

    def load(self, slot: int, states: States) -> None:
        for key, state in states.items():
            self._held[key][slot] = state

    def begin(
        self, rows: range, tokens: Sequence[int] | DraftTree, layout: RaggedLayout | None, lengths: Sequence[int]
    ) -> None:
        if isinstance(tokens, DraftTree):
            path = StatePath.of_trees(rows, tokens, layout, self._device)
        else:
            path = StatePath.of_prompts(rows, tokens, layout, self._device)
        self.path = path
        self._steps = []
        self._lengths = lengths
        self.copies.begin(path.rows)
        self._staged = {key: state[path.rows.start : path.rows.stop] for key, state in self._held.items()}
        if len(path.sure[0].tokens) < len(path.rows):  # otherwise, the first step replaces these views
            self._staged = {key: state.clone() for key, state in self._staged.items()}

    @property
    def pending(self) -> Sequence[StepsOfPass]:
        """The steps of all layers in a pass over guesses, until it is committed."""
        return self._steps

    def staged(self, rows: Tensor) -> LevelStates:
        """The states that the pass has staged, for a level that continues from the states of `rows` [W]."""
        return LevelStates(self._staged, rows)

    def walk(self, steps: StepsOfPass) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a layer's `steps` over the pass, yielding each level's tokens [W] and outputs [W, H]."""
        assert self.path is not None
        yield from self._advance_kept(self.path.sure, steps, self.copies.wanted(self.path.counts, self._lengths))
        above: States = self._staged
        for level in self.path.guesses:
            reached: dict[StateKey, list[Tensor]] = defaultdict(list)
            for part in level:
                seen = LevelStates(above, part.above)
                yield part.tokens, steps(part.tokens, seen)
                if part.inner is not None:
                    for key, state in seen.reached.items():
                        reached[key].append(state[part.inner])
            above = {key: torch.cat(states) for key, states in reached.items()}
        if self.path.guesses:
            self._steps.append(steps)

    def _advance_kept(
        self, levels: Iterable[Level], steps: StepsOfPass, copied: CopiesWanted
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Advance the staged states by levels of tokens that are kept, making the copies in `copied`."""
        for number, level in enumerate(levels):
            seen = self.staged(level.above)
            yield level.tokens, steps(level.tokens, seen)
            for key, state in seen.reached.items():
                if len(state) == len(self._staged[key]):
                    self._staged[key] = state
                else:
                    self._staged[key][level.above] = state
                for row, tokens in copied.get(number, ()):
                    staged = self._staged[key][row]
                    self.copies.room(row, tokens, key, staged).copy_(staged)

    @inference
    def _advance(self, done: StatePath, accepted: Sequence[Sequence[int]], copied: CopiesWanted) -> None:  # noqa: ARG002
        levels = _sequential_levels(accepted, self._device)
        for steps in self._steps:
            with steps.prepared():
                for _ in self._advance_kept(levels, steps, copied):
                    pass

    @inference
    def _keep(self, done: StatePath, slots: Sequence[int]) -> None:
        at = to_device(slots, self._device)
        for key, staged in self._staged.items():
            self._held[key][at] = staged[at - done.rows.start]
        self._staged = {}
        self._steps = []

    def reshape(self, slots: int) -> None:
        self.copies.reshape(slots)
        made = self._zeros(slots)
        for key, state in made.items():
            kept = self._held[key][:slots]
            state[: len(kept)] = kept
        self._held = made

    def clear(self, slot: int) -> None:
        for state in self._held.values():
            state[slot] = 0
        self.copies.clear(slot)

    def move(self, source: int, target: int) -> None:
        for state in self._held.values():
            state[target] = state[source]
        self.copies.move(source, target)
        self.clear(source)

    def _zeros(self, slots: int) -> dict[StateKey, Tensor]:
        with memory_for_states(slots):
            return {
                key: torch.zeros(slots, *shape.size, dtype=shape.dtype, device=self._device)
                for key, shape in self._shapes.items()
            }


def memory_for_states(slots: int) -> AbstractContextManager[None]:
    """A context that allocates the states of `slots` slots: raises CacheMemoryError if memory runs out."""
    why = f"no memory for the recurrent states of {slots} sequences: use a smaller `batch_size=`"
    return out_of_memory_as(lambda: CacheMemoryError(why))


class StateCopies:
    """Copies of the states that slots had at earlier positions, kept as long as the slot's sequence."""

    def __init__(self, slots: int) -> None:
        self.every: int | None = None
        """Copy the states that are one token short of the last multiple of this; None = copy none."""
        self._marks = [0] * slots
        self._kept: list[dict[int, States]] = [{} for _ in range(slots)]
        self._rows = range(0)
        self._made: dict[int, dict[int, dict[StateKey, Tensor]]] = {}  # in this pass, by row and number of tokens

    @property
    def max_copies(self) -> int:
        """Maximum number of copies of a slot's states in memory: committed, staged, and two more if copies are kept."""
        return 2 if self.every is None else 4

    def of(self, slot: int) -> Mapping[int, States]:
        """The copies of a slot's states, by the number of tokens that they have seen."""
        return self._kept[slot]

    def mark(self, slot: int, tokens: int) -> None:
        """Also copy a slot's states once they have seen `tokens` tokens."""
        self._marks[slot] = tokens

    def begin(self, rows: range) -> None:
        """Begin a pass, dropping the copies made in one that wasn't committed."""
        self._rows = rows
        self._made = {}

    def wanted(self, counts: Sequence[int], lengths: Sequence[int]) -> CopiesWanted:
        """The copies to make in a pass that reads `counts` [R] more tokens in rows of `lengths` [R] tokens."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        if self.every is not None:
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
                last = (length + count + 1) // self.every * self.every - 1
                for tokens in {last, self._marks[self._rows.start + row]}:
                    if length < tokens <= length + count:
                        found[tokens - length - 1].append((row, tokens))
        return found

    def room(self, row: int, tokens: int, key: StateKey, like: Tensor) -> Tensor:
        """Allocate a copy, shaped like `like`, of one of the states that a row has after `tokens` tokens."""
        made = mapped_zeros(like.shape, like.dtype, like.device)
        self._made.setdefault(row, {}).setdefault(tokens, {})[key] = made
        return made

    def keep(self, slots: Iterable[int]) -> None:
        """Keep the copies of a pass that is committed in these slots; new copies replace all but the marked one.

        A pass may have copied the states after a root and, when it was committed, later ones: then the last stay.
        """
        for slot in slots:
            made = self._made.get(slot - self._rows.start)
            if made:
                last = max(made)
                mark = self._marks[slot]
                self._kept[slot] = {
                    tokens: states for tokens, states in {**self._kept[slot], **made}.items() if tokens in (last, mark)
                }
        self._made = {}

    def reshape(self, slots: int) -> None:
        """Change the number of slots, keeping the copies of the slots that remain."""
        more = max(0, slots - len(self._marks))
        self._marks = [*self._marks[:slots], *[0] * more]
        self._kept = [*self._kept[:slots], *({} for _ in range(more))]

    def clear(self, slot: int) -> None:
        """Forget a slot's copies."""
        self._marks[slot] = 0
        self._kept[slot] = {}

    def move(self, source: int, target: int) -> None:
        """Move a sequence's copies to the slot that it moves to."""
        self._marks[target], self._kept[target] = self._marks[source], self._kept[source]


class LevelStates:
    """transformers' cache as a recurrent layer sees it while one level of a pass runs.

    Layers change a state in place or hand over a new one, so each layer gets a copy, which is read back.
    """

    def __init__(self, above: States, which: Tensor) -> None:
        """A level that continues from the states with indexes `which` [W] in `above`."""
        self.reached: dict[StateKey, Tensor] = {}
        """The states after the level's tokens, [W, ...] each."""
        self._above = above
        self._which = which

    def each_alone(self) -> Iterator[LevelStates]:
        """Yield the states of each of the level's tokens alone, and collect in `reached` what they reach."""
        alone = [LevelStates(self._above, which) for which in self._which.view(-1, 1)]
        yield from alone
        self.reached = {key: torch.cat([one.reached[key] for one in alone]) for key in alone[0].reached}

    @property
    def layers(self) -> Numbered:
        return layers_of(self)

    def _state(self, key: StateKey) -> Tensor:
        if key not in self.reached:
            self.reached[key] = self._above[key][self._which]
        return self.reached[key]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._state(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._state(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_options: Any) -> Tensor:
        state = self.get_conv_state(layer_idx, state_idx)
        seen = torch.cat((state, conv_states), dim=-1)
        state.copy_(seen[..., -state.shape[-1] :])
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        key = StateKey(layer_idx, "recurrent", state_idx)
        self.reached[key] = recurrent_states.to(self._above[key].dtype)
        return self.reached[key]

    def get_linear_cache(self, layer_idx: int) -> Tensor:  # of MiniMax's cache
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return True

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False
