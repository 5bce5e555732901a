"""Which pairs a window holds, and how it is written on a command line."""

from __future__ import annotations

import pytest

from eyas.drafters.window.window import GUESSES, SINKS, Window, read_window, trained_window
from eyas.errors import UsageError


@pytest.mark.parametrize("pairs", [1, 2, 5, 8, 16, 1000])
def test_a_window_holds_three_quarters_of_its_pairs_at_least(pairs: int) -> None:
    window = Window(pairs)
    dropped = [window.dropped(count) for count in range(3 * window.limit + 7)]
    for count, gone in enumerate(dropped):
        held = count - gone
        assert gone % window.step == 0
        assert held <= window.limit
        assert not gone or held - SINKS > pairs - window.step
    for pair in range(len(dropped) - 1):
        moved = window.next_step(pair)
        assert moved > pair
        rows = range(pair, min(moved, len(dropped) - 1))
        assert {dropped[row + 1] for row in rows} == {dropped[pair + 1]}
        assert window.dropped(moved + 1) > dropped[pair + 1]


def test_what_a_command_line_says() -> None:
    assert [read_window(text) for text in (None, "auto", "off", "12", 7)] == [None, "auto", "off", 12, 7]
    for wrong in ("0", "-3", "1.5", "on", "", 0):
        with pytest.raises(UsageError, match="`draft_window="):
            read_window(wrong)


def test_auto_stays_within_what_the_drafter_was_trained_on() -> None:
    assert trained_window(1024, 4096) + SINKS + GUESSES == 1024
    assert trained_window(4096, 2048) + SINKS + GUESSES == 2048
    assert trained_window(None, 131072) + SINKS + GUESSES == 2048
    assert trained_window(10, 4096) == 1
