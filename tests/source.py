"""The source code for tests of its structure: files, module names and imports."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "eyas"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """What a file calls, as it is written there, and with what."""
    return [(ast.unparse(node.func), node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]


def ids(path: Path) -> str:
    """A file's name in messages: relative to the package."""
    return path.relative_to(SOURCE).as_posix()


def module(path: Path) -> str:
    """A file's dotted module name."""
    return ".".join(("eyas", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@cache
def importers() -> dict[str, set[str]]:
    """File -> the files that import it. A name that a package re-exports counts for the file that defines it."""
    files = {module(path): ids(path) for path in FILES}
    handed_on: dict[str, str] = {}
    found: dict[str, set[str]] = defaultdict(set)
    inner_packages_first = sorted(FILES, key=lambda path: (path.name != "__init__.py", -len(path.parts)))
    for path in inner_packages_first:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                homes = {alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                named = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                homes = {name: n if n in files else handed_on.get(n, node.module) for name, n in named.items()}
            else:
                continue
            for name, home in homes.items():
                if path.name == "__init__.py":
                    handed_on[f"{module(path)}.{name}"] = home
                elif home in files:
                    found[files[home]].add(ids(path))
    return found
