"""What eyas must know of a model's architecture, read from its config and modules, never from its name.

`refuse_unsupported` judges a model before any weight is read; `logits_agree` judges, at load, whether the model still
computes the same when it is run in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from eyas.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionPlan:
    """The attention types of a model's layers."""

    windows: dict[str, int | None]
    """Attention type -> number of latest positions that it sees; None = all."""

    @property
    def hybrid(self) -> bool:
        """Whether there is more than one type: the model then takes a mask for each."""
        return len(self.windows) > 1


def attention_plan(config: Any) -> AttentionPlan:
    """The attention types of a decoder with this text config.

    Raises UnsupportedModelError for layers whose state can't be rolled back.
    """
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
    """Raise UnsupportedModelError where class and config show that a model can't be verified with trees."""
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
    """The class that `AutoModelForCausalLM` makes of a config; None if it knows none."""
    try:
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None
    chosen: type[Any] = found[0] if isinstance(found, tuple) else found
    return chosen


def quantized_by(config: Any) -> str | None:
    """The method that a checkpoint's weights are quantised with, as its config names it; None if they are not."""
    settings = _quantization(config)
    return None if settings is None else str(getattr(settings["quant_method"], "value", settings["quant_method"]))


def refuse_quantization(config: Any) -> None:
    """Raise UnsupportedModelError for a method that transformers doesn't know, which it takes for none, and LLM.int8.

    In LLM.int8 a token's results depend on the others of its pass, so that no pass repeats another.
    """
    settings = _quantization(config)
    if settings is None:
        return
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0) > 0:
        raise UnsupportedModelError(
            "the checkpoint is quantised by bitsandbytes in 8 bits with outliers (LLM.int8): which columns stay in 16 "
            "bits depends on all tokens of a pass, so neither speculation nor a batch repeats plain decoding; use 4 "
            "bits, torchao, or llm_int8_threshold 0"
        )
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise UnsupportedModelError(
            f"the checkpoint is quantised by {quantized_by(config)}, which this transformers can't read; use one "
            f"quantised by {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}, or the unquantised model"
        )


def _quantization(config: Any) -> dict[str, Any] | None:
    """The settings that a config gives for quantised weights; None if it gives none."""
    parts = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    found = next((part for part in parts if part is not None), None)
    settings = found if found is None or isinstance(found, dict) else found.to_dict()
    return None if settings is None else {"quant_method": "a method that isn't named", **settings}


def context_limit(config: Any) -> int | None:
    """The longest sequence that a model takes; None if its config names none.

    Where RoPE's frequencies change once a sequence outgrows the original context, that context is the limit: keys
    cached before would be stale, and a tree that reaches beyond it would change the tokens before it.
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
    """The decoder layers: the one ModuleList of the (text) decoder with `count` members.

    Raises UnsupportedModelError if there is none.
    """
    base: Any = model.base_model
    base = base.get_decoder() if hasattr(base, "get_decoder") else base
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    direct = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    found = direct or lists
    if not found:
        raise UnsupportedModelError(
            f"no list of {count} decoder layers found in {type(base).__name__}: taps can't be placed in this model"
        )
    return found[0]


def logit_finish(config: Any) -> Callable[[Any], Any]:
    """What a model's forward applies to its head's output: scaling and soft-capping, or nothing."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if softcap is scale is divisor is None:
        return nn.Identity()

    def finish(out: Any) -> Any:
        if scale is not None:
            out = out * scale
        if divisor is not None:
            out = out / divisor
        if softcap is not None:
            out = (out / softcap).tanh() * softcap
        return out

    return finish


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the model config's, and the tokenizer's, if any."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


@contextmanager
def refused_where_it_fails(model: Any) -> Iterator[None]:
    """Raise UnsupportedModelError, naming the model, for whatever it raises in the passes of the block."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, ImportError) as error:
        method = quantized_by(model.config)
        quantized = "" if method is None else f", quantised by {method},"
        raise UnsupportedModelError(
            f"{model.config.model_type}{quantized} can't run a pass with eyas's masks, positions and cache in "
            f"{model.dtype} on {model.device}: {type(error).__name__}: {error}; "
            + ("use another model" if method is None else "use the dtype it was quantised in, or the unquantised model")
        ) from error


def refuse_encoder(model: Any, token: Tensor) -> None:
    """Raise UnsupportedModelError for a model whose tokens attend to later ones, tried with a `token` [1, 1]."""
    if not reads_only_before(model, token):
        raise UnsupportedModelError(
            f"{model.config.model_type} is an encoder: its tokens attend to later ones; use a decoder, or set "
            "is_decoder in its config if it was trained as one"
        )


def reads_only_before(model: Any, token: Tensor) -> bool:
    """Whether a model's own pass gives a `token` [1, 1] the same logits whatever follows it, as decoders do."""
    pairs = torch.cat([torch.cat([token, token]), torch.cat([token, token + 1])], dim=1)
    first = model(input_ids=pairs, use_cache=False).logits[:, 0]
    return logits_agree(first[1:], first[:1], first.dtype)


def logits_agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of logits are equal but for the rounding of a model in `dtype`; never if one has a NaN."""
    gap, scale = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    return bool(gap <= scale * (1e-3 if dtype == torch.float32 else 5e-2))
