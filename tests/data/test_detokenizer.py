"""Pieces handed out token by token are the text that decoding all at once gives."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.data.detokenizer import Detokenizer

from ..pairs import tokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab (\n\t.é€漢🙂👩‍🔬\u0301"), max_size=30)


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


def pieces(tokens: list[int], made: Any) -> list[str]:
    detokenizer = Detokenizer(made)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(TEXTS)
def test_any_text_comes_out_whole(text: str) -> None:
    for made in (tokenizer(), spaced()):
        tokens = made(text, add_special_tokens=False)["input_ids"]
        assert "".join(pieces(tokens, made)) == made.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(0, 399), max_size=24))
def test_any_tokens_come_out_whole(tokens: list[int]) -> None:
    """Broken characters and special tokens included: a model may emit anything."""
    assert "".join(pieces(tokens, tokenizer())) == tokenizer().decode(tokens, skip_special_tokens=True)


def test_a_character_comes_with_its_last_token() -> None:
    tokens = tokenizer()("🙂", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 4
    assert pieces(tokens, tokenizer()) == ["", "", "", "🙂", ""]


def test_what_never_became_a_character_comes_at_the_end() -> None:
    tokens = tokenizer()("🙂", add_special_tokens=False)["input_ids"][:2]
    *silent, last = pieces(tokens, tokenizer())
    assert silent == ["", ""]
    assert last == tokenizer().decode(tokens)


def test_spaces_survive_and_only_the_first_is_dropped() -> None:
    made = spaced()
    end, a, b = (made.convert_tokens_to_ids(piece) for piece in ("</s>", "▁a", "▁b"))
    assert pieces([a, end, b, a], made) == ["a", "", " b", " a", ""]


def test_work_per_token_does_not_grow() -> None:
    """Only the tokens since the last but one piece are decoded."""

    class Counting:
        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            self.longest = max(self.longest, len(ids))
            return "x" * len(ids)

    counting = Counting()
    assert pieces([1] * 50, counting) == ["x"] * 50 + [""]
    assert counting.longest == 2
