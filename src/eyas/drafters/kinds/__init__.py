"""The drafter kinds of eyas's core: one file each, with its config, network, reader and writer of config.json."""

from __future__ import annotations

from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from eyas.plugins import Registry

if TYPE_CHECKING:
    from eyas.drafters.kind import Kind


def _wrong(name: str, found: Any) -> str | None:
    from eyas.drafters.kind import Kind

    if not isinstance(found, Kind):
        return f"it is a {type(found).__name__}, not a Kind"
    return None if found.name == name else f"its Kind is called {found.name!r}"


KINDS: Registry[Kind] = Registry(
    "eyas.drafters",
    {module.name: f"{__name__}.{module.name}:KIND" for module in iter_modules(__path__)},
    _wrong,
    reserved=("auto", "none", "prediction", "draft_model", "small-lm", "eagle3.1", "jetspec"),
)
"""All drafter kinds. A file here is named after its kind; other packages' kinds are entry points `eyas.drafters`."""
