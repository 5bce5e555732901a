"""The toy pair: a real but tiny language model and its drafters, for tests and benchmarks of machinery (README.md)."""

from __future__ import annotations

from pathlib import Path

TOY = Path(__file__).parent
TOY_TARGET = TOY / "target"
TOY_DRAFTER = TOY / "drafter"
TOY_PAIR = ("--model", str(TOY_TARGET), "--draft-model", str(TOY_DRAFTER))
"""The pair on a command line."""
