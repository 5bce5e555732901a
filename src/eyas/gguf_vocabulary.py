"""The vocabulary of a GGUF file: its tokens, what kind each is, and which of them end an answer.

All of it is decided as llama.cpp does (`llama_vocab::impl::load` in `llama-vocab.cpp`), also what no key says: defaults
of each tokenizer model, and tokens that are known by their text. A key of the tokenizer that isn't known refuses the
file, and so does one that eyas doesn't honor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from eyas.errors import ModelError
from eyas.gguf import Gguf, SkippedArray
from eyas.gguf_splits import RULES

_LOG = logging.getLogger("eyas")
_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

NO_VOCABULARY = frozenset({"none", "no_vocab"})
"""Values of `tokenizer.ggml.model` of files that hold no tokenizer."""
SENTENCEPIECE_BPE = "llama"
BYTE_LEVEL_BPE = "gpt2"
UNIGRAM = "t5"
GEMMA4 = "gemma4"
"""The values that eyas reads."""

_IDS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id", "separator_token_id"),  # llama.cpp's spelling first
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
"""A special token's role -> the keys that name it, the one that counts first."""
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    SENTENCEPIECE_BPE: {"bos": 1, "eos": 2, "unk": 0},
    UNIGRAM: {"eos": 1, "unk": 2, "pad": 0},
}
"""Tokenizer model -> the ids of roles that no key names. For byte-level BPE llama.cpp takes 11, which is Falcon's end
and a comma elsewhere; eyas takes none."""
_ROLE_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> <|code_prefix|> "
    "<|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> <|code_suffix|> "
    "<|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> <|code_middle|> "
    "<|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}  # fmt: skip
"""A role -> the texts by which its token is known if no key names it."""
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend▁of▁sentence\uff5c> [e~["
).split()
"""The texts of tokens that end an answer in every vocabulary that has them."""
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ALWAYS_BEGIN = frozenset({"gemma4", "granite-embed-multi-311m"})
"""Rules whose texts begin with the bos token whatever the file says: early files of Gemma 4 are wrong."""
_VISIBLE_MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Markers of gpt-oss that belong to the text, whatever the file says."""
_UNUSED = frozenset({
    "cls_token_id", "token_type_count", "add_sep_token",  # of encoders
    "normalizer.lowercase", "normalizer.strip_accents",  # of WordPiece, which isn't read
})  # fmt: skip
_READ = frozenset({
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    "remove_extra_whitespaces", "precompiled_charsmap", "suppress_tokens",
    *(key for keys in _IDS.values() for key in keys),
})  # fmt: skip
_OTHER_KEYS = frozenset({"tokenizer.chat_templates", "tokenizer.huggingface.json", "tokenizer.rwkv.world"})
"""Keys outside `tokenizer.ggml` that change nothing: the list of template names, and copies that llama.cpp ignores."""


class TokenKind(IntEnum):
    """What `tokenizer.ggml.token_type` says about a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Scheme:
    """How a GGUF file's tokenizer works, but for its tokens; with llama.cpp's defaults."""

    model: str
    """`tokenizer.ggml.model`."""
    rule: str | None
    """The rule for splitting text, a key of `RULES`; None if the tokenizer model has none."""
    size: int
    """The number of tokens."""
    ids: Mapping[str, int]
    """A special token's role -> the id that a key names, such as `bos`; roles without one are absent."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes
    """SentencePiece's precompiled normalization; empty for none."""
    strips_right: bool
    """Whether special tokens swallow the whitespace that follows them, as in Phi-3."""
    templates: Mapping[str, str]
    """The chat templates by name; the usual one is called `default`."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file, by id."""

    tokens: list[str]
    kinds: list[TokenKind]
    scores: list[float]
    merges: list[tuple[str, str]]
    """In order of rank; empty unless the file's merges count."""
    ends: frozenset[int]
    """The tokens that end an answer."""

    @property
    def special(self) -> list[int]:
        """The tokens that are recognized in a text before anything else."""
        found = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
        return [token for token, kind in enumerate(self.kinds) if kind in found]


def read_scheme(file: Gguf) -> Scheme | None:
    """How the tokenizer of a GGUF file works; None if the file has no tokenizer.

    Raises ModelError for a tokenizer that eyas doesn't read, CheckpointError for a damaged file.
    """
    metadata, path = file.metadata, file.path
    _refuse_unknown_keys(file)
    model = metadata.get(_KEY + "model")
    if model is None or model in NO_VOCABULARY:
        return None
    if model not in (SENTENCEPIECE_BPE, BYTE_LEVEL_BPE, UNIGRAM, GEMMA4):
        raise ModelError(f"the tokenizer in {path} is of the kind {model}, which eyas doesn't read: {_ADVICE}")
    rule = _rule(file, str(model))
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, SkippedArray):
        raise ModelError(f"{path} names a tokenizer, but has no {_KEY}tokens")
    begins = model == SENTENCEPIECE_BPE or (rule is not None and RULES[rule].begins)
    name = str(metadata.get("general.name", "")).lower()
    scheme = Scheme(
        model=str(model),
        rule=rule,
        size=tokens.count,
        ids=_special_ids(file, str(model), tokens.count),
        add_bos=_flag(file, "add_bos_token", begins) or rule in _ALWAYS_BEGIN,
        add_eos=_flag(file, "add_eos_token", model == UNIGRAM),
        add_space_prefix=_flag(file, "add_space_prefix", model == SENTENCEPIECE_BPE),
        remove_extra_whitespaces=_flag(file, "remove_extra_whitespaces", False),
        charsmap=bytes(byte & 0xFF for byte in file.array(_KEY + "precompiled_charsmap") or ()),
        strips_right="phi-3" in name or "phi3" in name,
        templates=_templates(metadata),
    )
    for wanted, role in ((scheme.add_bos, "bos"), (scheme.add_eos, "eos")):
        if wanted and role not in scheme.ids:
            raise ModelError(f"{path} says that the tokenizer adds a {role} token, but not which one")
    return scheme


