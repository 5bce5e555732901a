"""The tokenizer of a GGUF file, built from what the file says, with llama.cpp's token ids.

It is built here rather than by transformers, whose classes bring rules of their own: a file's tokenizer is what the
file says, whatever the model's architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.errors import ModelError
from eyas.gguf import Gguf
from eyas.gguf_splits import RULES, pre_tokenizer
from eyas.gguf_vocabulary import SENTENCEPIECE_BPE, UNIGRAM, Scheme, TokenKind, Vocabulary, read_scheme

_SPACE = "\u2581"
_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens that don't swallow whitespace where the others do."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")
_FILLS = {"prefix_token": "fim_pre", "suffix_token": "fim_suf", "middle_token": "fim_mid"}
"""The names that transformers gives to tokens that mark a gap, and their roles."""


def build_tokenizer(scheme: Scheme, vocabulary: Vocabulary) -> Any:
    """The tokenizer of a GGUF file, as transformers wraps it.

    Raises ModelError if the `tokenizers` library can't represent it.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(_model(scheme, vocabulary))
    for part, value in _parts(scheme, vocabulary.tokens.__getitem__).items():
        setattr(backend, part, value)
    backend.add_tokens(
        [
            AddedToken(
                vocabulary.tokens[token],
                normalized=False,
                special=vocabulary.kinds[token] != TokenKind.USER_DEFINED,
                rstrip=scheme.strips_right and vocabulary.tokens[token] not in _KEEPS_SPACE,
            )
            for token in vocabulary.special
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            name: vocabulary.tokens[scheme.ids[role]] for name, role in _FILLS.items() if role in scheme.ids
        },
        **{f"{role}_token": vocabulary.tokens[scheme.ids[role]] for role in _ROLES if role in scheme.ids},
    )
    if scheme.templates:
        tokenizer.chat_template = (
            scheme.templates["default"] if [*scheme.templates] == ["default"] else dict(scheme.templates)
        )
    return tokenizer


def load_built(folder: str, file: Path) -> Any:
    """Load the tokenizer of a folder that was made from a GGUF file, and compare it with the file.

    Raises ModelError if transformers made another tokenizer of it.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    scheme = read_scheme(Gguf(file))
    different = ["tokenizer"] if scheme is None else _differences(tokenizer, scheme)
    if different:
        raise ModelError(
            f"transformers changed the {', '.join(different)} of the tokenizer in {file}: its tokens would differ from "
            "those that the model was trained on; use the model's own folder"
        )
    return tokenizer


def _differences(tokenizer: Any, scheme: Scheme) -> list[str]:
    backend = tokenizer.backend_tokenizer
    parts = _parts(scheme, tokenizer.convert_ids_to_tokens)
    found = [part for part, value in parts.items() if _state(getattr(backend, part)) != _state(value)]
    if backend.get_vocab_size() != scheme.size:
        found.append("number of tokens")
    return found + [f"{r} token" for r in _ROLES if getattr(tokenizer, f"{r}_token_id") != scheme.ids.get(r)]


def _state(part: Any) -> bytes | None:
    return None if part is None else part.__getstate__()


def _model(scheme: Scheme, vocabulary: Vocabulary) -> Any:
    from tokenizers import models

    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[scheme.ids["unk"]] if "unk" in scheme.ids else None
    if scheme.model == UNIGRAM:
        return models.Unigram(_pieces(vocabulary), unk_id=scheme.ids.get("unk"), byte_fallback=False)
    if scheme.model == SENTENCEPIECE_BPE:
        merges = _merges_by_score(ids, vocabulary.scores)
        return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    rule = RULES[str(scheme.rule)]
    merges = [(a, b) for a, b in vocabulary.merges if a in ids and b in ids and a + b in ids]
    return models.BPE(ids, merges, byte_fallback=not rule.byte_level, ignore_merges=rule.whole)


def _pieces(vocabulary: Vocabulary) -> list[tuple[str, float]]:
    """The tokens with their scores: user-defined ones win over all others, and the rest never lower the minimum.

    The minimum is what an unknown character costs.
    """
    normal = [
        score for score, kind in zip(vocabulary.scores, vocabulary.kinds, strict=True) if kind == TokenKind.NORMAL
    ]
    least = min(normal, default=0.0)
    return [
        (text, _piece_score(kind, score, least))
        for text, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)
    ]


def _piece_score(kind: int, score: float, least: float) -> float:
    if kind in (TokenKind.NORMAL, TokenKind.UNUSED):
        return score
    return 0.0 if kind == TokenKind.USER_DEFINED else least


def _merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes another one, the best first.

    Of the pairs that make the same token, the one with the longer first part comes first: SentencePiece merges from the
    left, so in a run of one character the odd one is at the end.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for text, token in ids.items():
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                found.append((-scores[token], token, -cut, text[:cut], text[cut:]))
    return [(first, second) for *_, first, second in sorted(found)]


def _parts(scheme: Scheme, text_of: Any) -> dict[str, Any]:
    """The parts of a tokenizer around its model; `text_of` gives the text of a token."""
    from tokenizers import Regex, decoders, normalizers, processors

    begin = [text_of(scheme.ids["bos"])] if scheme.add_bos else []
    end = [text_of(scheme.ids["eos"])] if scheme.add_eos else []
    added = {text: scheme.ids[role] for role, texts in (("bos", begin), ("eos", end)) for text in texts}
    parts: dict[str, Any] = {
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": processors.TemplateProcessing(
            single=[*begin, "$A", *end], pair=[*begin, "$A", *end, "$B:1"], special_tokens=list(added.items())
        ),
    }
    rule = None if scheme.rule is None else RULES[scheme.rule]
    if rule is not None:
        parts["pre_tokenizer"] = pre_tokenizer(rule)
    if rule is not None and rule.byte_level:
        return {**parts, "decoder": decoders.ByteLevel()}
    steps: list[Any] = []
    if scheme.model == UNIGRAM and scheme.charsmap:
        steps.append(normalizers.Precompiled(scheme.charsmap))
    if scheme.model == UNIGRAM and scheme.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefixed = rule is None and (
        scheme.add_space_prefix or (scheme.model == UNIGRAM and scheme.remove_extra_whitespaces)
    )
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    parts["normalizer"] = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    first = [decoders.Strip(" ", 1, 0)] if prefixed else []
    parts["decoder"] = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return parts
