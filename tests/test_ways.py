"""The ways through the source that docs/architecture.md walks: every file is there, and each touches an earlier one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .source import SOURCE, importers

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
WAYS = {
    "The way of a token": 24,
    "The way of a request": 24,
    "The way of a chat": None,
    "The way of a drafter's folder": None,
}
"""Section -> the most files it may have."""
ITEM = re.compile(r"^\s*\d+\.\s+(.*)$", re.MULTILINE)


def way(title: str) -> list[str]:
    """The files that the section's numbered list names, in order."""
    sections = re.split(r"^#+\s+(.*?)\s*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = sections[1::2]
    assert titles.count(title) == 1, f"{PAGE.name} has no section {title!r}"
    items = ITEM.findall(sections[2 * titles.index(title) + 2])
    paths = [re.match(r"`([^`]+)`", item) for item in items]
    assert all(paths), f"an item of {title!r} doesn't begin with a path: {items[paths.index(None)]!r}"
    return [path[1] for path in paths if path]


@pytest.mark.parametrize(("title", "most"), WAYS.items())
def test_every_file_is_there_once(title: str, most: int | None) -> None:
    files = way(title)
    assert len(files) > 3
    assert len(set(files)) == len(files), "a way that comes back is no way: mend the code"
    assert not [file for file in files if not (SOURCE / file).is_file()]
    assert most is None or len(files) <= most


@pytest.mark.parametrize("title", WAYS)
def test_each_file_touches_an_earlier_one(title: str) -> None:
    """It imports one of them, or one of them imports it."""
    files = way(title)
    for i, file in enumerate(files[1:], start=1):
        earlier = set(files[:i])
        assert earlier & importers().get(file, set()) or any(
            file in importers().get(other, set()) for other in earlier
        ), f"{file} has nothing to do with any file before it"
