"""`eyas cache`: what eyas keeps in the user's cache."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from typer import Argument, Option

from eyas.cli.common.display import note, output
from eyas.cli.common.options import Json
from eyas.errors import UsageError

_DAY = 86400.0
"""Seconds."""


def cache(
    parts: Annotated[list[str] | None, Argument(metavar="[PART]...", help="Parts of the cache (default: all).")] = None,
    clear: Annotated[
        bool, Option("--clear", help="Remove what these parts hold. It is made again when needed.")
    ] = False,
    unused_days: Annotated[
        float | None, Option(min=0.0, metavar="DAYS", help="With --clear: only what wasn't used for this many days.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List what eyas keeps in your cache, or clear it.

    Everything there can be made again: configs of GGUF files, measurements of this machine, compiled kernels. Only what
    --tree auto has learned of your drafters (machine) has to be learned again.

    Examples:
        eyas cache
        eyas cache --clear panels
        eyas cache --clear --unused-days 30
    """
    if unused_days is not None and not clear:
        raise UsageError("--unused-days says what --clear removes: add --clear")
    from eyas.cache import folder
    from eyas.tables import show_table

    if clear:
        freed = folder.clear(parts or (), (unused_days or 0.0) * _DAY)
        note(f"removed {freed / 1e6:,.1f} MB from {folder.cache_directory()}")
    found = [part for part in folder.contents() if not parts or part.name in parts]
    if as_json:
        typer.echo(
            json.dumps({"folder": str(folder.cache_directory()), "parts": [part._asdict() for part in found]}, indent=2)
        )
        return
    from rich.table import Table

    table = Table("part", "holds", "entries", "MB", "last used")
    for part in found:
        used = time.strftime("%Y-%m-%d", time.localtime(part.latest)) if part.entries else ""
        table.add_row(part.name, part.about, f"{part.entries:,}", f"{part.bytes / 1e6:,.1f}", used)
    typer.echo(f"{folder.cache_directory()}: {sum(part.bytes for part in found) / 1e6:,.1f} MB")
    if found:
        show_table(output(), table)
