"""Tokenizers of GGUF files: token ids and ends are llama.cpp's, and what eyas doesn't know refuses the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ModelError
from eyas.gguf import Gguf
from eyas.gguf_tokenizer import build_tokenizer, load_built
from eyas.gguf_vocabulary import TokenKind, read_scheme, read_vocabulary
from tests.gguf_models import write_vocabulary

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER = 4
BYTE = 6
PIECES = ["▁", "a", "b", "ab", "▁a", "▁ab", "▁▁", "▁▁▁▁", "é", "aa", "aaa"]


def sentencepiece(path: Path, more: dict[str, int] | None = None, **keys: Any) -> Path:
    """A small vocabulary of SentencePiece, with bytes; `more`: further tokens and their kinds."""
    more = more or {}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES, *more]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), *more.values()]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [-1000.0] * len(more)
    return write_vocabulary(path, tokens, kinds, scores=scores, **keys)


def loaded(path: Path) -> tuple[Any, Any, Any]:
    file = Gguf(path)
    scheme = read_scheme(file)
    assert scheme is not None
    vocabulary = read_vocabulary(file, scheme)
    return build_tokenizer(scheme, vocabulary), scheme, vocabulary


def pieces(path: Path, text: str) -> list[str]:
    """The tokens of a text."""
    tokenizer = loaded(path)[0]
    found: list[str] = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    return found


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", "<s>"),
        ("a", "<s> ▁a"),
        (" a", "<s> ▁ ▁a"),
        ("ab ab", "<s> ▁ab ▁ab"),
        ("a    b", "<s> ▁a ▁▁▁▁ b"),
        ("a      b", "<s> ▁a ▁▁▁▁ ▁▁ b"),
        ("aaaa", "<s> ▁a aaa"),
        ("é\n", "<s> ▁ é <0x0A>"),
        ("x", "<s> ▁ <0x78>"),
        ("a</s>ab", "<s> ▁a </s> ▁ab"),
        ("a<own>b", "<s> ▁a <own> ▁ b"),
        ("</s> a", "<s> </s> ▁ ▁a"),
        ("<own>", "<s> <own>"),
    ],
)
def test_sentencepiece(tmp_path: Path, text: str, tokens: str) -> None:
    assert pieces(sentencepiece(tmp_path / "v.gguf", {"<own>": USER}), text) == tokens.split()


def test_flags_of_sentencepiece(tmp_path: Path) -> None:
    plain = sentencepiece(tmp_path / "plain.gguf", add_space_prefix=False, add_bos_token=False)
    assert pieces(plain, "a</s>a a") == ["a", "</s>", "a", "▁a"]
    ended = sentencepiece(tmp_path / "ended.gguf", add_eos_token=True)
    assert pieces(ended, "a") == ["<s>", "▁a", "</s>"]
    phi = sentencepiece(tmp_path / "phi.gguf", {"<|end|>": CONTROL}, name="Phi-3 tiny")
    assert pieces(phi, "<|end|>\n a<s> a") == ["<s>", "<|end|>", "▁a", "<s>", "▁", "▁a"]


def test_what_is_special_is_left_out_of_the_text(tmp_path: Path) -> None:
    tokenizer = loaded(sentencepiece(tmp_path / "v.gguf", {"<own>": USER, "<ctl>": CONTROL, "<|end|>": NORMAL}))[0]
    ids = tokenizer("a<own>a<ctl>a<|end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<own> a a"


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        ({}, {}, "</s>"),
        ({"<|im_end|>": CONTROL, "x": NORMAL}, {"eos_token_id": 271}, "<|im_end|> x </s>"),
        ({"x": NORMAL, "y": NORMAL, "z": NORMAL}, {"eot_token_id": 270, "eom_token_id": 272}, "x z </s>"),
        ({"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL, "<|endoftext|>": NORMAL}, {},
         "<|eot_id|> <|eom_id|> <|endoftext|> </s>"),
        ({"<|fim_pad|>": NORMAL, "<|repo_name|>": NORMAL, "<|file_sep|>": NORMAL, "<|fim_middle|>": NORMAL}, {},
         "<|fim_pad|> <|repo_name|> <|file_sep|> </s>"),
        ({"<PAD>": NORMAL, "x": NORMAL}, {"fim_pad_token_id": 271}, "x </s>"),
        ({"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, {}, "<|return|> <|call|> </s>"),
        ({"<|flush|>": CONTROL, "<|calls|>": CONTROL, "<|end|>": CONTROL}, {}, "<|flush|> <|calls|> </s>"),
        ({"<|return|>": CONTROL, "<|end|>": CONTROL}, {}, "<|return|> <|end|> </s>"),
        ({"<eos>": CONTROL, "<|tool_response>": CONTROL}, {"eos_token_id": 270}, "<eos> <|tool_response>"),
        ({"x": NORMAL}, {"eot_token_id": 9999}, "</s>"),
    ],
)  # fmt: skip
def test_ends(tmp_path: Path, tokens: dict[str, int], keys: dict[str, Any], ends: str) -> None:
    vocabulary = loaded(sentencepiece(tmp_path / "v.gguf", tokens, **keys))[2]
    assert {vocabulary.tokens[end] for end in vocabulary.ends} == set(ends.split())


def test_tokens_known_by_name_are_control_whatever_the_file_says(tmp_path: Path) -> None:
    names = {"<|im_end|>": NORMAL, "<|fim_prefix|>": NORMAL, "<|channel|>": CONTROL, "plain": NORMAL}
    kinds = loaded(sentencepiece(tmp_path / "v.gguf", names))[2].kinds
    assert kinds[270:] == [TokenKind.CONTROL, TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.NORMAL]


def byte_level(path: Path, **keys: Any) -> Path:
    tokens = ["a", "b", "c", "1", "2", "Ġ", "ab", "Ġab", "<end>"]
    return write_vocabulary(path, tokens, [NORMAL] * 8 + [CONTROL], model="gpt2", merges=["a b", "Ġ ab"], **keys)


def test_byte_level(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "v.gguf", pre="qwen2", eos_token_id=8)
    assert pieces(path, "ab ab12<end>a ?") == ["ab", "Ġab", "1", "2", "<end>", "a", "Ġ"]
    assert loaded(path)[2].ends == {8}
    begun = byte_level(tmp_path / "begun.gguf", pre="llama-bpe", bos_token_id=8)
    assert pieces(begun, "ab") == ["<end>", "ab"]


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("gpt2", {"pre": "made-up"}, "rule made-up"),
        ("rwkv", {}, "of the kind rwkv"),
        ("llama", {"made_up": 1}, "tokenizer.ggml.made_up, which eyas doesn't honor"),
        ("llama", {"suppress_tokens": [1]}, "tokenizer.ggml.suppress_tokens, which eyas doesn't honor"),
        ("gpt2", {"pre": "qwen2", "add_bos_token": True}, "adds a bos token, but not which one"),
        ("gpt2", {"pre": "qwen2"}, "has no tokenizer.ggml.merges"),
    ],
)
def test_what_is_not_known_refuses_the_file(tmp_path: Path, model: str, keys: dict[str, Any], message: str) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", ["a", "b", "</s>"], [NORMAL, NORMAL, CONTROL], model=model, **keys)
    with pytest.raises(ModelError, match=message):
        loaded(path)


def test_tokens_of_the_same_text_refuse_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="several tokens of the same text"):
        loaded(write_vocabulary(tmp_path / "v.gguf", ["a", "a", "</s>"], [NORMAL] * 3))


def test_a_file_may_have_no_tokenizer(tmp_path: Path) -> None:
    assert read_scheme(Gguf(write_vocabulary(tmp_path / "v.gguf", ["a"], [NORMAL], model="none"))) is None


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "post_processor", "decoder"])
def test_the_loaded_tokenizer_is_compared_with_the_file(tmp_path: Path, part: str) -> None:
    path = byte_level(tmp_path / "v.gguf", pre="llama-bpe", bos_token_id=8)
    loaded(path)[0].save_pretrained(tmp_path)
    assert load_built(str(tmp_path), path)("ab")["input_ids"] == [8, 6]
    file = tmp_path / "tokenizer.json"
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed[part] = {"type": "NFC"} if part == "normalizer" else None
    file.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ModelError, match=part):
        load_built(str(tmp_path), path)


def test_templates_by_name(tmp_path: Path) -> None:
    one = loaded(sentencepiece(tmp_path / "one.gguf", chat_template="A"))[0]
    two = loaded(sentencepiece(tmp_path / "two.gguf", chat_template="A", **{"chat_template.tool_use": "B"}))[0]
    assert one.chat_template == "A"
    assert two.get_chat_template(None, [{}]) == "B"
