"""The recurrent states of a native decoder's slots, which its kernels read, stage and fold; see `kernels/recurrent.h`.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_int64, c_void_p
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.targets.attention import RaggedLayout
from eyas.targets.native.library import Fold, RowStates
from eyas.targets.states import (
    CopiesWanted,
    SlotStates,
    StateKey,
    StatePath,
    States,
    memory_for_states,
    token_indexes,
)
from eyas.tree import DraftTree

_STATE_KEY = StateKey(-1, "native", 0)
"""Key of the vector of all states among copies."""


class GivenStates(NamedTuple):
    """The rows of a pass as the kernels take them, with the objects that they point to."""

    states: RowStates
    keepalive: Sequence[Any] = ()


class Folds(Protocol):
    """A decoder that repeats the steps of accepted guesses."""

    row_size: int
    """Number of floats that each layer stages per token."""
    recurrent: int
    """Number of recurrent layers."""
    state_size: int
    """Number of floats of a slot's states."""

    def fold(self, fold: Fold) -> None:
        """Advance staged states by accepted tokens."""


class NativeStates(SlotStates):
    """Per slot, a vector of its committed states and one in which a pass stages the states that may follow."""

    def __init__(self, decoder: Folds, size: int, slots: int) -> None:
        """Allocate the states of `slots` empty slots, `size` floats each. Raises CacheMemoryError."""
        super().__init__(slots)
        self._decoder = decoder
        self._size = size
        self._held, self._staged = self._zeros(slots), self._zeros(slots)  # [size] each
        self._inputs = torch.empty(0, 0, 0)  # [layers, T, row size] staged by guesses; else scratch for one layer
        self._guesses = False

    @classmethod
    def of(cls, decoder: Folds, slots: int) -> NativeStates | None:
        """The states of empty slots; None if no layer of the decoder is recurrent."""
        return cls(decoder, decoder.state_size, slots) if decoder.state_size else None

    def nbytes(self) -> int:
        return 4 * self._size * len(self._held)

    @property
    def slot_bytes(self) -> int:
        return 4 * self._size

    def load(self, slot: int, states: States) -> None:
        self._held[slot].copy_(states[_STATE_KEY])

    def begin(
        self, rows: range, tokens: Sequence[int] | DraftTree, layout: RaggedLayout | None, lengths: Sequence[int]
    ) -> None:
        self._guesses = isinstance(tokens, DraftTree) and tokens.size > 0
        counts = [1] * len(rows) if isinstance(tokens, DraftTree) else tokens
        width = 1 + tokens.size if isinstance(tokens, DraftTree) else max(counts)
        self.path = StatePath(rows, counts, token_indexes(len(rows), width, layout), ())
        self._lengths = lengths
        self.copies.begin(rows)

    def of_pass(self, tokens: int) -> GivenStates:
        """The rows of the pass that has begun, which runs `tokens` tokens, as the kernels take them."""
        assert self.path is not None
        layers = self._decoder.recurrent if self._guesses else 1
        row = self._decoder.row_size
        self._inputs = torch.empty(layers, tokens, row)
        given = self._given(self.path, self.copies.wanted(self.path.counts, self._lengths))
        sure = (c_int64 * len(self.path.rows))(*self.path.counts)
        given.states.sure = addressof(sure)
        return GivenStates(given.states, [*given.keepalive, sure])

    def _advance(self, done: StatePath, accepted: Sequence[Sequence[int]], copied: CopiesWanted) -> None:
        if not any(accepted):
            return
        given = self._given(done, copied)
        starts = (c_int64 * (len(accepted) + 1))(*accumulate(map(len, accepted), initial=0))
        tokens = (c_int64 * starts[-1])(*chain.from_iterable(accepted))
        self._decoder.fold(Fold(given.states, self._inputs.shape[1], addressof(starts), addressof(tokens)))

    def _given(self, path: StatePath, copied: CopiesWanted) -> GivenStates:
        """The rows of a pass, with room for the copies of states that are to be made."""
        wanted = [(row, number + 1, tokens) for number, rows in copied.items() for row, tokens in rows]
        made = [self.copies.room(row, tokens, _STATE_KEY, self._held[path.rows[row]]) for row, _, tokens in wanted]
        which = (c_int64 * (2 * len(wanted)))(*(part for row, after, _ in wanted for part in (row, after)))
        committed, staged, to = (
            (c_void_p * len(vectors))(*(vector.data_ptr() for vector in vectors))
            for vectors in ([self._held[slot] for slot in path.rows], [self._staged[slot] for slot in path.rows], made)
        )
        layers, tokens, row = self._inputs.shape
        states = RowStates(
            len(path.rows),
            None,
            addressof(committed),
            addressof(staged),
            self._inputs.data_ptr(),
            tokens * row if layers > 1 else 0,
            len(made),
            addressof(which),
            addressof(to),
        )
        return GivenStates(states, [committed, staged, which, to])

    def _keep(self, done: StatePath, slots: Sequence[int]) -> None:  # noqa: ARG002
        for slot in slots:
            self._held[slot], self._staged[slot] = self._staged[slot], self._held[slot]
        self._inputs = torch.empty(0, 0, 0)

    def reshape(self, slots: int) -> None:
        self.copies.reshape(slots)
        more = max(0, slots - len(self._held))
        made = self._zeros(2 * more)
        self._held = self._held[:slots] + made[:more]
        self._staged = self._staged[:slots] + made[more:]

    def clear(self, slot: int) -> None:
        self._held[slot].zero_()
        self.copies.clear(slot)

    def move(self, source: int, target: int) -> None:
        self._held[target], self._held[source] = self._held[source], self._held[target]
        self.copies.move(source, target)
        self.clear(source)

    def _zeros(self, slots: int) -> list[Tensor]:
        with memory_for_states(slots):
            return [torch.zeros(self._size) for _ in range(slots)]
