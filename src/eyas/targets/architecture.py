"""What eyas must know about a model's architecture, read from its config and modules, never from its name.

`refuse_unsupported` checks a model before any weight is read. `logits_agree` checks at load whether a model run in
another way still computes the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getmodule, signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from eyas.errors import ModelError, UnsupportedModelError
from eyas.targets.quantization import quantized_by
from eyas.targets.transformers_names import attends, cache_argument

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionPlan:
    """The attention types of a model's layers."""

    windows: dict[str, int | None]
    """Attention type -> number of latest positions that it attends to; None = all."""
    recurrent: frozenset[str] = frozenset()
    """Types of layers without attention, which keep a recurrent state or nothing."""

    @property
    def hybrid(self) -> bool:
        """Whether there is more than one type; the model then takes one mask per type."""
        return len(self.windows) + len(self.recurrent) > 1

    def of_layers(self, config: Any) -> list[str]:
        """The attention type of each layer."""
        if self.hybrid:
            return list(_layer_types(config) or ())
        return [*self.windows, *self.recurrent] * config.num_hidden_layers


def attention_plan(config: Any) -> AttentionPlan:
    """The attention types of a decoder with this text config.

    Raises UnsupportedModelError for layers whose state can't be rolled back.
    """
    types = _layer_types(config)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return AttentionPlan({SLIDING: window} if window else {FULL: None})
    kinds = set(types)
    recurrent = {kind for kind in types if attends(kind) is False}
    both = {kind for kind in types if attends(kind) is None}
    kinds = kinds - recurrent - both | {SLIDING if "sliding" in kind else FULL for kind in both}
    odd = sorted(kinds - {FULL, SLIDING})
    if odd:
        raise UnsupportedModelError(
            f"{config.model_type} has {', '.join(odd)} layers: eyas verifies trees of guesses with full and "
            "sliding-window attention and recurrent layers only; use a model whose layers are of these kinds"
        )
    windows = {kind: (window if kind == SLIDING else None) for kind in sorted(kinds)}
    return AttentionPlan(windows, frozenset(recurrent | ({"linear_attention"} if both else set())))


def _layer_types(config: Any) -> Sequence[str] | None:
    found: Sequence[str] | None = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return found


def auto_class(config: Any) -> type[Any]:
    """The class that loads a model: `AutoModelForCausalLM`, or the multimodal class, of which only text is run.

    Raises UnsupportedModelError, with the reason, for models that are neither.
    """
    auto: type[Any]
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(_ENCODER_DECODER.format(config.model_type))
    raise UnsupportedModelError(
        f"transformers has neither a causal language model of type {config.model_type} nor a multimodal one that "
        "answers in text: use a decoder-only language model"
    )


def model_class(config: Any) -> type[Any]:
    """The transformers class of a model with this config. Raises UnsupportedModelError if it has no text decoder."""
    found: Any = auto_class(config)._model_mapping[type(config)]
    chosen: type[Any] = found[0] if isinstance(found, tuple) else found
    if not hasattr(config.get_text_config(), "num_hidden_layers"):
        raise UnsupportedModelError(
            f"{config.model_type} is a multimodal model without a recognizable text decoder: its config describes "
            "none; use a text model"
        )
    return chosen


_ENCODER_DECODER = (
    "{} is an encoder-decoder model: its decoder continues what an encoder has read, and eyas runs decoders alone; use "
    "a decoder-only model"
)


def refuse_unsupported(model_class: type[Any], config: Any) -> None:
    """Raise UnsupportedModelError if class and config show that a model can't verify draft trees."""
    kind = config.model_type
    accepted = signature(model_class.forward).parameters
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(_ENCODER_DECODER.format(kind))
    if cache_argument(model_class.forward) is None:
        raise UnsupportedModelError(
            f"{kind} has no key-value cache: each pass would read all tokens again; use a model with a cache"
        )
    if "encoder_hidden_states" in accepted and getattr(text, "is_decoder", None) is False:
        raise UnsupportedModelError(
            f"{kind} is an encoder here (is_decoder is false in its config): each token sees those after it, so it "
            "continues no text; use a decoder"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(
            f"{kind} reads its prompt in both directions (use_bidirectional_attention), so tokens see later ones; "
            "use a model with causal attention"
        )
    plan = attention_plan(text)
    if getattr(model_class, "_is_stateful", False) and not plan.recurrent:
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state in a way of its own, not in transformers' cache: it can't be rolled back "
            "after a rejected guess; use a model with a key-value cache, or one whose states are in transformers' cache"
        )
    if plan.windows:
        _refuse_own_positions(model_class, kind, accepted, text)
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise UnsupportedModelError(
            f"{kind} masks its local attention layers itself, by column and not by position, which is wrong in "
            "a tree of guesses; use a model that takes its window as a mask"
        )


