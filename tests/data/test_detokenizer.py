"""Pieces, put together, are the text; none ends inside a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.data.detokenizer import Detokenizer
from eyas.data.tokenizer import SPECIALS

from ..pairs import tokenizer

BYTES = tokenizer()  # byte-level: every id sequence is some bytes, valid UTF-8 or not


def pieces(tok: Any, ids: list[int]) -> list[str]:
    stream = Detokenizer(tok)
    return [*(stream.push(token) for token in ids), stream.finish()]


def whole(tok: Any, ids: list[int]) -> str:
    text: str = tok.decode(ids, skip_special_tokens=True)
    return text


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=30))
def test_pieces_of_any_tokens_are_the_text(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == whole(BYTES, ids)


@given(st.text(max_size=20), st.lists(st.sampled_from(SPECIALS), max_size=3), st.randoms(use_true_random=False))
def test_pieces_of_any_text_are_the_text_and_specials_are_skipped(text: str, specials: list[str], random: Any) -> None:
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    for special in specials:
        ids.insert(random.randint(0, len(ids)), BYTES.convert_tokens_to_ids(special))
    made = pieces(BYTES, ids)
    assert "".join(made) == whole(BYTES, ids)
    if not specials and not any(special in text for special in SPECIALS):
        assert "".join(made) == text


def test_a_character_comes_whole_with_its_last_byte() -> None:
    ids = BYTES("a\u20acb", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5  # the euro sign is three bytes, never seen in training
    assert pieces(BYTES, ids) == ["a", "", "", "\u20ac", "b", ""]
    assert pieces(BYTES, ids[:3]) == ["a", "", "", "\ufffd"]


def test_a_special_token_inside_a_character_changes_nothing() -> None:
    ids = BYTES("\u20ac", add_special_tokens=False)["input_ids"]
    ids.insert(1, BYTES.eos_token_id)
    assert pieces(BYTES, ids) == ["", "", "", "\u20ac", ""]


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer whose decoder drops the space before the first token of whatever it is given."""
    tok = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2, "</s>": 3}, unk_token="c"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>")


@given(ids=st.lists(st.integers(0, 3), max_size=12))
def test_spaces_between_words_are_kept(words: Any, ids: list[int]) -> None:
    assert "".join(pieces(words, ids)) == whole(words, ids)


def test_a_first_word_has_no_space_and_the_next_has(words: Any) -> None:
    assert pieces(words, [0, 1, 2, 3, 0]) == ["a", " b", "c", "", " a", ""]
