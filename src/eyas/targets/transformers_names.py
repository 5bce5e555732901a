"""What releases of transformers call things: the one file that knows.

Release 5.24 renamed the argument `past_key_values` to `cache`. What a forward takes is read from its signature; no
version is compared anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import nn

from eyas.errors import UnsupportedModelError


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """What a forward of a model, a layer or an attention module calls its key-value cache; None if it takes none."""
    taken = signature(forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in taken), None)


@lru_cache
def _of_class(module_class: Any) -> str:
    found = cache_argument(module_class.forward)
    if found is None:
        raise UnsupportedModelError(f"{module_class.__name__} takes no key-value cache")
    return found


def given(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword arguments that hand a module's forward its `cache`."""
    kind: Any = type(module)
    return {_of_class(kind): cache}
