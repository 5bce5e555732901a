"""Fill-in-the-middle: the prompt for the text between what stands before and after it (arXiv 2207.14255).

A model that was trained for it has tokens that mark the parts, and an order of its own. Its format is found by these
tokens' texts; a tokenizer that names them (`prefix_token`, `suffix_token` and `middle_token`, as Code Llama's and those
of GGUF files with such keys) comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from eyas.errors import RequestError, UsageError
from eyas.text.template import control_tokens, required

FORMATS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen2.5-Coder, CodeGemma, Granite 4
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder 2, Granite Code
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<\uff5cfim▁begin\uff5c>{prefix}<\uff5cfim▁hole\uff5c>{suffix}<\uff5cfim▁end\uff5c>",  # DeepSeek-Coder
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # Code Llama
    "<PRE>{prefix}<SUF>{suffix}<MID>",
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",  # GLM-4.5
    "<|prefix|>{prefix}<|suffix|>{suffix}<|middle|>",
    "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",  # Seed-Coder
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)
"""Formats by family: the marks, and where the two texts stand among them."""
_PROJECTS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<repo_name>", "<REPO>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
"""Marks before a project's name, and before a file's, in models that were trained on several files at once."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""What separates files for models without such a mark, as in llama.cpp."""
_PROJECT, _FILE = "myproject\n", "filename\n"
"""Names that llama.cpp gives, because requests have none."""
_PREFIX, _SUFFIX = "prefix", "suffix"


class ExtraFile(NamedTuple):
    """Another file of the project, which is read before the one to fill in."""

    name: str
    text: str


class FillFormat(NamedTuple):
    """How a model wants the parts of a text to be marked."""

    before: tuple[int]
    """The mark before the first of the two texts."""
    between: tuple[int]
    after: tuple[int] | tuple[()]
    suffix_first: bool
    """Whether what follows the gap comes first, so that the model continues what precedes it."""
    project: int | None
    """The mark before a project's name; None = there is none."""
    file: int | None


def fill_format(tokenizer: Any, template: str | None = None) -> FillFormat:
    """The format of a tokenizer's model, or the one of a `template` such as those in `FORMATS`.

    Raises RequestError if the tokenizer has no marks for it, and UsageError for a template without both places or with
    a mark that isn't a token.
    """
    found = _format_of(required(tokenizer), template)
    if found is not None:
        return found
    if template is not None:
        raise UsageError(
            f"the fill-in-the-middle format {template!r} must have {{prefix}} and {{suffix}}, and before each a token "
            "of this model, as in <fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
        )
    raise RequestError(
        "this model has no tokens that mark what stands before and after a gap, so it can't fill one in: send the text "
        "before it as the prompt"
    )


@lru_cache(maxsize=8)
def _format_of(tokenizer: Any, template: str | None) -> FillFormat | None:
    """The template's format, else the first of the known ones whose marks are tokens; None if there is none."""
    vocabulary = tokenizer.get_vocab()
    if template is not None:
        return _read(template, vocabulary)
    named = [getattr(tokenizer, f"{role}_token", None) for role in (_PREFIX, _SUFFIX, "middle")]
    own = ["{}{{prefix}}{}{{suffix}}{}".format(*named)] if all(isinstance(text, str) for text in named) else []
    read = (_read(each, vocabulary) for each in (*own, *FORMATS))
    return next((found for found in read if found is not None), None)


def _read(template: str, vocabulary: dict[str, int]) -> FillFormat | None:
    """A template's format; None if it lacks a place, or if a mark isn't a token."""
    parts = re.split(r"\{(prefix|suffix)\}", template)
    if len(parts) != 5 or {parts[1], parts[3]} != {_PREFIX, _SUFFIX}:
        return None
    marks = [(vocabulary[text],) if text in vocabulary else () for text in parts[::2]]
    before, between, after = marks
    if not before or not between or (parts[4] and not after):
        return None
    project, file = (
        next((vocabulary[text] for text in known if text in vocabulary), None) for known in (_PROJECTS, _FILES)
    )
    return FillFormat(before, between, after, parts[1] == _SUFFIX, project, file)


def encode_fill(
    tokenizer: Any,
    form: FillFormat,
    prefix: str | Sequence[int],
    suffix: str,
    *,
    extra: Sequence[ExtraFile] = (),
    begun: str = "",
    named: bool = False,
    max_context: tuple[int, int] | None = None,
) -> tuple[int, ...]:
    """Tokenize a text with a gap, up to where the model fills it in.

    `extra` files come first; `named`: also where there are none, project and file get names, as in llama.cpp.
    `begun` is how the missing text begins. `max_context`: the tokens of prefix and suffix to keep next to the gap.
    What texts say is text, even where it looks like a mark.
    """
    # p = prefix, s = suffix: [bos] [project mark, name] ([file mark, name, text])* [file mark, name]
    # then <pre> p <suf> s <mid>, or with the suffix first <suf> s <pre> p <mid>
    plain = _PlainText(tokenizer)
    p = list(plain(prefix) if isinstance(prefix, str) else prefix)
    s = list(plain(suffix))
    started = list(plain(begun)) if begun else []
    if max_context is not None:
        p = p[max(0, len(p) - max_context[0]) :]
        s = s[: max(0, max_context[1] - len(started))]
    p += started
    first, second = (s, p) if form.suffix_first else (p, s)
    files = _files(form, plain, extra) if extra or named else []
    return (*_beginning(tokenizer), *files, *form.before, *first, *form.between, *second, *form.after)


def _files(form: FillFormat, plain: _PlainText, extra: Sequence[ExtraFile]) -> Iterator[int]:
    """The tokens of the project's other files, and of the beginning of the one to fill in."""
    if form.project is not None:
        yield from (form.project, *plain(_PROJECT))
    for file in extra:
        yield from plain(_SNIPPET) if form.file is None else (form.file, *plain(f"{file.name}\n"))
        yield from plain(file.text)
    if form.file is not None:
        yield from (form.file, *plain(_FILE))


class _PlainText:
    """Tokenizes texts without special tokens: neither those that a tokenizer adds nor those that a text spells out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer, "")

    def __call__(self, text: str) -> list[int]:
        broken = self._control.break_up(text)
        if broken == text:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = self._control.tokenizer(broken, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token != self._control.mark_id]


def _beginning(tokenizer: Any) -> list[int]:
    """The token with which this tokenizer begins every text, if there is one."""
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    return [token for token in added[:1] if token == tokenizer.bos_token_id]
