"""Taps (aux hidden states): which boundaries of the residual stream a drafter reads, and how they are captured.

Boundary k is the input of layer k (0 = embeddings). Boundary n is the output of the last of the n layers, before the
final norm. Boundary n + 1 is the output of the base model, after the final norm: the head's input.

Shapes: B rows, S positions, A taps, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import RequestError, UnsupportedModelError
from eyas.targets.architecture import FULL, attention_plan


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's boundaries [2, n // 2, n - 3] (arXiv 2503.01840), moved apart where they coincide in shallow models."""
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    spread = sorted({round(i * layers / 3) for i in (1, 2, 3)} | {min(1, layers)})
    return tuple(spread[-3:])


def choose_taps(config: Any) -> tuple[int, ...]:
    """The boundaries a new drafter reads: `default_taps`, moved to full-attention layers in a hybrid model.

    Boundary k is the *output* of layer k - 1 (and the input of layer k), so layer k - 1 carries the tap: the state
    knows the context that this layer attended to. Among the boundaries carried by full-attention layers, the distinct
    ones nearest to the defaults are chosen. If there are too few, the defaults stay.
    """
    config = config.get_text_config()
    defaults = default_taps(config.num_hidden_layers)
    full = _full_attention_boundaries(config)
    if len(full) < len(defaults):
        return defaults
    # both ascending, so the nearest pairing is in order
    return min(
        combinations(full, len(defaults)),
        key=lambda taps: (sum(abs(a - b) for a, b in zip(taps, defaults, strict=True)), taps),
    )


def why_taps(config: Any, taps: tuple[int, ...]) -> str:
    """A sentence that says where the taps are and why, for reports and the command line."""
    config = config.get_text_config()
    defaults = default_taps(config.num_hidden_layers)
    full = _full_attention_boundaries(config)
    shown = ", ".join(map(str, taps))
    if not attention_plan(config).hybrid:
        return f"taps {shown}: " + (
            "the default ones, because all layers are alike" if taps == defaults else "as requested"
        )
    carried = sum(k in full for k in taps)
    nearest = (
        f", nearest the default {', '.join(map(str, defaults))}" if taps == choose_taps(config) != defaults else ""
    )
    return f"taps {shown}: {carried} of {len(taps)} are outputs of full-attention layers{nearest}"


def _full_attention_boundaries(config: Any) -> list[int]:
    """Boundaries that are the output of a full-attention layer; all boundaries if all layers are of one type."""
    plan = attention_plan(config)
    return [i + 1 for i, kind in enumerate(plan.of_layers(config)) if kind in (FULL, "hybrid") or not plan.hybrid]


def spread_taps(count: int, layers: int) -> tuple[int, ...]:
    """The outputs of `count` of a target's layers, spread from layer 1 to layer n - 3, as boundaries.

    `count` is the number of draft layers. In targets with few layers, boundaries that coincide are taken once.
    """
    if count == 1:
        return (layers // 2 + 1,)
    found = (round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))
    return tuple(sorted({min(max(tap, 0), layers) for tap in found}))


def odd_taps(caught: Sequence[Tensor], size: int) -> dict[int, list[int]]:
    """Boundaries of a pass over one token where the caught state isn't [1, 1, size], with the shape of that state."""
    return {k: list(state.shape) for k, state in enumerate(caught) if state.shape != (1, 1, size)}


def check_boundaries(taps: Sequence[int], final: int, odd: Mapping[int, list[int]]) -> None:
    """Raise RequestError for taps that repeat or lie beyond `final`, UnsupportedModelError for those in `odd`."""
    if not all(0 <= k <= final for k in taps) or len(set(taps)) != len(taps):
        raise RequestError(
            f"taps {list(taps)} must be distinct boundaries between 0 and {final} (after the final norm)"
        )
    found = ", ".join(f"{odd[k]} at {k}" for k in taps if k in odd)
    if found:
        raise UnsupportedModelError(
            f"a drafter can't read this model's states at taps {list(taps)}: for one token they have the shapes "
            f"{found}, not the shape of a single vector; decode without a drafter, or with one that reads other taps"
        )


def stacked(caught: Sequence[Tensor], tokens: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Stack caught taps into one tensor [R, Q, A, Ht], for tokens [R, Q]; A may be 0."""
    if not caught:
        return torch.empty(*tokens.shape, 0, hidden, dtype=dtype, device=tokens.device)
    return torch.stack(list(caught), dim=2).to(dtype)


@contextmanager
def caught_taps(base: nn.Module, layers: nn.ModuleList, boundaries: Sequence[int]) -> Iterator[list[Tensor]]:
    """Fill the list with the taps of one forward pass in the block, each [B, S, Ht], in the order of `boundaries`.

    The pass may be a pass of the `base` model or of the model around it. No other layer's states are kept. A boundary
    that the pass doesn't cross gives an empty tensor.
    """
    found: dict[int, Tensor] = {}
    handles = [_hook(base, layers, boundary, found) for boundary in set(boundaries)]
    caught: list[Tensor] = []
    try:
        yield caught
        caught.extend(found.get(boundary, torch.empty(0)) for boundary in boundaries)
    finally:
        for handle in handles:
            handle.remove()


def _hook(base: nn.Module, layers: nn.ModuleList, boundary: int, found: dict[int, Tensor]) -> Any:
    """Hook that puts the states at a boundary into `found`; returns its handle."""
    config: Any = base.config
    active: int | None = getattr(config.get_text_config(), "altup_active_idx", None)

    def stream(state: Tensor) -> Tensor:
        """The residual stream; of several streams (AltUp: Gemma 3n), the one that the layers compute with."""
        return state if active is None or state.dim() < 4 else state[active]

    if boundary >= len(layers):

        def leaving(_module: nn.Module, _args: Any, output: Any) -> None:
            found[boundary] = stream(output if isinstance(output, Tensor) else output[0])

        return (layers[-1] if boundary == len(layers) else base).register_forward_hook(leaving)

    def entering(_module: nn.Module, args: Any, kwargs: Any) -> None:
        found[boundary] = stream(args[0] if args else kwargs.get("hidden_states", torch.empty(0)))

    return layers[boundary].register_forward_pre_hook(entering, with_kwargs=True)
