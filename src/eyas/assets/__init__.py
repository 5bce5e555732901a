"""Where the embedded demo pair lies."""

from __future__ import annotations

from pathlib import Path

_DEMO = Path(__file__).parent / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFTER = _DEMO / "drafter"

DEMO = "demo"
"""The embedded pair's name wherever a model or drafter is named; a folder called so is `./demo`."""


def named_target(name: str | Path) -> str:
    """A directory or Hub id as it is, and the embedded target for `demo`."""
    return str(DEMO_TARGET) if name == DEMO else str(name)


def named_drafter(name: str | Path) -> str:
    """The same for drafters."""
    return str(DEMO_DRAFTER) if name == DEMO else str(name)
