"""How a torture ends: its findings and which promises held are printed and written down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report


def conclude(findings: Mapping[str, Any], held: Mapping[str, bool], output: Path | None) -> None:
    """Print and keep what was found and which promises held; the process fails if one didn't."""
    report({**findings, "held": dict(held)}, output)
    if not all(held.values()):
        raise SystemExit(1)
