"""One way in which a reading may be wrong, and what would put it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eyas.doctor.reading import Reading
from eyas.target import Target


@dataclass(frozen=True)
class Change:
    """From one reading to another; it can be repeated on the same files in another type."""

    aspect: str
    """What is read otherwise; a reading is changed in one aspect once."""
    name: str
    """How it is read instead."""
    repair: str
    """What to change in the files."""
    apply: Callable[[Reading], Reading]
    written: bool = True
    """Can a drafter's files say so?"""


Aspect = Callable[[Reading, Target], Iterator[Change]]
"""The other ways to read one thing, given the present one."""
