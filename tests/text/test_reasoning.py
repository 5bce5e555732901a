"""Thoughts are told from answers: the same however a text is cut, and nothing of it is lost."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import UsageError
from eyas.text.chats import Message
from eyas.text.reasoning import (
    PARSERS,
    Piece,
    ReasoningMarks,
    ThoughtSplitter,
    begins_inside,
    check_parser,
    reasoning_marks,
)
from eyas.text.template import encode_chat

from ..data.templates import templated
from ..pairs import tokenizer

QWEN = PARSERS["qwen3"]
MISTRAL = PARSERS["mistral"]
HARMONY = PARSERS["gpt_oss"]
GRANITE, GEMMA = PARSERS["granite"], PARSERS["gemma4"]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


def split(marks: ReasoningMarks, text: str, sizes: list[int] | None = None, **options: Any) -> list[Piece]:
    """The pieces, if the text comes in pieces of these sizes. Together they are the whole text, marks left out."""
    splitter = ThoughtSplitter(marks, **options)
    pieces = list[Piece]()
    at = 0
    for size in [*(sizes or ()), len(text)]:
        pieces += splitter.feed(text[at : at + size])
        at += size
    pieces += splitter.finish()
    at = 0
    for piece in pieces:
        assert piece.stop > at
        read = text[at : piece.stop]
        assert piece.text == read or (piece.text == "" and read.strip() in ("", *marks.texts))
        at = piece.stop
    assert at == len(text)
    return pieces


def thought_and_answer(pieces: list[Piece]) -> tuple[str, str]:
    thought, answer = ("".join(piece.text for piece in pieces if piece.thought == kind) for kind in (True, False))
    return thought, answer


@pytest.mark.parametrize(
    ("marks", "inside", "text", "thought", "answer"),
    [
        (QWEN, False, "<think>\nhm\nso\n</think>\n\nYes.", "hm\nso", "Yes."),
        (QWEN, False, "\n<think></think>\n\n  Yes.\n", "", "  Yes.\n"),
        (QWEN, False, "Yes. <think>hm</think>", "", "Yes. <think>hm</think>"),
        (QWEN, False, " \nYes.", "", " \nYes."),
        (QWEN, False, "<think>a</think>\n<think>b</think>c", "ab", "c"),
        (QWEN, False, "<think>never closed\n</thi", "never closed\n</thi", ""),
        (QWEN, False, "<thinker> is a tag", "", "<thinker> is a tag"),
        (QWEN, True, "\nhm < so\n</think>\n\nYes </think>.", "hm < so", "Yes </think>."),
        (QWEN, True, "<think>\nagain</think>Yes.", "again", "Yes."),
        (QWEN, True, "</think>Yes.", "", "Yes."),
        (QWEN, True, "never closed", "never closed", ""),
        (QWEN, True, "", "", ""),
        (PARSERS["granite_3_3"], False, "<think>hm</think>\n<response>Yes.</response>", "hm", "Yes."),
        (PARSERS["granite_3_3"], False, "Write <response>.", "", "Write <response>."),
        (GRANITE, False, "Here is my thought process: hm\nHere's my response:\nYes.", " hm", "Yes."),
        (GRANITE, False, "Here is my answer.", "", "Here is my answer."),
        (MISTRAL, False, "[THINK]hm[/THINK]So: [THINK]or[/THINK]yes", "hmor", "So: yes"),
        (GEMMA, False, "<|channel>thought\nhm\n<channel|>Yes.", "hm", "Yes."),
        (GEMMA, False, "<|channel>thought\n<channel|>Yes.", "", "Yes."),
        (HARMONY, False, f"{ANALYSIS}hm<|end|>{FINAL}Yes.", "hm", "Yes."),
        (HARMONY, False, f"{ANALYSIS}hm<|end|><|start|>assistant{ANALYSIS}so<|end|>{FINAL}Yes.", "hmso", "Yes."),
        (HARMONY, False, f"{ANALYSIS}hm<|end|>{CALL}", "hm", CALL),
        (HARMONY, False, f"{ANALYSIS}hm{FINAL}Yes.", "hm", "Yes."),
        (HARMONY, False, "<|channel|>final<|message|>Yes.", "", "Yes."),
        (HARMONY, False, f"<|channel|>commentary<|message|>I look.<|end|>{CALL}", "", f"I look.{CALL}"),
    ],
)  # fmt: skip
def test_a_text_is_split_at_its_marks(
    marks: ReasoningMarks, inside: bool, text: str, thought: str, answer: str
) -> None:
    for sizes in ([], [1] * len(text)):
        assert thought_and_answer(split(marks, text, sizes, inside=inside)) == (thought, answer)


def test_a_call_within_a_thought_ends_it() -> None:
    call = '<tool_call>\n{"name": "f"}'
    for begin, inside in (("<think>\nhm\n", False), ("\nhm\n", True)):
        pieces = split(QWEN, begin + call, inside=inside, interrupts=["<tool_call>"])
        assert thought_and_answer(pieces) == ("hm", call)
        assert thought_and_answer(split(QWEN, begin + call, inside=inside)) == (f"hm\n{call}", "")


def texts_of(marks: ReasoningMarks) -> st.SearchStrategy[str]:
    """Texts in which marks and parts of them are frequent."""
    parts = st.sampled_from(
        [*marks.texts, *(mark[: len(mark) // 2] for mark in marks.texts), "\n", " ", "a", "<", "\r\n"]
    )
    return st.lists(parts, max_size=12).map("".join)


@given(st.sampled_from(sorted(PARSERS)), st.booleans(), st.booleans(), st.data())
def test_a_text_is_split_the_same_however_it_is_cut(name: str, inside: bool, tools: bool, data: st.DataObject) -> None:
    marks = PARSERS[name]
    text = data.draw(texts_of(marks))
    options: dict[str, Any] = {"inside": inside, "interrupts": ["<tool_call>"] if tools else []}
    if tools:
        text = text.replace("a", "<tool_call>", 1)
    whole = split(marks, text, **options)
    cut = split(marks, text, data.draw(st.lists(st.integers(1, 9), max_size=30)), **options)
    assert thought_and_answer(cut) == thought_and_answer(whole)
    owners = [
        [next(piece.thought for piece in pieces if piece.stop > at) for at in range(len(text))]
        for pieces in (whole, cut)
    ]
    assert owners[0] == owners[1], "another part of the text counts as thought"


@given(st.text(), st.booleans())
def test_a_text_without_marks_is_whole(text: str, inside: bool) -> None:
    if not any(mark in text for mark in QWEN.texts):
        assert thought_and_answer(split(QWEN, text, inside=inside)) == (
            (text.lstrip("\r\n"), "") if inside else ("", text)
        )


@pytest.mark.parametrize("name", PARSERS)
def test_no_mark_begins_with_another_one(name: str) -> None:
    marks = PARSERS[name]
    for place in (
        marks.opens,
        (*marks.closes, *marks.interrupts),
        (*marks.opens, *marks.answer_opens, *marks.answer_closes),
    ):
        assert not [pair for pair in permutations(place, 2) if pair[0].startswith(pair[1])]


def test_what_can_not_be_a_mark_is_not_held_back() -> None:
    splitter = ThoughtSplitter(QWEN, inside=True)
    assert [piece.text for piece in splitter.feed("hm </th")] == ["hm "]
    assert splitter.thinking
    assert [piece.text for piece in splitter.feed("e\n")] == ["</the"]
    assert [piece.text for piece in splitter.feed("</think>Yes.")] == ["", "Yes."]
    assert splitter.settled
    assert not splitter.thinking
    assert [piece.text for piece in splitter.feed("<th")] == ["<th"]


HELLO = [Message(role="user", content="Hi <think>")]


def with_template(source: str, added: tuple[str, ...] = (), made: Any = None) -> Any:
    """A tokenizer with this template and additional special tokens."""
    made = copy.deepcopy(made or tokenizer())
    made.add_tokens(list(added), special_tokens=True)
    made.chat_template = source
    return made


@pytest.mark.parametrize(
    ("source", "added", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", (), "qwen3"),
        ("{{ messages }}", ("[THINK]", "[/THINK]"), "mistral"),
        ("Think first: <think> </think>", ("[THINK]", "[/THINK]"), "qwen3"),
        ("<|start|>assistant<|channel|>final<|message|>", (), "gpt_oss"),
        ("write 'Here is my thought process:' and 'Here is my response:'", (), "granite"),
        ("<think></think><response></response>", (), "granite_3_3"),
        ("<seed:think></seed:think>", (), "seed_oss"),
        ("<|channel>thought\n<channel|>", (), "gemma4"),
        ("{{ messages }}", ("<|START_THINKING|>", "<|END_THINKING|>"), "cohere"),
        ("{{ messages }}", (), None),
        ("", ("<think>", "</think>"), None),
    ],
)
def test_the_template_shows_the_marks_or_else_the_vocabulary(
    source: str, added: tuple[str, ...], name: str | None
) -> None:
    assert reasoning_marks(with_template(source, added)) == (None if name is None else PARSERS[name])


def test_a_name_says_what_the_marks_are() -> None:
    assert reasoning_marks(templated("qwen3"), "mistral") == MISTRAL
    assert reasoning_marks(templated("qwen3"), "none") is None
    assert reasoning_marks(None) is None
    assert check_parser("deepseek-r1") == "deepseek_r1"
    with pytest.raises(UsageError, match=r"no reasoning parser qwen9: use auto, none, .*qwen3"):
        check_parser("qwen9")


def test_a_template_that_opens_the_thought_begins_inside_it() -> None:
    for family, inside in (("qwen3", False), ("deepseek", True)):
        made = templated(family)
        marks = reasoning_marks(made)
        assert marks is not None
        assert begins_inside(marks, made, encode_chat(made, HELLO)) == inside
    closed = with_template("{{ messages[0].content }}<|a|><think>\n\n</think>\n\n")
    assert not begins_inside(PARSERS["deepseek_r1"], closed, encode_chat(closed, HELLO))
    assert begins_inside(PARSERS["deepseek_r1"], templated("qwen3"), encode_chat(templated("qwen3"), HELLO))


@pytest.mark.parametrize(
    ("said", "inside"), [("<think>\nhm", True), ("<think>hm</think>So", False), ("So", False), ("So <think>", False)]
)
def test_an_answer_that_is_continued_is_where_it_was(said: str, inside: bool) -> None:
    made = templated("qwen3")
    prompt = encode_chat(made, HELLO) + tuple(made(said, add_special_tokens=False)["input_ids"])
    assert begins_inside(QWEN, made, prompt, said) == inside
