"""Taps (aux hidden states): which boundaries of the residual stream a drafter reads, and how they are caught.

Boundary k is what enters layer k (0 = embeddings); boundary n is what leaves the last of the n layers, before the final
norm; boundary n + 1 is what leaves the base model, after the final norm: what the head reads.

Shapes: B rows, S positions, A taps, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from eyas.targets.architecture import FULL, attention_plan


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's boundaries [2, n // 2, n - 3] (arXiv 2503.01840), moved apart where a shallow model makes them meet."""
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    spread = sorted({round(i * layers / 3) for i in (1, 2, 3)} | {min(1, layers)})
    return tuple(spread[-3:])


def choose_taps(config: Any) -> tuple[int, ...]:
    """The boundaries a new drafter reads: `default_taps`, moved to full-attention layers in a hybrid model.

    Boundary k is the *output* of layer k - 1 (and the input of layer k), so layer k - 1 is the one that carries a
    tap: what it attended to is what the state knows of the context. Among the boundaries carried by full-attention
    layers the distinct ones nearest the defaults are taken; if there are too few of them, the defaults stay.
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
    """A sentence that says where taps lie and why, for reports and the command line."""
    config = config.get_text_config()
    defaults, full = default_taps(config.num_hidden_layers), _full_attention_boundaries(config)
    shown = ", ".join(map(str, taps))
    if not attention_plan(config).hybrid:
        return f"taps {shown}: " + ("the usual ones, all layers being alike" if taps == defaults else "as asked for")
    carried = sum(k in full for k in taps)
    nearest = f", nearest the usual {', '.join(map(str, defaults))}" if taps == choose_taps(config) != defaults else ""
    return f"taps {shown}: {carried} of {len(taps)} are outputs of full-attention layers{nearest}"


def _full_attention_boundaries(config: Any) -> list[int]:
    """Boundaries that are the output of a layer which attends to everything; all of them where layers are alike."""
    types = config.layer_types if attention_plan(config).hybrid else [FULL] * config.num_hidden_layers
    return [i + 1 for i, kind in enumerate(types) if kind == FULL]


@contextmanager
def caught_taps(base: nn.Module, layers: nn.ModuleList, boundaries: Sequence[int]) -> Iterator[list[Tensor]]:
    """Within the block, one forward pass fills the list with its taps, each [B, S, Ht], in order of `boundaries`.

    The pass may be that of the `base` model or of the model around it. No other layer's states are held.
    """
    found: dict[int, Tensor] = {}
    handles = [_hook(base, layers, boundary, found) for boundary in set(boundaries)]
    caught: list[Tensor] = []
    try:
        yield caught
        caught.extend(found[boundary] for boundary in boundaries)
    finally:
        for handle in handles:
            handle.remove()


def _hook(base: nn.Module, layers: nn.ModuleList, boundary: int, found: dict[int, Tensor]) -> Any:
    """Put what passes a boundary into `found`; returns the hook's handle."""
    if boundary >= len(layers):

        def leaving(_module: nn.Module, _args: Any, output: Any) -> None:
            found[boundary] = output if isinstance(output, Tensor) else output[0]

        return (layers[-1] if boundary == len(layers) else base).register_forward_hook(leaving)

    def entering(_module: nn.Module, args: Any, kwargs: Any) -> None:
        found[boundary] = args[0] if args else kwargs["hidden_states"]

    return layers[boundary].register_forward_pre_hook(entering, with_kwargs=True)
