"""Stop strings against the plain definition: the text up to the stop string that is complete first."""

from __future__ import annotations

import time
from itertools import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eyas.serve.api.generation import ChoiceOutput, StopStrings
from eyas.serve.schema.chat import CompletionRequest
from eyas.types import Chunk

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
    matcher = StopStrings(stops)
    shown = ""
    stopped = False
    left = text
    while left and not stopped:
        size = data.draw(st.integers(1, len(left)))
        piece, stop = matcher.push(left[:size])
        stopped = stop is not None
        shown += piece
        left = left[size:]
        assert not any(stop in shown for stop in stops)
    if not stopped:
        shown += matcher.finish()
    assert (shown, stopped) == cut(text, stops)


@given(st.lists(st.tuples(LETTERS, st.booleans()), max_size=12), st.lists(LETTERS, min_size=1, max_size=4))
def test_text_that_is_not_shown_takes_part_in_stop_strings(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    stopped = False
    for text, visible in pieces:
        piece, stop = matcher.push(text, shown=visible)
        shown += piece
        stopped = stop is not None
        if stopped:
            break
    shown += matcher.finish()
    whole, ends = cut("".join(text for text, _ in pieces), stops)
    marks = [visible for text, visible in pieces for _ in text]
    assert (shown, stopped) == ("".join(compress(whole, marks)), ends)


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(("stop", "text"), [("<end>", "a b"), ("b<end>", "a "), ("<end>c", "a b")])
@pytest.mark.parametrize("size", [1, 4])
def test_a_special_token_s_text_is_a_stop_string(stop: str, text: str, included: bool, size: int) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, " b": 1, "c": 2})))
    tokenizer.backend_tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    body = CompletionRequest(model="m", prompt="a", stop=stop, include_stop_str_in_output=included)
    output = ChoiceOutput(tokenizer, body)
    shown = ""
    tokens = [0, 1, 3, 2]
    for start in range(0, len(tokens), size):
        shown += output.add(Chunk(0, tuple(tokens[start : start + size]), 0)).text
    assert (shown, output.finish_reason, output.stop_string) == (text + stop * included, "stop", stop)


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
