"""eyas: lossless speculative decoding with EAGLE drafters, and the whole life of a drafter.

The public names; each is imported when it is first used, so `import eyas` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.errors import EyasError
    from eyas.session import load
    from eyas.text.dialogue import Conversation
    from eyas.types import Chunk, Completion, GrammarSpec, Request, SamplingParams, Stats, TokenLogprobs

__version__ = "0.3.0"

__all__ = [
    "Chunk",
    "Completion",
    "Conversation",
    "Engine",
    "EyasError",
    "GrammarSpec",
    "Request",
    "SamplingParams",
    "Stats",
    "TokenLogprobs",
    "__version__",
    "load",
]

_HOMES = {
    "eyas.engine": ("Engine",),
    "eyas.errors": ("EyasError",),
    "eyas.session": ("load",),
    "eyas.text.dialogue": ("Conversation",),
    "eyas.types": ("Chunk", "Completion", "GrammarSpec", "Request", "SamplingParams", "Stats", "TokenLogprobs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
