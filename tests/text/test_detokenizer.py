"""Pieces, put together, are the text; none ends inside a character."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.text.detokenizer import Detokenizer, special_token_ids
from eyas.train.lm.lm import SPECIALS

from ..pairs import tokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab (\n\t.é€漢🙂👩‍🔬\u0301"), max_size=30)
BYTES = tokenizer()  # byte-level: every id sequence is some bytes, valid UTF-8 or not


@cache
def spaced() -> Any:
    """A sentencepiece-like tokenizer: spaces as `▁`, the text's first one dropped, unknown characters in bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "(", "."]
    vocab: Any = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


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


@given(TEXTS)
def test_pieces_of_bytes_that_fall_back_are_the_text(text: str) -> None:
    tokens = spaced()(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(spaced(), tokens)) == whole(spaced(), tokens)


def test_spaces_survive_and_only_the_first_is_dropped() -> None:
    made = spaced()
    end, a, b = (made.convert_tokens_to_ids(piece) for piece in ("</s>", "▁a", "▁b"))
    assert pieces(made, [a, end, b, a]) == ["a", "", " b", " a", ""]


def test_work_per_token_does_not_grow() -> None:
    """Only the tokens of the last piece and those after it are decoded."""

    class Counting:
        longest = 0

        def decode(self, ids: list[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return "x" * len(ids)

    counting = Counting()
    assert pieces(counting, [1] * 50) == ["x"] * 50 + [""]
    assert counting.longest == 2


def test_work_per_token_does_not_grow_with_bytes_that_are_no_character_or_with_special_tokens() -> None:
    """What one request makes of its own answer may not stop a server."""

    class Counting:
        longest = 0
        added_tokens_decoder = BYTES.added_tokens_decoder

        def decode(self, ids: list[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return whole(BYTES, ids)

    middle = BYTES("\u20ac", add_special_tokens=False)["input_ids"][1]  # continues a character, begins none
    for ids in ([middle] * 200, [BYTES.eos_token_id] * 200, [middle, BYTES.eos_token_id] * 100):
        counting = Counting()
        assert "".join(pieces(counting, ids)) == whole(BYTES, ids)
        assert counting.longest < 100


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=30), st.data())
def test_many_tokens_at_once_give_the_same_text(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    stream = Detokenizer(BYTES)
    assert stream.push(*ids[:cut]) + stream.push(*ids[cut:]) + stream.finish() == whole(BYTES, ids)


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=30))
def test_special_tokens_can_be_kept(ids: list[int]) -> None:
    stream = Detokenizer(BYTES, special_token_ids(BYTES))
    assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == BYTES.decode(ids)
