"""Taps: the residual stream at chosen boundaries, caught as it passes, no other layer's states held.

Boundary k is what enters layer k (0 = embeddings); boundary n is what leaves the last layer, before the final norm;
boundary n + 1 is what leaves the base model, after the final norm: what the head reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def caught_taps(base: nn.Module, layers: nn.ModuleList, boundaries: Sequence[int]) -> Iterator[list[Tensor]]:
    """Within the block, one forward pass fills the list with its taps, each [B, S, Ht], in order of `boundaries`.

    The pass may be the base model's own or that of the model around it.
    """
    slots: dict[int, Tensor] = {}
    handles = [_hook(base, layers, boundary, slots) for boundary in set(boundaries)]
    caught: list[Tensor] = []
    try:
        yield caught
        caught.extend(slots[boundary] for boundary in boundaries)
    finally:
        for handle in handles:
            handle.remove()


def stack(caught: Sequence[Tensor]) -> Tensor:
    """[B, S, A, Ht] from A taps."""
    return torch.stack(list(caught), dim=2)


def _hook(base: nn.Module, layers: nn.ModuleList, boundary: int, slots: dict[int, Tensor]) -> Any:
    if boundary >= len(layers):

        def leaving(_module: nn.Module, _args: Any, output: Any) -> None:
            slots[boundary] = output if isinstance(output, Tensor) else output[0]

        return (layers[-1] if boundary == len(layers) else base).register_forward_hook(leaving)

    def entering(_module: nn.Module, args: Any, kwargs: Any) -> None:
        slots[boundary] = args[0] if args else kwargs["hidden_states"]

    return layers[boundary].register_forward_pre_hook(entering, with_kwargs=True)
