"""How BPE tokenizers of GGUF files split text before merging: the rules that `tokenizer.ggml.pre` names.

A rule is a sequence of regular expressions; each splits its matches off from the pieces so far. They come from
llama.cpp (`llm_tokenizer_bpe` in `llama-vocab.cpp`) or, where llama.cpp quotes a model's tokenizer.json but only
approximates it, from that file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE = r"\p{N}{1,3}"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2, _MINICPM5 = (
    rf"{_ENDINGS}|{_WORD}|{digits}|{_SIGNS}[\r\n]*|{_SPACES}" for digits in (_THREE, r"\p{N}", r"\p{N}+")
)
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN, _YOUTU, _GPT4O = (
    rf"{_UPPER}*{_LOWER}+{ending}|{_UPPER}+{_LOWER}*{ending}|{digits}|{_SIGNS}[\r\n/]*|{_SPACES}"
    for ending, digits in (("", r"\p{N}"), (f"{_ENDINGS}?", r"\p{N}"), (f"{_ENDINGS}?", _THREE))
)
_MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_HAN, _ASIAN = "[\u4e00-\u9fa5\u3040-\u30ff]+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# cased letters, without the Georgian ones that had no case when the rule was written
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐ"
    "ῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)

_SPLITS: dict[str, tuple[str, ...]] = {
    name: tuple(expressions)
    for names, *expressions in (
        ("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
        ("gpt-2 a.x-4.0 exaone4 gigachat granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de "
         "jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion", _GPT2),
        ("smollm codeshell command-r exaone mellum2 minerva-7b refact starcoder", r"\p{N}", _GPT2),
        ("llama3 llama-v3 llama-bpe chatglm-bpe dbrx falcon-h1 falcon3 glm4 glm5 jina-v5-nano lfm2 midm-2.0 pixtral "
         "smaug-bpe", _LLAMA3),
        ("qwen2 deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez solar-open stablelm2", _QWEN2),
        ("qwen35", rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
         rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"),
        ("gpt-4o kanana2 llama4 minimax-m2 talkie", _GPT4O),
        ("cohere2moe tiny_aya", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
        ("tekken", _TEKKEN),
        ("youtu", "[\uac00-\ud7a3\u3131-\u318e]+|[\u3105-\u312f]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014"
         f"\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|{_HAN}", _YOUTU),
        ("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
        ("deepseek-llm", r"[\r\n]", rf"\s?[{_CASED}]+",
         "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _ASIAN, r"\p{N}+"),
        ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", _THREE, _HAN, rf"{_MARKED}[\r\n]*|{_SPACES}"),
        ("spark2_5", _THREE, _HAN, rf"{_MARKED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
        ("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
        ("bloom gpt3-finnish poro-chat", _SENTENCE),
        ("viking", _SENTENCE, r"\p{N}"),
        ("bailingmoe bailingmoe2 llada-moe",
         rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}|{_SIGNS}+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
        ("seed-coder", rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
        ("exaone-moe", rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
         rf"|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"),
        ("minicpm5", _THREE, _MINICPM5),
        ("ufakzeka", rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"),
        ("laguna", r"[^\n]+|[\n]+", _QWEN2),
        ("gemma4 granite-embed-multi-311m sarvam-moe", r"[^\n]+|[\n]+"),
        ("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
        ("jais-2", rf"{_ENDINGS}|{_WORD}|{_THREE}|{_SIGNS}[\r\n]*|\s*[\r\n]+|"
         + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"),
        ("chameleon", "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
         r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    )
    for name in names.split()
}  # fmt: skip
_ADD_BOS = frozenset(
    "chameleon falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral tekken".split()
)
_IGNORE_MERGES = frozenset(
    "falcon-h1 falcon3 glm4 glm5 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 minicpm5 pixtral tekken "
    "youtu".split()
)
_PLAIN = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})


class Rule(NamedTuple):
    """One rule, and what llama.cpp ties to its name."""

    expressions: tuple[str, ...]
    """Each splits its matches off from the pieces so far."""
    begins: bool
    """Whether texts begin with the bos token if the file doesn't say."""
    whole: bool
    """Whether a piece that is a token is taken whole, whether or not merges lead to it."""
    byte_level: bool
    """Whether tokens are written in GPT-2's alphabet of bytes; otherwise in plain text, with ▁ for a space."""


RULES = {
    name: Rule(found, name in _ADD_BOS, name in _IGNORE_MERGES, name not in _PLAIN) for name, found in _SPLITS.items()
}
"""Name -> rule."""


def pre_tokenizer(rule: Rule) -> Any:
    """The part of a `tokenizers` tokenizer that splits text by a rule."""
    from tokenizers import Regex, pre_tokenizers

    cuts: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.expressions]
    if rule.byte_level:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(cuts)
