"""Chats made from Python's standard library: functions to complete, and questions that docstrings answer."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.text.chats import Chat, exchange

SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "idle_test",
        "__pycache__",
        "turtledemo",
        "encodings",
        "msilib",
        "pydoc_data",
    }
)
BODY_LINES = range(2, 41)
BODY_CHARS = 2000
PROMPT_CHARS = 2000
PROSE_CHARS = range(40, 1200)

COMPLETE = "Complete the code I provided.\n\n"
FUNCTION_QUESTIONS = (
    "What does `{name}` do?",
    "Explain what the function `{name}` does.",
    "Describe `{name}` in a few words.",
    "Can you tell me how `{name}` works?",
    "I am reading Python code that calls `{name}`. What is it for?",
)
CLASS_QUESTIONS = (
    "What is the class `{name}` for?",
    "Explain the class `{name}`.",
    "Describe `{name}` and what it is used for.",
)
MODULE_QUESTIONS = (
    "What is the Python module `{name}` for?",
    "Write a short introduction to the module `{name}`.",
    "Describe the `{name}` module.",
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LibraryModule:
    """One module of the standard library: its dotted name, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module


def library_modules(root: Path | None = None) -> Iterator[LibraryModule]:
    """Every module under `root` that parses, in a stable order; by default, this interpreter's standard library."""
    base = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():  # some files have invalid escape sequences, but are usable
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        name = ".".join(part for part in parts if part != "__init__")
        if name and text.strip():
            yield LibraryModule(name, text, tree)


def chats_of(source: LibraryModule) -> Iterator[Chat]:
    """The chats made from one module: code to complete, and questions answered by its docstrings."""
    prose = _prose(source.tree)
    if prose:
        yield _question(source.name, MODULE_QUESTIONS, prose)
    for name, node in _named_nodes(source.tree, source.name):
        prose = _prose(node)
        if prose:
            yield _question(name, CLASS_QUESTIONS if isinstance(node, ast.ClassDef) else FUNCTION_QUESTIONS, prose)
        if not isinstance(node, ast.ClassDef):
            yield from _completion(name, node, source.text)


def _named_nodes(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode | ast.ClassDef]]:
    """Functions, methods and classes with their dotted names, in source order; a name may occur twice."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _named_nodes(child, name)
        elif isinstance(child, ast.If | ast.Try):
            yield from _named_nodes(child, prefix)


def _prose(node: ast.Module | ast.ClassDef | FunctionNode) -> str | None:
    text = ast.get_docstring(node)
    if not text or len(text) not in PROSE_CHARS or " " not in text:
        return None
    return text.strip()


def _question(name: str, phrasings: tuple[str, ...], answer: str) -> Chat:
    phrasing = phrasings[sum(name.encode()) % len(phrasings)]
    return exchange(f"stdlib-ask-{name}", phrasing.format(name=name), answer)


def _completion(name: str, node: FunctionNode, text: str) -> Iterator[Chat]:
    """A chat that shows a signature with its docstring and is answered by the body, both dedented to top level."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body or node.end_lineno is None:
        return
    first = body[0].lineno - 1
    head_end = (node.body[0].end_lineno or first) if body is not node.body else first
    if first < node.lineno or first < head_end:  # a one-liner can't be split between signature and body
        return
    # The prompt starts at `def`, without decorators, as in public code benchmarks.
    lines = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])).splitlines()
    cut = head_end - (node.lineno - 1)
    head = "\n".join(lines[:cut])
    tail = "\n".join(lines[cut:])
    if not head.startswith(("def ", "async def ")) or not tail.strip():
        return
    if len(tail.splitlines()) not in BODY_LINES or len(tail) > BODY_CHARS or len(head) > PROMPT_CHARS:
        return
    yield exchange(f"stdlib-code-{name}:{node.lineno}", f"{COMPLETE}{head}\n", tail.strip("\n") + "\n")
