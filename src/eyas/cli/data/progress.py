"""The progress of answering chats, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.data.regenerate import (
        RegenerationProgress,
    )


class RegenerateProgress:
    """The progress of a run, shown by what `counting` yields, and its last tally."""

    def __init__(self, shown: Callable[..., None]) -> None:
        self._show = shown
        self.tally: RegenerationProgress | None = None

    def watch(self, tally: RegenerationProgress) -> None:
        """Show a tally of the run; called as it proceeds."""
        self.tally = tally
        text = f", {tally.tokens_per_second:.0f} tokens/s"
        if tally.stats.drafted_depth:
            text += f", accept length {tally.stats.accept_length:.2f}"
        if tally.unanswered:
            text += f", {tally.unanswered} unanswered"
        self._show("chats", tally.settled, tally.total, text)
