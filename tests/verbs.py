"""All verbs of `eyas`, those of its labs among them, as functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from eyas.cli.app import VERBS as REGISTERED

Verb = Callable[..., "int | None"]

VERBS: dict[str, Verb] = {name: found for name, found in REGISTERED.items() if not isinstance(found, ModuleType)}
GROUPS: dict[str, tuple[str, dict[str, Verb]]] = {
    name: (found.__doc__ or "", found.VERBS) for name, found in REGISTERED.items() if isinstance(found, ModuleType)
}
"""Group -> its help and its verbs."""
DEFAULTED = {name for name, found in REGISTERED.items() if hasattr(found, "DEFAULT")}
"""Groups that run their first verb if none is named."""
