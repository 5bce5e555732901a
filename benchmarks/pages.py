"""Pages with a generated part: the text between two marks is replaced, the rest stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eyas.errors import DataError


def insert(page: str, marks: tuple[str, str], made: str) -> str:
    """The page with the text between its marks replaced. DataError if a mark is missing."""
    begin, end = marks
    before, begins, rest = page.partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise DataError(f"the page has no part between {begin} and {end}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *others))
