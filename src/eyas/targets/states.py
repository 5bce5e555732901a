"""Recurrent states of the sequences in a slot cache, and the way that a pass takes through them.

A recurrent layer mixes every token into a state, out of which nothing can be taken again. So a pass only reads what is
committed: it goes through its tokens level by level, each from the state after the token that it follows, and stages
what it reaches. Committing keeps the state after the last token of each row's path. A prompt's row has one staged
state, which goes through all of its tokens; in a tree every token has one until the path is known.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, T tokens of a pass, W tokens of a level, S staged
states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.errors import CacheMemoryError, InvariantError
from eyas.runtime import out_of_memory, to_device
from eyas.targets.attention import RaggedLayout
from eyas.tree import DraftTree


class StateKey(NamedTuple):
    """Which state it is, in the words of transformers' cache."""

    layer: int
    kind: str
    """`conv` (the last inputs of a convolution) or `recurrent`."""
    number: int


class StateShape(NamedTuple):
    """What one sequence has of a state."""

    size: tuple[int, ...]
    dtype: torch.dtype


class Level(NamedTuple):
    """Tokens of a pass whose states can be computed together."""

    tokens: Tensor  # [W] int64, which of the pass's T
    above: Tensor  # [W] int64, the staged state that each goes on from
    reached: Tensor  # [W] int64, where its own is staged


@dataclass(frozen=True)
class StatePath:
    """The levels of a pass. The first R staged states are the committed ones of its rows."""

    rows: range
    levels: Sequence[Level]
    size: int  # S
    after: Sequence[Sequence[int]]  # [R][Q] the staged state after each column

    @staticmethod
    def of_prompts(rows: range, counts: Sequence[int], layout: RaggedLayout | None, device: torch.device) -> StatePath:
        """Of the first `counts[r]` columns of each row: a row has one staged state, which goes through them."""
        width, found = max(counts), []
        indexes = _token_indexes(len(rows), width, layout)
        for column in range(width):
            there = [row for row, count in enumerate(counts) if column < count]
            found.append(([indexes[row][column] for row in there], there, there))
        after = [[row] * width for row in range(len(rows))]
        return StatePath(rows, _levels(found, device), len(rows), after)

    @staticmethod
    def of_trees(rows: range, tree: DraftTree, layout: RaggedLayout | None, device: torch.device) -> StatePath:
        """Of roots and their trees' valid nodes: every token has a staged state. Waits for the device."""
        count, width = len(rows), 1 + tree.size
        indexes = _token_indexes(count, width, layout)
        after = [[count + index for index in row] for row in indexes]
        found: list[tuple[list[int], list[int], list[int]]] = []
        parents, valid = (tree.parents.tolist(), tree.valid.tolist()) if tree.size else ([[]] * count, [[]] * count)
        for row in range(count):
            depths = [0]
            for column in range(width):
                parent = parents[row][column - 1] + 1 if column else -1
                if column:
                    depths.append(depths[parent] + 1)
                    if not valid[row][column - 1]:
                        continue
                while len(found) <= depths[column]:
                    found.append(([], [], []))
                tokens, above, reached = found[depths[column]]
                tokens.append(indexes[row][column])
                above.append(after[row][parent] if column else row)
                reached.append(after[row][column])
        tokens_of_pass = count * width if layout is None else len(layout.cell_index)
        return StatePath(rows, _levels(found, device), count + tokens_of_pass, after)


def _token_indexes(rows: int, width: int, layout: RaggedLayout | None) -> list[list[int]]:
    """[R][Q] which of a pass's tokens lies in each column."""
    if layout is None:
        return [list(range(row * width, (row + 1) * width)) for row in range(rows)]
    found: list[list[int]] = layout.token_index.tolist()
    return found


def _levels(found: Iterable[tuple[list[int], list[int], list[int]]], device: torch.device) -> list[Level]:
    return [Level(*to_device(list(level), device)) for level in found]


