"""The slot cache as transformers sees it: a `Cache` that stages a pass's keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from eyas.target.ragged import Ragged
from eyas.target.slots import KVShape, SlotCache


class StagedCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """One pass over `rows` of a slot cache; lives as long as the pass. `layout`: its rows lie end to end."""

    def __init__(self, slots: SlotCache, rows: range, start: int, layout: Ragged | None = None) -> None:
        super().__init__(layers=[])
        self._slots, self._rows, self._start, self._layout = slots, rows, start, layout

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._layout is not None:  # [1, Hkv, T, D]
            key_states, value_states = self._layout.spread(key_states), self._layout.spread(value_states)
        return self._slots.write(layer_idx, key_states, value_states, self._rows, self._start)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self._start


class ShapeProbe(Cache):  # type: ignore[misc]
    """Records what a model caches in each layer; used once, on one token, when a model is loaded."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[KVShape, KVShape]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = (_shape(key_states), _shape(value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0


def _shape(states: Tensor) -> KVShape:
    return KVShape(states.shape[1], states.shape[3])
