"""How a torture ends: its findings and which promises held are printed and written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from eyas.bench.machine import describe_machine
from eyas.files import write_json


def conclude(findings: Mapping[str, Any], held: Mapping[str, bool], output: Path | None) -> None:
    """Print and keep what was found and which promises held; the process fails if one didn't."""
    report = {"date": str(date.today()), "machine": describe_machine(), **findings, "held": dict(held)}
    print(json.dumps(report, indent=2))
    if output is not None:
        write_json(output, report)
    if not all(held.values()):
        raise SystemExit(1)
