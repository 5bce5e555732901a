"""`eyas inspect`: what a model's or drafter's directory contains."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from eyas.cli.common.aliases import in_options
from eyas.cli.common.build import hide_progress_bars
from eyas.cli.common.display import output
from eyas.cli.common.options import Json
from eyas.cli.common.verb import FAILURE
from eyas.errors import UsageError
from eyas.hub import find_files, find_target
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.interop.inspect.report import DrafterReport, TargetReport


def inspect(
    source: Annotated[str, Argument(help="A directory, GGUF file or Hub id.", metavar="MODEL")],
    model: Annotated[str | None, Option(help="The target a drafter is meant for.")] = None,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show every key of a drafter's files.")] = False,
    json: Json = False,
) -> int:
    """Describe a target or a drafter, and what is suspicious about it.

    Exit code 1: it can't be used.

    Examples:
        eyas inspect MODEL
        eyas inspect DRAFTER --model MODEL --verbose
    """
    find_files(source)
    if model is not None:
        find_target(model)
    hide_progress_bars()
    report = _examine(source, model)
    if json:
        typer.echo(jsonlib.dumps(report.as_dict()))
    else:
        _print(report.as_dict(), verbose)
    return FAILURE if report.problems else 0


def _examine(source: str, model: str | None) -> TargetReport | DrafterReport:
    from eyas.drafters.files import Headers
    from eyas.gguf import Gguf
    from eyas.gguf_config import is_companion
    from eyas.interop.inspect.report import detect, headers_at, locate, report_drafter, report_heads, report_target

    found = locate(source)
    if found.path is None or found.path.is_dir():
        headers = Headers() if found.path is None else headers_at(found.path)
        kind = detect(found.config, headers)
        if kind == "unknown":
            raise UsageError(f"{source}: config.json names no architecture, and there are no tensors of a drafter")
        if kind == "target":
            return report_target(source, None if found.path is None else headers)
    assert found.path is not None  # a drafter's files are always fetched
    target = None if model is None else report_target(model, None).profile
    if found.path.is_file() and is_companion(Gguf(found.path)):
        return report_heads(found.path, target)
    report = report_drafter(found.path, target)
    if model is None or target is None or report.target_fingerprint is None or locate(model).path is None:
        return report
    # the weights are at hand, and the drafter says which ones it was made for
    return report_drafter(found.path, replace(target, fingerprint=_fingerprint(model)))


def _fingerprint(model: str) -> str:
    from eyas.targets import load_target
    from eyas.targets.fingerprint import fingerprint

    return fingerprint(load_target(model, dtype="bfloat16", device="cpu", prepacked=False).model)


def _print(report: dict[str, Any], verbose: bool) -> None:
    from rich.table import Table

    show = _plain if verbose else _brief
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        if name not in ("problems", "warnings") and value not in (None, [], {}, "") and (verbose or name != "used"):
            table.add_row(name.replace("_", " "), _SHOW_FIELD.get(name, show)(value))
    console = output()
    show_table(console, table)
    for kind in ("problems", "warnings"):
        for message in report[kind]:
            console.print(in_options(f"{kind[:-1]}: {message}"))
    if report["role"] == "drafter" and not verbose:
        console.print("--verbose shows every key of its files, --json all of this as JSON")


def _brief(value: Any) -> str:
    """A mapping's values on one line, without those that are unset or off, and without nested ones."""
    if not isinstance(value, dict):
        return _plain(value)
    shown = {key: each for key, each in value.items() if each is not None and each is not False}
    return ", ".join(f"{key} {_plain(each)}" for key, each in shown.items() if not isinstance(each, dict | list))


def _windows(attention: dict[str, int | None]) -> str:
    return "\n".join(f"{kind}: {window or 'all'} positions" for kind, window in attention.items())


def _origins(stops: dict[int, str]) -> str:
    """The stop ids, those from one place together."""
    found: dict[str, list[str]] = {}
    for token, place in stops.items():
        found.setdefault(place, []).append(str(token))
    return "\n".join(f"{', '.join(tokens)}: {place}" for place, tokens in found.items())


_SHOW_FIELD: dict[str, Callable[[Any], str]] = {
    "attention": _windows, "stop_ids": _origins, "known_drafters": "\n".join, "windows": "\n".join,
}  # fmt: skip
"""Entries of a report that are shown in their own way."""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(_entry(key, each) for key, each in value.items() if each is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _entry(key: str, value: Any) -> str:
    text = _plain(value)
    return f"{key}:\n{indent(text, '  ')}" if isinstance(value, dict) else f"{key}: {text}"
