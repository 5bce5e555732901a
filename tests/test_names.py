"""Names are the field's, docstrings say something, and a class's name is its own."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from .source import FILES, SOURCE, ids, parsed

PRIVATE = {
    "told": "observed, notified, reported", "tell": "observe, notify, report", "asked": "request, body, settings",
    "hear": "an external report", "heard": "an external report", "hearing": "an external report",
    "live": "drafting (rows), unfinished (sequences)", "place": "node, index, path, folder, position",
    "placed": "running, in slots", "sibling": "fused linears", "envelope": "RequestIdMiddleware",
    "ticket": "RequestHandle", "subject": "what it is", "wish": "what it is",
}  # fmt: skip
"""word of a name (or its plural) -> what the field says."""
ALLOWED = {
    ("data/regenerate/journal.py", "asked"): "a key of the lines of a journal",
    ("data/store/manifest.py", "ends"): "a key of a store's manifest",
    ("engine/controller/costs.py", "padding_by_places"): "a key of saved costs",
}
"""(file, name) -> why it may stay: keys that files on disk hold, or names that a library prescribes."""
SHORTEST, MOST_SHORT = 29, 60
TWINS: dict[str, str] = {}
"""Class names of several rooms -> why."""


def words(name: str) -> list[str]:
    """`_readTwo_HTTPLines` -> read, two, http, lines."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def identifiers(path: Path) -> Iterator[str]:
    """The names in a file: its own, its folders', functions, classes, parameters, assigned and imported names."""
    yield from path.relative_to(SOURCE).with_suffix("").parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


def complaint(name: str) -> str | None:
    """What the field says instead; None for a name that is fine."""
    parts = words(name)
    for word in parts:
        if (singular := "wish" if word == "wishes" else word.removesuffix("s")) in PRIVATE:
            return PRIVATE[singular]
    if parts[-1:] == ["ends"]:
        return "embedding and head"
    if ("few", "queries") in itertools.pairwise(parts):
        return "decode attention"
    return "CircuitBreaker" if name == "Fuse" else None


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("heard_report", False), ("Wish", False), ("TargetEnds", False), ("_key_ends", False), ("Fuse", False),
        ("FewQueries", False), ("node_places", False), ("is_live", False), ("Tickets", False),
        ("wishes", False), ("tells", False), ("asked_tokens", False), ("tasked", True),
        ("prepacked", True), ("fuse_taps", True), ("keep_few_kernels", True), ("replace", True), ("delivered", True),
        ("intelligible", True), ("append_subjective", True), ("extends", True), ("_", True),
    ],
)  # fmt: skip
def test_words_are_told_apart(name: str, fine: bool) -> None:
    assert (complaint(name) is None) == fine


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_names_are_the_field_s(path: Path) -> None:
    found = {name: instead for name in identifiers(path) if (instead := complaint(name))}
    wrong = [f"{name} (say: {instead})" for name, instead in found.items() if (ids(path), name) not in ALLOWED]
    assert not wrong, f"{ids(path)} has private words in names: {', '.join(sorted(wrong))}"


def test_what_is_allowed_is_there() -> None:
    assert all(name in set(identifiers(SOURCE / file)) for file, name in ALLOWED)


def test_docstrings_say_something() -> None:
    short = [
        f"{ids(path)}:{getattr(node, 'lineno', 1)} {text!r}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if (text := ast.get_docstring(node)) and len(text) < SHORTEST
    ]
    assert len(short) <= MOST_SHORT, "\n".join([f"{len(short)} docstrings under {SHORTEST} characters:", *short])


def test_a_class_s_name_is_that_of_one_room() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                rooms[node.name].add(path.relative_to(SOURCE).parts[0])
    twins = {name: sorted(homes) for name, homes in rooms.items() if len(homes) > 1 and name not in TWINS}
    assert not twins, f"give these names of their own: {twins}"
