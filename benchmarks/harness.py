"""Shared by the scripts of this folder: a command line made from a function, sides that take turns, and the report.

A script decorates its `main`, and ends with `raise SystemExit(main())` under the usual `__name__` guard:

    @script
    def main(model: str, *, repeats: Annotated[int, "turns that count"] = 5, output: Output = None) -> None:
        seconds = interleave({"eyas": ours, "plain": theirs}, repeats)
        report({"ratio": paired(seconds["eyas"], seconds["plain"])}, output)
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from eyas.bench.machine import describe_machine
from eyas.bench.offline.runner import rotated
from eyas.files import write_json

T = TypeVar("T")
_WIDTH = 80
"""Columns of a terminal."""

Output = Annotated[Path | None, "the JSON file"]


# The command line.


def script(*verbs: Callable[..., int | None]) -> Callable[[], int | None]:
    """Turn a function into a script: its parameters are the command line, its module's docstring is the help.

    Positional parameters become arguments, keyword-only ones options; those without a default are required.
    `Sequence[T]` takes any number of words, `tuple[T, T]` two, `Literal` one of its values, `bool` none. The text in
    `Annotated` is the help; a function after it parses the word. A dataclass as the only parameter contributes its
    fields. The return value is the exit code. With several functions, the first word selects one.
    """

    @wraps(verbs[0])
    def run() -> int | None:
        page = inspect.getmodule(verbs[0])
        parser = argparse.ArgumentParser(
            description=page.__doc__ if page else None, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if len(verbs) == 1:
            _declare(parser, verbs[0])
        else:
            choice = parser.add_subparsers(required=True)
            for verb in verbs:
                _declare(choice.add_parser(verb.__name__, description=verb.__doc__), verb)
        values = vars(parser.parse_args())
        code: int | None = values.pop("")(values)
        return code

    return run


def _declare(parser: argparse.ArgumentParser, verb: Callable[..., int | None]) -> None:
    """Add a function's parameters to a parser, and under the name "" a call of it with the parsed values."""
    hints = get_type_hints(verb, include_extras=True)
    group = next((hint for hint in hints.values() if is_dataclass(hint)), None)
    source: Any = group or verb
    hints = get_type_hints(source, include_extras=True)
    for name, parameter in inspect.signature(source).parameters.items():
        _add(parser, parameter, hints[name])
    parser.set_defaults(**{"": (lambda values: verb(source(**values))) if group else lambda values: verb(**values)})


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    """Add one parameter."""
    kind, text, *parse = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    needed, option = parameter.default is parameter.empty, parameter.kind is parameter.KEYWORD_ONLY
    settings: dict[str, Any] = {"help": text} if needed else {"help": text, "default": parameter.default}
    if get_origin(kind) in (Union, UnionType):  # T | None
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if parse:
        (kind,) = parse
    elif get_origin(kind) is Sequence:
        settings["nargs"], (kind,) = "+" if needed and not option else "*", get_args(kind)
    elif get_origin(kind) is tuple:
        settings["nargs"] = len(get_args(kind))
        kind = get_args(kind)[0]
    elif not needed and not option:
        settings["nargs"] = "?"
    if kind is bool:
        settings["action"] = "store_true"
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    else:
        settings["type"] = kind
    if option:
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", required=needed, **settings)
    else:
        parser.add_argument(parameter.name, **settings)


# Measuring.


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleave(sides: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """The results of every side in each of `repeats` turns, after a warm-up turn that doesn't count.

    Every turn runs all sides one after another and begins with a different one, so other load on the machine affects
    all of them alike.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name in rotated(list(sides), turn):
            result = sides[name]()
            if turn:
                found[name].append(result)
    return found


def paired(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The median and the range of the ratios of values measured in the same turn."""
    ratios = [a / b for a, b in zip(values, others, strict=True)]
    named = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in named.items()}


# The report.


def report(content: Mapping[str, Any], output: Path | None = None, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Print a measurement (as a table if it has `rows`), and write it with its date, command and machine."""
    made = described(content)
    if rows:
        made["rows"] = list(rows)
        Console(width=_WIDTH).print(table(rows))
    else:
        print(json.dumps(made, indent=2), flush=True)
    if output is not None:
        write_json(output, made)


def described(content: Mapping[str, Any]) -> dict[str, Any]:
    """A measurement with its date, command and machine."""
    return {"date": str(date.today()), "command": command(), "machine": describe_machine(), **content}


def command() -> str:
    """The running command, as a reader would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    return shlex.join(["", *sys.argv[1:]]).replace("''", name, 1)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows as a table; a mapping in a row gets a column for each of its values."""
    flat = [_flat(row) for row in rows]
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    names = dict.fromkeys(name for row in flat for name in row)
    cells = {name: [_cell(row.get(name)) for row in flat] for name in names}
    titles = [name.replace("_", " ") for name in cells]  # a long name breaks between its words, where it must
    widths: Sequence[int | None] = [None] * len(titles)
    for parts in ([title.split() for title in titles], [[title] for title in titles]):
        wanted = [max(map(len, [*own, *column])) for own, column in zip(parts, cells.values(), strict=True)]
        widths = wanted if sum(wanted) + len(wanted) <= _WIDTH else widths
    for title, width in zip(titles, widths, strict=True):
        made.add_column(title, overflow="fold", width=width)
    for row in zip(*cells.values(), strict=True):
        made.add_row(*row)
    return made


def _flat(row: Mapping[str, Any]) -> dict[Any, Any]:
    flat: dict[Any, Any] = {}
    for name, value in row.items():
        flat |= {f"{name} {key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
