"""What eyas must know of a model's architecture, read from its config and modules, never from its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from eyas.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionPlan:
    """Attention types of a model: the window each type sees (None = everything)."""

    windows: dict[str, int | None]

    @property
    def hybrid(self) -> bool:
        """More than one type: the model then takes a mask per type."""
        return len(self.windows) > 1


def attention_plan(config: Any) -> AttentionPlan:
    """The masks a decoder with this text config needs; refuses layers whose state can't be rolled back."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return AttentionPlan({SLIDING: window} if window else {FULL: None})
    odd = sorted(set(types) - {FULL, SLIDING})
    if odd:
        raise UnsupportedModelError(
            f"{config.model_type} has {', '.join(odd)} layers: eyas verifies a tree of guesses and rolls the rejected "
            "ones back, which works for full and sliding-window attention only (a recurrent state has already mixed "
            "them in); use a model whose layers are attention layers"
        )
    return AttentionPlan({kind: (window if kind == SLIDING else None) for kind in sorted(set(types))})


def refuse_stateful(model_class: type[Any], config: Any) -> None:
    """Refuse models that transformers marks as carrying a state other than a key-value cache."""
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{config.model_type} keeps a recurrent state (linear attention, Mamba or the like) that can't be rolled "
            "back after a rejected guess; use a model with a plain key-value cache"
        )


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers: the one ModuleList of the base model with `count` members."""
    base = model.base_model
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    direct = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    found = direct or lists
    if not found:
        raise UnsupportedModelError(
            f"no list of {count} decoder layers found in {type(base).__name__}: taps can't be placed in this model"
        )
    return found[0]


def head_function(model: Any, config: Any) -> Callable[[Any], Any]:
    """Final hidden state -> logits, as the model's own forward does it (head, then scaling and soft-capping)."""
    head = model.get_output_embeddings()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)

    def logits(hidden: Any) -> Any:
        out = head(hidden)
        if scale is not None:
            out = out * scale
        if divisor is not None:
            out = out / divisor
        if softcap is not None:
            out = (out / softcap).tanh() * softcap
        return out

    return logits


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's boundaries [2, n // 2, n - 3], moved apart where a shallow model makes them coincide."""
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    spread = sorted({round(i * layers / 3) for i in (1, 2, 3)} | {min(1, layers)})
    return tuple(spread[-3:])
