"""What eyas must know of a model's architecture, read from its config and modules, never from its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

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


def refuse_unsupported(model_class: type[Any], config: Any) -> None:
    """Refuse what can be told from the class and the config, so before any weight is read."""
    kind = config.model_type
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state (linear attention, Mamba or the like) that can't be rolled back after "
            "a rejected guess; use a model with a plain key-value cache"
        )
    config = config.get_text_config()
    attention_plan(config)
    if getattr(config, "alibi", False) or "position_ids" not in signature(model_class.forward).parameters:
        raise UnsupportedModelError(
            f"{kind} takes no position ids (ALiBi): guesses of one depth can't share a position; use a model "
            "with rotary or learned positions"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModelError(
            f"{kind} masks its local attention layers itself, by column and not by position, which is wrong in "
            "a tree of guesses; use a model that takes its window as a mask"
        )


def causal_lm_class(config: Any) -> type[Any] | None:
    """The class `AutoModelForCausalLM` would make of a config, None if it knows none."""
    try:
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None
    chosen: type[Any] = found[0] if isinstance(found, tuple) else found
    return chosen


def context_limit(config: Any) -> int | None:
    """The longest sequence a model takes, None if it names none.

    Where RoPE's frequencies change once a sequence outgrows the original context, keys cached before that
    would be stale, and a tree that reaches over the edge would change the tokens on this side of it: that is
    the limit then.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min((x for x in (limit, original) if x is not None), default=None)
    return limit


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers: the one ModuleList of the base model with `count` members."""
    base: nn.Module = model.base_model  # type: ignore[assignment]  # nn.Module types it as Tensor | Module
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    direct = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    found = direct or lists
    if not found:
        raise UnsupportedModelError(
            f"no list of {count} decoder layers found in {type(base).__name__}: taps can't be placed in this model"
        )
    return found[0]


def logit_finish(config: Any) -> Callable[[Any], Any]:
    """What a model's forward does to what its head puts out: scaling and soft-capping, if any."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)

    def finish(out: Any) -> Any:
        if scale is not None:
            out = out * scale
        if divisor is not None:
            out = out / divisor
        if softcap is not None:
            out = (out / softcap).tanh() * softcap
        return out

    return finish
