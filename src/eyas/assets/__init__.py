"""Where the embedded demo pair lies."""

from __future__ import annotations

from pathlib import Path

_DEMO = Path(__file__).parent / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFTER = _DEMO / "drafter"
