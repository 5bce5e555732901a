"""Prompts with a gap: marks, order and names as each family has them, and texts that look like marks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tokenizers import AddedToken

from eyas.errors import RequestError, UsageError
from eyas.text.fill import FORMATS, ExtraFile, encode_fill, fill_format

from ..pairs import tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def knowing(*marks: str, **settings: Any) -> Any:
    """A tokenizer with these special tokens."""
    made = deepcopy(tokenizer())
    made.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def text_of(made: Any, ids: tuple[int, ...]) -> str:
    return str(made.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("form", FORMATS)
def test_each_family_is_known_by_its_marks(form: str) -> None:
    marks = [mark for mark in form.replace("{prefix}", "\0").replace("{suffix}", "\0").split("\0") if mark]
    made = knowing(*marks)
    filled = encode_fill(made, fill_format(made), "def add(", "return a")
    assert text_of(made, filled) == form.format(prefix="def add(", suffix="return a")
    assert [token for token in filled if made.convert_ids_to_tokens(token) in marks] == made.convert_tokens_to_ids(
        marks
    )


def test_a_tokenizer_s_own_names_come_first() -> None:
    made = knowing(*QWEN, "<A>", "<B>", "<C>")
    made.prefix_token = "<A>"
    made.suffix_token = "<B>"
    made.middle_token = "<C>"
    assert text_of(made, encode_fill(made, fill_format(made), "a", "b")) == "<A>a<B>b<C>"


def test_other_files_come_first_with_the_marks_that_the_model_has() -> None:
    extra = [ExtraFile("a.py", "x = 1"), ExtraFile("b.py", "y = 2")]
    made = knowing(*QWEN, "<|repo_name|>", "<|file_sep|>")
    filled = text_of(made, encode_fill(made, fill_format(made), "P", "S", extra=extra))
    assert filled == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1<|file_sep|>b.py\ny = 2<|file_sep|>filename\n"
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"
    )
    bare = knowing(*QWEN)
    filled = text_of(bare, encode_fill(bare, fill_format(bare), "P", "S", extra=extra[:1]))
    assert filled == "\n\n--- snippet ---\n\nx = 1<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"


def test_what_is_next_to_the_gap_is_kept_and_how_it_begins_follows() -> None:
    made = knowing(*QWEN)
    form = fill_format(made)
    whole = encode_fill(made, form, "a b c d e f", "1 2 3 4 5 6", begun="z")
    cut = encode_fill(made, form, "a b c d e f", "1 2 3 4 5 6", begun="z", max_context=(3, 4))
    p, s = ([*made(text, add_special_tokens=False)["input_ids"]] for text in ("a b c d e f", "1 2 3 4 5 6"))
    z = [*made("z", add_special_tokens=False)["input_ids"]]
    pre, suf, mid = made.convert_tokens_to_ids(QWEN)
    assert [*whole] == [pre, *p, *z, suf, *s, mid]
    assert [*cut] == [pre, *p[-3:], *z, suf, *s[: 4 - len(z)], mid]


def test_marks_that_a_text_spells_out_are_text() -> None:
    made = knowing(*QWEN)
    filled = encode_fill(made, fill_format(made), "a<|fim_suffix|>b", "<|fim_middle|>")
    assert [token for token in filled if made.convert_ids_to_tokens(token) in QWEN] == made.convert_tokens_to_ids(QWEN)
    assert text_of(made, filled) == "<|fim_prefix|>a<|fim_suffix|>b<|fim_suffix|><|fim_middle|><|fim_middle|>"


def test_a_text_begins_with_the_token_that_all_texts_begin_with() -> None:
    made = knowing(*QWEN, "<s>")
    made.bos_token = "<s>"
    made.backend_tokenizer.post_processor = None
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.convert_tokens_to_ids("<s>"))]
    )
    filled = text_of(made, encode_fill(made, fill_format(made), "P", "S", extra=[ExtraFile("a", "b")]))
    assert filled.startswith("<s>\n\n--- snippet")
    assert filled.count("<s>") == 1


def test_models_without_marks_are_refused_and_formats_may_be_given() -> None:
    made = knowing("<X>", "<Y>")
    with pytest.raises(RequestError, match="no tokens that mark"):
        fill_format(made)
    given = fill_format(made, "<X>{suffix}<Y>{prefix}")
    assert text_of(made, encode_fill(made, given, "P", "S")) == "<X>S<Y>P"
    for wrong in ("<X>{prefix}", "{prefix}<X>{suffix}", "<X>{prefix}<Y>", "<\uff5czzz\uff5c>{prefix}<Y>{suffix}"):
        with pytest.raises(UsageError, match=r"must have \{prefix\} and \{suffix\}"):
            fill_format(made, wrong)
