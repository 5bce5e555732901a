"""Tokenizers with vocabularies as large as real ones, made up in a second."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_FREQUENT = "etaoinshrdlucmfwypvbgkjqxz"
_END = "<|end|>"


@cache
def byte_level(size: int) -> Any:
    """A byte-level BPE tokenizer, as Qwen's and SmolLM2's, with `size` tokens."""
    tokenizer = Tokenizer(models.BPE(*_merged(sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120", size - 1)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


@cache
def byte_fallback(size: int) -> Any:
    """A tokenizer that writes spaces as `\u2581` and rare characters as bytes, as Gemma's and Llama 2's."""
    characters = [f"<0x{byte:02X}>" for byte in range(256)] + [chr(code) for code in range(33, 127)] + ["\n", "\u2581"]
    vocabulary, merges = _merged(characters, "\u2581", size - 1)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _fast(tokenizer)


def _merged(alphabet: list[str], space: str, size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """`size` tokens: an alphabet, JSON's punctuation, and made-up words, some after a space; each with its merge."""
    draw = random.Random(size)
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary and len(vocabulary) < size:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    for left, right in ('{"', '":', '",', '"}', "[{", "}]", "},", '["', '"]', "00", "12"):
        merge(left, right)
    for letter in _FREQUENT:
        merge(space, letter)
    words = list(_FREQUENT) + [space + letter for letter in _FREQUENT]
    while len(vocabulary) < size:
        left = draw.choice(words)
        right = draw.choice(words[: len(_FREQUENT)] if draw.random() < 0.7 else words)
        if len(left + right) <= 14 and not right.startswith(space):
            merge(left, right)
            words.append(left + right)
    return vocabulary, merges


def _fast(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(_END, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
