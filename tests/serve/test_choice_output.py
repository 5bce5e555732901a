"""Stop strings against the plain definition: the text up to the stop string that is complete first."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from eyas.serve.api.generation import StopStrings

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


@given(st.text(alphabet="ab", max_size=30), st.lists(LETTERS, min_size=1, max_size=4), st.data())
def test_any_text_in_any_pieces_is_cut_by_the_definition(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, shown, stopped, left = StopStrings(stops), "", False, text
    while left and not stopped:
        size = data.draw(st.integers(1, len(left)))
        piece, stop = matcher.push(left[:size])
        stopped = stop is not None
        shown, left = shown + piece, left[size:]
        assert not any(stop in shown for stop in stops)
    if not stopped:
        shown += matcher.finish()
    assert (shown, stopped) == cut(text, stops)


def test_text_is_held_back_no_longer_than_it_must() -> None:
    matcher = StopStrings(["<end>"])
    assert matcher.push("a <en").text == "a "
    assert matcher.push("t").text == "<ent"
    assert matcher.push("<e").text == ""
    assert matcher.finish() == "<e"


def test_the_worst_text_is_no_work() -> None:
    matcher = StopStrings(["a" * 255 + str(i) for i in range(16)])
    began = time.process_time()
    for _ in range(200):
        matcher.push("a" * 20)
    assert time.process_time() - began < 2.0