def read_vocabulary(file: Gguf, scheme: Scheme) -> Vocabulary:
    """The tokens of a GGUF file. Raises ModelError if they contradict each other, CheckpointError if it is damaged."""
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(file.array(_KEY + "tokens") or ())]
    by_text = {text: token for token, text in enumerate(tokens)}
    if len(by_text) != len(tokens):
        raise ModelError(f"the tokenizer in {file.path} has several tokens of the same text, so ids aren't clear")
    known = set(TokenKind)
    kinds = [
        TokenKind(kind) if kind in known else TokenKind.UNDEFINED
        for kind in _per_token(file, "token_type", scheme.size, TokenKind.NORMAL)
    ]
    ids = dict(scheme.ids)
    for role, texts in _ROLE_TEXTS.items():
        named = next((by_text[text] for text in texts.split() if text in by_text), None)
        if role not in ids and named is not None:
            ids[role] = named
            kinds[named] = TokenKind.CONTROL
    ends = _ends(by_text, ids, kinds)
    scores = [float(score) for score in _per_token(file, "scores", scheme.size, 0.0)]
    return Vocabulary(tokens, kinds, scores, _merges(file) if scheme.rule is not None else [], ends)


_ADVICE = "its tokens would differ from those that the model was trained on; use the model's own folder"


def _refuse_unknown_keys(file: Gguf) -> None:
    for key, value in file.metadata.items():
        if (
            not key.startswith("tokenizer.")
            or key in _OTHER_KEYS
            or key == _TEMPLATE
            or key.startswith(f"{_TEMPLATE}.")
        ):
            continue
        known = key.startswith(_KEY) and key.removeprefix(_KEY) in _READ | _UNUSED
        if not known or (key == f"{_KEY}suppress_tokens" and value != []):
            raise ModelError(f"{file.path} has the key {key}, which eyas doesn't honor: use the model's own folder")


