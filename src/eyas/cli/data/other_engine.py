"""The program that `--engine` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eyas.plugins import feature

if TYPE_CHECKING:
    from eyas.data.other_engine import MakeOtherEngine, OtherEngine


def other_engine(name: str, command: str | None, options: Sequence[str]) -> OtherEngine:
    """The program, from the values of --engine, --engine-command and --engine-option."""
    make: MakeOtherEngine = feature("other_engine", f"--engine {name}")
    return make(name, command, tuple(options))
