"""What the terminal shows: notes, tables, progress. Answers are in `answers.py`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import typer

from eyas.cli.common.aliases import in_options
from eyas.runtime import duration

if TYPE_CHECKING:
    from rich.console import Console


def note(message: str) -> None:
    """Write a line to standard error, where everything but output goes; parameters in it are shown as options."""
    typer.echo(in_options(message), err=True)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Report that `name` is being loaded, and how long it took: a large model shows nothing else for a while."""
    note(f"loading {name} ...")
    began = time.monotonic()
    yield
    note(f"loaded in {time.monotonic() - began:.1f} s")


def output() -> Console:
    """A console on standard output: as wide as the terminal or COLUMNS; where neither is known, 200 columns."""
    from rich.console import Console

    screen = sys.stdout.isatty()
    known = screen or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if known else 200, highlight=False, markup=False, soft_wrap=not screen)


def next_step(*words: object) -> None:
    """Suggest the next command, on standard error."""
    note(f"next: {shlex.join(['eyas', *map(str, words)])}")


SILENCE = 60.0
"""Seconds between progress lines of long work, where there is no terminal to draw a bar on."""


class ProgressLines:
    """Progress lines of long work on standard error, at most one per `SILENCE` seconds; none where a bar is drawn."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._hidden = sys.stderr.isatty()
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def show(self, done: int, total: int | None, more: str = "") -> None:
        """Report that `done` of `total` are done, unless the last line is recent or everything is done."""
        now = time.monotonic()
        first = self._first = done if self._first is None else self._first
        if self._hidden or now - self._said < SILENCE or done == total:
            return
        self._said = now
        text = (
            f"{self._what}: {done:,}" if total is None else f"{self._what}: {done:,} of {total:,} ({done / total:.0%})"
        )
        if total is not None and done > first:
            text += f", about {duration((now - self._began) * (total - done) / (done - first))} left"
        note(text + more)


@contextmanager
def row_bar(total: int, *, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Progress of `total` runs on standard error; yields a function that advances it by one."""
    done = count(1)
    with counting(hidden=hidden) as show:
        yield lambda: show("runs", next(done), total)


@contextmanager
def counting(*, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Progress of one stage or several on standard error: a bar on a terminal, else a line now and then.

    Yields a function of (stage, items done, total items or None, further text).
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = hidden or not sys.stderr.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=disable, redirect_stdout=False
    ) as bar:
        task = bar.add_task("", total=None)
        stages: dict[str, ProgressLines] = {}

        def update(stage: str, done: int, total: int | None, more: str = "") -> None:
            bar.update(task, description=f"{stage}{more}", completed=done, total=total)
            if not hidden:
                stages.setdefault(stage, ProgressLines(stage)).show(done, total, more)

        yield update


@contextmanager
def quietly_refreshing(view: Callable[[], Any], show: bool) -> Iterator[Callable[[], None]]:
    """Draw `view()` on the terminal while the block runs; yields a function that redraws it, at most every 50 ms."""
    if not show:
        yield lambda: None
        return
    from rich.live import Live

    drawn = 0.0
    with Live(view(), refresh_per_second=1, auto_refresh=False) as picture:

        def refresh() -> None:
            nonlocal drawn
            if time.monotonic() - drawn > 0.05:
                picture.update(view(), refresh=True)
                drawn = time.monotonic()

        yield refresh
        picture.update(view(), refresh=True)
