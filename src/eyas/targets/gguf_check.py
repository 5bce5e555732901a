"""Comparing a target with its GGUF file after transformers has built it.

The config states what the file says, but a class may read a value elsewhere, or not at all. So the values that the
modules actually use are compared with the file's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eyas.errors import ModelError
from eyas.gguf import Gguf
from eyas.gguf_config import FULL, SLIDING, Model
from eyas.targets.architecture import attention_plan


def check_model(file: Path, model: Any) -> None:
    """Raise ModelError if a model built from a file, perhaps its first layers only, computes with other numbers.

    Compared are RoPE's frequencies and factors, windows, epsilons, the scale of attention scores, and soft caps.
    """
    facts = Model.read(Gguf(file))
    for what, found, expected in _pairs(facts, model):
        if found != expected and not _near(found, expected):
            raise ModelError(
                f"{type(model).__name__} computes with {what} {found}, and {file} says {expected}: this release of "
                "transformers can't run the file; use the model's own folder"
            )


def _pairs(facts: Model, model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield names of numbers, what a model computes with, and what the file says."""
    config = model.config.get_text_config()
    plan = attention_plan(config)
    layers = config.num_hidden_layers
    windows = [facts.window if kind == SLIDING else None for kind in facts.kinds][:layers]
    if facts.scale is not None:
        yield "windows", [plan.windows.get(kind) for kind in plan.of_layers(config)], windows
    yield "a cap of logits of", getattr(config, "final_logit_softcapping", None), facts.caps[1]
    for name, module in model.named_modules():
        for attribute in () if name.endswith(_LATENT_NORMS) else ("variance_epsilon", "eps", "epsilon"):
            if isinstance(value := getattr(module, attribute, None), float):
                yield f"an epsilon in {name} of", value, facts.epsilon
        if name.rpartition(".")[2] in _ATTENTION:
            for attribute in ("scaling", "inv_norm_factor"):
                if isinstance(value := getattr(module, attribute, None), float):
                    yield f"a scale in {name} of", value, facts.scale
            yield f"a cap of scores in {name} of", getattr(module, "attn_logit_softcapping", None), facts.caps[0]
        for key, value in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and not key.endswith("original_inv_freq"):
                yield from _rope(facts, module, key, value)


_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Norms of latents: their epsilon is 1e-6 in the code of models; llama.cpp takes the file's, 1e-5 for GLM-4.7-Flash."""
_ATTENTION = ("self_attn", "attn", "self_attention")


def _rope(facts: Model, module: Any, key: str, value: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yield RoPE's frequencies and factor in a module; modules with several name them by the kind of layer."""
    kind = key.removesuffix("inv_freq")
    rope = facts.ropes.get(kind.rstrip("_") or FULL) or next(iter(facts.ropes.values()), None)
    if rope is None:
        return
    yield "RoPE's frequencies", value.double().tolist(), rope.frequencies.tolist()
    yield "RoPE's factor", float(getattr(module, f"{kind}attention_scaling", 1.0)), rope.factor


def _near(found: Any, expected: Any) -> bool:
    """Whether numbers, or lists of them, are equal but for float32's rounding."""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return all(one == other or _near(one, other) for one, other in zip(found, expected, strict=True))
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-5)
    return False
