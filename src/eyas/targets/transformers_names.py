"""Names that differ between releases of transformers: the only file that knows them.

Release 5.24 renamed the argument `past_key_values` to `cache`. The arguments of a forward are read from its signature;
versions are never compared. In earlier releases, recurrent layers read their states from a cache's `layers` instead of
its methods, and rotary embeddings of vision-language models need a position on each axis. Configs of models whose
layers differ in size (Gemma 4) refuse to say the sizes that most layers have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from inspect import getmodule, signature
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils

from eyas.errors import UnsupportedModelError

_CACHES = ("past_key_values", "cache_params", "cache")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Name of the cache argument in the forward of a model, layer or attention module; None if it takes no cache."""
    taken = signature(forward).parameters
    return next((name for name in _CACHES if name in taken), None)


def cache_of(output: Any) -> Any:
    """The cache among a model's outputs; None if there is none."""
    return next((output[name] for name in reversed(_CACHES) if output is not None and name in output), None)


def attends(layer_type: str) -> bool | None:
    """Whether a layer of this type attends to keys and values; None = it attends and has a recurrent state."""
    known: dict[str, type] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
    if layer_type in ("mamba", "moe", "mlp"):  # older names, and layers that store nothing
        return False
    cached = known.get(layer_type)
    if cached is not None and issubclass(cached, getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())):
        return None if issubclass(cached, cache_utils.DynamicLayer) else False
    return cached is not getattr(cache_utils, "DummyLayer", object)


@lru_cache
def _of_class(module_class: Any) -> str:
    found = cache_argument(module_class.forward)
    if found is None:
        raise UnsupportedModelError(f"{module_class.__name__} takes no key-value cache")
    return found


@lru_cache
def _has_own_cache_class(module_class: Any) -> bool:
    """Whether a model defines its own cache class, and with `use_cache` takes no other (MiniMax)."""
    own = (each for each in vars(getmodule(module_class)).values() if isinstance(each, type))
    return any(issubclass(each, cache_utils.Cache) and each.__module__ == module_class.__module__ for each in own)


def model_cache_kwargs(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword arguments with which a whole model runs over one of our caches."""
    kind: Any = type(model)
    return {"use_cache": not _has_own_cache_class(kind), **cache_kwargs(model, cache)}


def cache_kwargs(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword arguments that pass `cache` to a module's forward."""
    kind: Any = type(module)
    return {_of_class(kind): cache}


class Numbered:
    """A function of a number, called by indexing."""

    def __init__(self, of: Callable[[int], Any]) -> None:
        self._of = of

    def __getitem__(self, number: int) -> Any:
        return self._of(number)


def layers_of(states: Any) -> Numbered:
    """The `layers` of a cache of recurrent `states`, for models that don't call `get_conv_state` and the like."""
    return Numbered(
        lambda layer: SimpleNamespace(
            conv_states=Numbered(partial(states.get_conv_state, layer)),
            recurrent_states=Numbered(partial(states.get_recurrent_state, layer)),
            record_past=states.is_recording_past(layer),
        )
    )


def config_value(config: Any, name: str) -> Any:
    """A config's value for all layers without a value of their own; None if it has none."""
    return vars(config).get(name) if getattr(config, "is_heterogeneous", False) else getattr(config, name, None)


def rotation(rotary: Any, x: Tensor, positions: Tensor, **which: Any) -> Any:
    """The output of a model's rotary embedding for text at positions [B, S], in x's dtype: [B, S, rotated] each.

    Text has the same position on all axes of an image.
    """
    axes = getattr(rotary, "mrope_section", None)
    return rotary(x, positions.expand(len(axes), *positions.shape) if axes else positions, **which)