def _refuse_own_positions(model_class: type[Any], kind: str, accepted: Collection[str], text: Any) -> None:
    """Raise UnsupportedModelError for models that don't accept the positions of tokens."""
    taken = "position_ids" in accepted
    if getattr(text, "alibi", False) or (not taken and "alibi" in " ".join(dir(getmodule(model_class))).lower()):
        raise UnsupportedModelError(
            f"{kind} takes no position ids but biases attention by distance (ALiBi): guesses of one depth can't share "
            "a position; use a model with rotary or learned positions"
        )
    if not taken:
        raise UnsupportedModelError(
            f"{kind} takes no position ids, it counts its tokens itself: guesses of one depth can't share a position; "
            "use a model that takes position_ids"
        )


def context_limit(config: Any) -> int | None:
    """The length of the longest sequence that a model takes; None if its config gives no limit.

    Where RoPE's frequencies change once a sequence outgrows the original context, that context is the limit: keys
    cached earlier would be stale, and a tree that reaches beyond it would change the tokens before it.
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


def text_decoder(model: Any) -> Any:
    """The embedding and layers of a model, without its head; in a multimodal model, those of its text model."""
    base = model.get_decoder()
    # some models call their head `decoder`, which transformers then mistakes for their decoder
    return model.base_model if base is model.get_output_embeddings() else base


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The decoder layers: the one ModuleList of the text decoder with `count` members.

    Raises UnsupportedModelError if there is none.
    """
    base = text_decoder(model)  # a multimodal model also has other layers
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    direct = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    found = direct or lists
    if not found:
        raise UnsupportedModelError(
            f"no list of {count} decoder layers found in {type(base).__name__}: taps can't be placed in this model"
        )
    return found[0]


def logit_finish(config: Any) -> Callable[[Any], Any] | None:
    """The function that a model's forward applies to its head's output: scaling and soft-capping; None = none."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", None))
    divisor = getattr(config, "logits_scaling", None)
    if softcap is scale is divisor is None:
        return None

    def finish(out: Any) -> Any:
        if scale is not None:
            out = out * scale
        if divisor is not None:
            out = out / divisor
        if softcap is not None:
            out = (out / softcap).tanh() * softcap
        return out

    return finish


@contextmanager
def unsupported_if_it_fails(model: Any) -> Iterator[None]:
    """Turn what a model raises in the passes of the block into an UnsupportedModelError that names the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, ImportError) as error:
        method = quantized_by(model.config)
        quantized = "" if method is None else f", quantized by {method},"
        raise UnsupportedModelError(
            f"{model.config.model_type}{quantized} can't run a pass with eyas's masks, positions and cache in "
            f"{model.dtype} on {model.device}: {type(error).__name__}: {error}; "
            + ("use another model" if method is None else "use the dtype it was quantized in, or the unquantized model")
        ) from error


def refuse_encoder(model: Any, token: Tensor) -> None:
    """Raise UnsupportedModelError for a model whose tokens attend to later ones, tested with a `token` [1, 1].

    Raises ModelError if its logits aren't finite.
    """
    if not reads_only_before(model, token):
        if not model(input_ids=token, use_cache=False).logits.isfinite().all():
            raise ModelError(
                f"the weights of this {model.config.model_type} compute no numbers (NaN or infinity): the checkpoint "
                "is damaged, or its dtype too narrow for it; download it again, or use `dtype=float32`"
            )
        raise UnsupportedModelError(
            f"{model.config.model_type} is an encoder: its tokens attend to later ones; use a decoder, or set "
            "is_decoder in its config if it was trained as one"
        )


def reads_only_before(model: Any, token: Tensor) -> bool:
    """Whether a model's own pass gives a `token` [1, 1] the same logits whatever token follows, as a decoder does."""
    pairs = torch.cat([torch.cat([token, token]), torch.cat([token, token + 1])], dim=1)
    first = model(input_ids=pairs, use_cache=False).logits[:, 0]
    return logits_agree(first[1:], first[:1], first.dtype)


def logits_agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of logits are equal up to the rounding of a model in `dtype`; False if either has a NaN."""
    gap = (found.float() - expected.float()).abs().max()
    scale = expected.float().abs().max()
    return bool(gap <= scale * (1e-3 if dtype == torch.float32 else 5e-2))
