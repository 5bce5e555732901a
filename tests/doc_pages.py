"""Parsed pages of the documentation, and a command line that only parses its arguments."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache, wraps
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from eyas.cli.common.options import parse_final, parse_taps
from eyas.cli.common.verb import DefaultGroup, add_verb
from eyas.config import load_config
from eyas.labs.sweep.search import SweepConfig
from eyas.recipes import SWEEPS, find_recipe
from eyas.train.recipe import load_recipe
from eyas.tree import is_auto, parse_tree

from .verbs import DEFAULTED, GROUPS, VERBS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")), ROOT / "src/eyas/assets/smollm2/README.md",
    ROOT / "examples/README.md",
]  # fmt: skip

PROGRAMS = ("eyas", "python", "torchrun", "make", "pip", "hf", "curl", "source", "sed")
"""First words of indented lines that are commands."""


@dataclass(frozen=True)
class Block:
    """A fenced or indented block of a page."""

    page: Path
    line: int
    language: str
    """The fence's language; empty for indented blocks."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Every block of a page: those between fences, and those indented by four spaces after an empty line."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start = at
        fence = re.match(r"( *)```(.*)", lines[at])
        if fence:
            while not lines[at := at + 1].startswith(f"{fence[1]}```"):
                pass
            text = textwrap.dedent("\n".join(lines[start + 1 : at]))
            found.append(Block(page, start + 2, fence[2].strip(), text))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at + 1 < len(lines) and (lines[at + 1].startswith("    ") or not lines[at + 1].strip()):
                at += 1
            found.append(Block(page, start + 1, "", textwrap.dedent("\n".join(lines[start : at + 1]))))
        at += 1
    return tuple(found)


def commented_commands(recipe: Path) -> Block:
    """The indented commands in a recipe's comments."""
    lines = [line[1:] for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#     ")]
    return Block(recipe, 1, "bash", textwrap.dedent("\n".join(lines)))


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block; continuation lines and open quotes belong to the command they began in."""
    if block.language not in ("bash", ""):
        return
    if not block.language and not block.text.startswith(PROGRAMS):
        return
    open_line = ""
    for line in block.text.splitlines():
        open_line = f"{open_line}{line}"
        if open_line.endswith("\\"):
            open_line = open_line.removesuffix("\\")
            continue
        try:
            words = shlex.split(open_line, comments=True)
        except ValueError:  # a quotation continues on the next line
            open_line += "\n"
            continue
        open_line = ""
        yield from _single(words)
    assert not open_line, f"{block}: the last command has no end"


def _single(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line that joins several with && or |, without the variables set for them."""
    command: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", "|"):
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []
        else:
            command.append(word)


# The command line: the real options, aliases and checks, with verbs that only check their arguments.


def placeholder(word: str) -> bool:
    """Whether this is a placeholder for a reader's own value, such as MODEL, RUN/pick or `...`."""
    return word == "..." or bool(re.match(r"[A-Z][A-Z_0-9]+\b", word)) or Path(word).stem.isupper()


def _look_at(verb: str, values: dict[str, Any]) -> None:
    """Check the values that a verb parses itself. Raises EyasError."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        given |= asdict(value) if is_dataclass(value) and not isinstance(value, type) else {name: value}
    trees = given.get("tree") or []
    for tree in [trees] if isinstance(trees, str) else trees:
        if not is_auto(tree) and not placeholder(tree):
            parse_tree(tree)
    for name, parse in (("taps", parse_taps), ("final", parse_final)):
        if name in given and given[name] is not None:
            parse(given[name])
    if verb in ("train", "sweep"):
        name = given["recipe" if verb == "train" else "file"]
        if placeholder(name) or placeholder(Path(name).name) or name == "sweep.yaml":  # the file that the page shows
            return
        overrides = [each for each in given["overrides"] or () if each != "..."]
        if verb == "sweep":
            load_config(SweepConfig, find_recipe(name, SWEEPS), overrides)
            return
        if name in GENERAL_RECIPES:  # they leave all three of `needs` to the reader
            written = {each.split("=")[0] for each in overrides}
            needs = [f"drafter.{each}" for each in ("target", "store", "output")]
            overrides += [f"{each}=X" for each in needs if each not in written and "..." in given["overrides"]]
        load_recipe(name, overrides)


GENERAL_RECIPES = ("eagle1", "eagle3", "eagle3_1", "mla", "mlp", "medusa")
"""Recipes for any target."""


def _only_parsing(name: str, function: Callable[..., int | None]) -> Callable[..., None]:
    @wraps(function)
    def looks(**values: Any) -> None:
        _look_at(name, values)

    return looks


@cache
def command_line() -> Any:
    """The `eyas` command with verbs that do nothing."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    for name, function in VERBS.items():
        add_verb(app, name, _only_parsing(name, function))
    for group, (text, verbs) in GROUPS.items():
        part = typer.Typer(name=group, help=text, add_completion=False, rich_markup_mode=None)
        for name, function in verbs.items():
            add_verb(part, name, _only_parsing(f"{group} {name}", function))
        app.add_typer(part, cls=DefaultGroup if group in DEFAULTED else TyperGroup)

    @app.callback()
    def options(debug: bool = False, version: bool = False) -> None:
        """Options of `eyas` itself."""

    with files_need_not_exist():
        return typer.main.get_command(app)


def parse(words: list[str]) -> str:
    """Parse the arguments of `eyas`; returns the error message, or an empty string."""
    said = StringIO()
    with files_need_not_exist(), redirect_stdout(said), redirect_stderr(said):
        try:
            command_line().main(words, prog_name="eyas")
        except SystemExit as ended:
            return said.getvalue() or "failed" if ended.code else ""
    return ""


@contextmanager
def files_need_not_exist() -> Iterator[None]:
    """Let options take files that don't exist."""
    with pytest.MonkeyPatch.context() as patch:
        never = property(lambda _self: False, lambda _self, _value: None)
        patch.setattr(typer.models.ParameterInfo, "exists", never, raising=False)
        yield


def named_verb(words: list[str]) -> Any:
    """The command named by the first words; None for a group. KeyError if they name neither."""
    found = command_line()
    for word in words:
        if not hasattr(found, "commands"):
            return found
        if word.startswith("-") or word not in found.commands:
            if isinstance(found, DefaultGroup):
                return next(iter(found.commands.values()))
            raise KeyError(word)
        found = found.commands[word]
    return None if hasattr(found, "commands") else found


class _ArgumentsReadError(Exception):
    """Ends a script once it has read its arguments."""


def parse_script(name: str, words: list[str]) -> str:
    """Let a script or module only read its arguments; returns the error message, or an empty string."""
    known, whole = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch:

        def read_known(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
            known(parser, words)
            raise _ArgumentsReadError

        def read(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
            whole(parser, words)
            raise _ArgumentsReadError

        patch.setattr(argparse.ArgumentParser, "parse_known_args", read_known)
        patch.setattr(argparse.ArgumentParser, "parse_args", read)
        patch.setattr(sys, "argv", [name, *words])
        for module in (name, f"{name}.__main__"):  # a module that a test has imported is run again
            patch.delitem(sys.modules, module, raising=False)
        try:
            if name.endswith(".py"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        except _ArgumentsReadError:
            return ""
        except SystemExit:
            return f"{name} does not take {shlex.join(words)}"
        except (ImportError, OSError) as error:
            return f"{name} can't be run: {error}"
    return f"{name} reads no arguments"
