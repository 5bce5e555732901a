"""A stream is read by its bytes' times, however they were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.serving.client import RawStream, TimedAnswer

from .fake_server import event, stream


def received(*pieces: tuple[float, bytes], seconds: float = 9.0) -> TimedAnswer:
    return RawStream(0, 0.0, pieces, seconds).read()


def test_first_text_is_what_counts_as_the_first_token() -> None:
    parts = stream(["Hel", "lo"])
    answer = received(*((0.5 * (i + 1), part) for i, part in enumerate(parts)), seconds=4.0)
    assert (answer.text, answer.tokens, answer.prompt_tokens, answer.error) == ("Hello", 4, 5, None)
    assert answer.first_seconds == 1.0  # not 0.5: that was the role
    assert answer.seconds_per_token == pytest.approx((4.0 - 1.0) / 3)


@given(st.lists(st.integers(1, 400), max_size=12))
def test_cuts_in_the_stream_change_nothing(cuts: list[int]) -> None:
    whole = b"".join(stream(["né", "🦅", "\n"]))
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    pieces = [(1.0, whole[a:b]) for a, b in pairwise(edges)]
    assert received(*pieces) == received((1.0, whole))
    assert received(*pieces).text == "né🦅\n"


def test_completions_and_reasoning_are_text_too() -> None:
    usage = event({"choices": [], "usage": {"completion_tokens": 1}})
    assert received((1.0, event({"choices": [{"text": "a"}]}) + usage)).text == "a"
    assert received((1.0, event({"choices": [{"delta": {"reasoning_content": "b"}}]}) + usage)).text == "b"


@pytest.mark.parametrize(
    ("last", "passes", "accepted"),
    [
        ({"usage": {"eyas": {"target_passes": 2, "accept_length": 2.5}}}, 2.0, 3.0),  # of which the limit cut one
        ({"timings": {"draft_n": 9, "draft_n_accepted": 3}}, 1.0, 3.0),
        ({"timings": {"predicted_n": 4}}, 0.0, 0.0),
        ({}, 0.0, 0.0),
    ],
)
def test_speculation_from_whoever_tells(last: dict[str, object], passes: float, accepted: float) -> None:
    answer = received((1.0, b"".join(stream(["a", "b"], **last))))
    assert (answer.passes, answer.accepted) == (passes, accepted)


def test_what_is_no_answer_is_an_error() -> None:
    assert "usage" in str(received((1.0, event({"choices": [{"text": "a"}]}))).error)
    assert "valid JSON" in str(received((1.0, event(b"{"))).error)
    assert "broke" in str(received((1.0, event({"error": {"message": "broke"}}))).error)
    assert RawStream(0, 0.0, (), 1.0, "gone").read().error == "gone"
