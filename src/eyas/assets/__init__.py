"""Where the embedded demo pair lies."""

from __future__ import annotations

from pathlib import Path

_DEMO = Path(__file__).parent / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFTER = _DEMO / "drafter"

DEMO = "demo"
"""The embedded pair's name in recipes; a folder of that name is `./demo`."""


def named_target(name: str) -> str:
    """A target as a recipe writes it: a folder, a Hub id, or `demo`."""
    return str(DEMO_TARGET) if name == DEMO else name


def named_drafter(name: str) -> str:
    """A drafter as a recipe writes it."""
    return str(DEMO_DRAFTER) if name == DEMO else name
