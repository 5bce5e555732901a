"""`eyas serve` before it serves: options, their page, what is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.cli.serve import CapacityOptions, ServerOptions
from eyas.cli.serve_elsewhere import EngineOptions

Run = Callable[..., Result]
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def test_every_option_is_on_the_page_with_its_default() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    rows = [row for row in rows if row.count("|") == 4]  # the tables of options, not the one of other engines' words
    for group in (ServerOptions, CapacityOptions, EngineOptions):
        for field in fields(group):
            flag = "--" + field.name.replace("_", "-")
            (row,) = [row for row in rows if f"`{flag}`" in row.split("|")[1]]