def _rule(file: Gguf, model: str) -> str | None:
    """The rule by which a file's tokenizer splits text. Raises ModelError for an unknown one."""
    if model in (SENTENCEPIECE_BPE, UNIGRAM):
        return None  # llama.cpp reads no rule here
    rule = "gemma4" if model == GEMMA4 else file.metadata.get(_KEY + "pre")
    if not rule:
        _LOG.warning("%s doesn't say how to split text: the rule `default` is used, as in llama.cpp", file.path)
        return "default"
    if rule not in RULES:
        raise ModelError(
            f"the tokenizer in {file.path} splits text by the rule {rule}, which eyas doesn't know: {_ADVICE}"
        )
    return str(rule)


def _per_token(file: Gguf, name: str, count: int, default: Any) -> list[Any]:
    """An array of the tokenizer with one entry a token."""
    found = file.array(_KEY + name)
    if found is not None and len(found) < count:
        raise ModelError(f"{file.path} has {count} tokens, but {_KEY}{name} has only {len(found)} entries")
    return [default] * count if found is None else found[:count]


def _merges(file: Gguf) -> list[tuple[str, str]]:
    found = file.array(_KEY + "merges")
    if found is None:
        raise ModelError(f"the tokenizer in {file.path} has no {_KEY}merges")
    merges = []
    for merge in found:
        cut = merge.find(" ", 1)  # the first part may be a space
        if cut < 0:
            raise ModelError(f"{file.path}: the merge {merge!r} isn't two texts")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _special_ids(file: Gguf, model: str, size: int) -> dict[str, int]:
    """The special tokens that keys name, or the tokenizer model by default; ids outside the vocabulary don't count."""
    ids = {role: token for role, token in _DEFAULT_IDS.get(model, {}).items() if token < size}
    for role, keys in _IDS.items():
        for key in reversed(keys):
            token = file.metadata.get(_KEY + key)
            if token is not None and 0 <= int(token) < size:
                ids[role] = int(token)
            elif token is not None:
                _LOG.warning(
                    "%s: %s%s is %s, which is outside the vocabulary, so it is ignored", file.path, _KEY, key, token
                )
    return ids


def _ends(by_text: Mapping[str, int], ids: Mapping[str, int], kinds: list[TokenKind]) -> frozenset[int]:
    """The tokens that end an answer; corrects `kinds` of tokens that are known by their text."""
    ends = {ids[role] for role in _ENDING_ROLES if role in ids}
    for text in _END_TEXTS:
        if text in by_text:
            ends.add(by_text[text])
            kinds[by_text[text]] = TokenKind.CONTROL
    for text in _VISIBLE_MARKERS:
        if text in by_text:
            kinds[by_text[text]] = TokenKind.USER_DEFINED
    found = {text for text, token in by_text.items() if token in ends}
    # gpt-oss and Solar end a message with <|end|>, and their answers have several messages
    if "<|end|>" in found and found & {"<|return|>", "<|flush|>"} and found & {"<|call|>", "<|calls|>"}:
        ends.discard(by_text["<|end|>"])
        kinds[by_text["<|end|>"]] = TokenKind.USER_DEFINED
    # in Gemma 4 and PLaMo this is HTML
    if "</s>" in found and found & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.discard(by_text["</s>"])
        kinds[by_text["</s>"]] = TokenKind.NORMAL
    return frozenset(ends)


def _flag(file: Gguf, name: str, default: bool) -> bool:
    value = file.metadata.get(_KEY + name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{file.path}: {_KEY}{name} is {value!r}, which is neither true nor false")
    return value


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    named = {
        key.removeprefix(f"{_TEMPLATE}."): str(value)
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    return {"default": str(metadata[_TEMPLATE]), **named} if _TEMPLATE in metadata else named
