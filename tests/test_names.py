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
    "told": "observed, notified, reported", "tell": "observe, notify, report", "hear": "an external report",
    "hears": "an external report", "heard": "an external report", "hearing": "an external report",
    "live": "drafting (rows), unfinished (sequences)", "place": "node, index, path, folder, position",
    "places": "nodes, indices, paths, positions", "placed": "running, in slots", "sibling": "fused linears",
    "siblings": "fused linears", "envelope": "RequestIdMiddleware", "ticket": "RequestHandle",
    "subject": "what it is", "wish": "what it is", "packed": "prepacked weights, ragged tokens",
}  # fmt: skip
"""word of a name -> what the field says."""
ALLOWED = {
    ("engine/controller/costs.py", "padding_by_places"): "a key of saved costs",
    ("data/store/manifest.py", "ends"): "a key of a store's manifest",
    ("engine/controller/gain.py", "siblings"): "nodes of one parent",
    ("engine/fair_queue.py", "_key_ends"): "when keys' requests end",
    ("tree/shared.py", "level_ends"): "where levels end",
    ("train/loss/objective.py", "ends"): "where rows end",
    ("data/tokens/marking.py", "ends"): "a pattern of what ends a turn",
    ("data/tokens/tokenize.py", "_ends"): "a pattern of what ends a turn",
    ("data/chats/candidates.py", "ends"): "where answers end",
}
"""(file, name) -> why it may stand."""
SHORTEST, MOST_SHORT = 29, 60
TWINS: dict[str, str] = {}
"""Class names of several rooms -> why."""


def words(name: str) -> list[str]:
    """`_readTwo_HTTPLines` -> read, two, http, lines."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def identifiers(path: Path) -> Iterator[str]:
    """What a file names: itself, functions, classes, parameters, whatever is assigned to or imported as."""
    yield path.stem
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
        if word.removesuffix("s") in PRIVATE or word in PRIVATE:
            return PRIVATE.get(word) or PRIVATE[word.removesuffix("s")]
    if parts[-1:] == ["ends"]:
        return "embedding and head"
    if ("few", "queries") in itertools.pairwise(parts):
        return "decode attention"
    return "CircuitBreaker" if name == "Fuse" else None


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("heard_report", False), ("Wish", False), ("TargetEnds", False), ("_key_ends", False), ("Fuse", False),
        ("FewQueries", False), ("node_places", False), ("is_live", False), ("Tickets", False), ("packed", False),
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
