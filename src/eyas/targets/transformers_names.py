"""What releases of transformers call things: the one file that knows.

Release 5.24 renamed the argument `past_key_values` to `cache`. What a forward takes is read from its signature; no
version is compared anywhere. In earlier ones recurrent layers reach into a cache's `layers` for their states instead of
asking it, and rotary embeddings of models that see pictures need a position on each axis.
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
    """What a forward of a model, a layer or an attention module calls its key-value cache; None if it takes none."""
    taken = signature(forward).parameters
    return next((name for name in _CACHES if name in taken), None)


def cache_of(output: Any) -> Any:
    """The cache among a model's outputs, None without one."""
    return next((output[name] for name in reversed(_CACHES) if output is not None and name in output), None)


def attends(layer_type: str) -> bool | None:
    """Whether a layer of this type attends to keys and values; None = it has a recurrent state besides."""
    known: dict[str, type] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
    if layer_type in ("mamba", "moe", "mlp"):  # older names, and layers that keep nothing
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
def _caches_its_own_way(module_class: Any) -> bool:
    """Whether a model has a class of caches of its own, and takes no other where it is told to use one (MiniMax)."""
    own = (each for each in vars(getmodule(module_class)).values() if isinstance(each, type))
    return any(issubclass(each, cache_utils.Cache) and each.__module__ == module_class.__module__ for each in own)


def cached(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword arguments with which a whole model runs over a `cache` of ours."""
    kind: Any = type(model)
    return {"use_cache": not _caches_its_own_way(kind), **given(model, cache)}


def given(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword arguments that hand a module's forward its `cache`."""
    kind: Any = type(module)
    return {_of_class(kind): cache}


class Numbered:
    """What a function gives for a number, read in brackets."""

    def __init__(self, of: Callable[[int], Any]) -> None:
        self._of = of

    def __getitem__(self, number: int) -> Any:
        return self._of(number)


def layers_of(states: Any) -> Numbered:
    """The `layers` of a cache of recurrent `states`, as models read them that don't ask it with `get_conv_state`."""
    return Numbered(
        lambda layer: SimpleNamespace(
            conv_states=Numbered(partial(states.get_conv_state, layer)),
            recurrent_states=Numbered(partial(states.get_recurrent_state, layer)),
            record_past=states.is_recording_past(layer),
        )
    )


def rotation(rotary: Any, x: Tensor, positions: Tensor, **which: Any) -> Any:
    """What a model's rotary embedding gives for text at positions [B, S], in the type of x: [B, S, rotated] each.

    Text has the same position on all axes of pictures.
    """
    axes = getattr(rotary, "mrope_section", None)
    return rotary(x, positions.expand(len(axes), *positions.shape) if axes else positions, **which)