class RecurrentStates:
    """The states of the sequences in a cache's slots: zeros where nothing was read yet."""

    def __init__(self, shapes: Mapping[StateKey, StateShape], slots: int, device: torch.device) -> None:
        """States of `slots` empty slots. Raises CacheMemoryError."""
        self._shapes, self._device = shapes, device
        self._held = self._zeros(slots)  # [slots, ...] each
        self._staged: dict[StateKey, Tensor] = {}  # [S, ...] each
        self.path: StatePath | None = None
        """The path of the pass that runs, or has run and is not committed yet."""

    def nbytes(self) -> int:
        """Size of all committed states, in bytes."""
        return sum(state.nbytes for state in self._held.values())

    def begin(self, path: StatePath) -> None:
        """A pass begins: what the one before it has staged is forgotten."""
        self.path, self._staged = path, {}

    def read(self, key: StateKey, which: Tensor) -> Tensor:
        """Copies [W, ...] of the staged states `which` [W]."""
        assert self.path is not None
        if key not in self._staged:
            held, rows = self._held[key], self.path.rows
            self._staged[key] = held.new_empty(self.path.size, *held.shape[1:])
            self._staged[key][: len(rows)] = held[rows.start : rows.stop]
        return self._staged[key][which]

    def write(self, key: StateKey, which: Tensor, states: Tensor) -> None:
        """Stage `states` [W, ...] as `which` [W]."""
        self._staged[key][which] = states

    def commit(self, rows: range, paths: Sequence[Sequence[int]]) -> None:
        """Keep of each row the state after the last of the columns in its path; the others are forgotten."""
        kept = [(slot, path[-1]) for slot, path in zip(rows, paths, strict=True) if len(path)]
        if not kept:
            return
        done, self.path = self.path, None
        if done is None or not set(rows) <= set(done.rows):
            raise InvariantError(f"slots {rows} have no staged states to commit: run their pass before")
        columns = [done.after[slot - done.rows.start][column] for slot, column in kept]
        at = to_device([[slot for slot, _ in kept], columns], self._device)
        for key, staged in self._staged.items():
            self._held[key][at[0]] = staged[at[1]]
        self._staged = {}

    def reshape(self, slots: int) -> None:
        """Change the number of slots, keeping the states of those that stay."""
        made = self._zeros(slots)
        for key, state in made.items():
            kept = self._held[key][:slots]
            state[: len(kept)] = kept
        self._held = made

    def clear(self, slot: int) -> None:
        """Begin a slot anew: its states are zeros, as before a sequence's first token."""
        for state in self._held.values():
            state[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Move a sequence's states to another slot, leaving zeros."""
        for state in self._held.values():
            state[target] = state[source]
        self.clear(source)

    def _zeros(self, slots: int) -> dict[StateKey, Tensor]:
        try:
            return {
                key: torch.zeros(slots, *shape.size, dtype=shape.dtype, device=self._device)
                for key, shape in self._shapes.items()
            }
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise CacheMemoryError(
                f"no memory for the recurrent states of {slots} sequences: use a smaller --batch-size"
            ) from error


class LevelStates:
    """transformers' cache as a recurrent layer sees it while one level of a pass runs.

    Layers change what they get in place, or hand over what is to be kept: so each gets a copy, which is read back.
    """

    def __init__(self, states: RecurrentStates, level: Level) -> None:
        self._states, self._level = states, level
        self._taken: dict[StateKey, Tensor] = {}

    def keep(self) -> None:
        """Stage the states that the level has reached."""
        for key, state in self._taken.items():
            self._states.write(key, self._level.reached, state)

    def _state(self, key: StateKey) -> Tensor:
        if key not in self._taken:
            self._taken[key] = self._states.read(key, self._level.above)
        return self._taken[key]

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
        return self.get_recurrent_state(layer_idx, state_idx).copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return True

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False
