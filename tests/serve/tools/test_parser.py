"""Tool calls are read the same however the answer is split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.serve.tools.parser import CallPiece, TextPiece, ToolCallParser
from eyas.serve.tools.styles import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolStyle

Read = tuple[str, list[tuple[str, str]]]

CASES: dict[str, tuple[ToolStyle, str, Read]] = {
    "hermes": (
        HERMES,
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"], "b": {"c": "\\""}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ("Let me see.", [("f", '{"a": [1, "}"], "b": {"c": "\\""}}'), ("g", "{}")]),
    ),
    "hermes, text only": (HERMES, " 1 < 2, a <tool and a <tool_cal\n", (" 1 < 2, a <tool and a <tool_cal\n", [])),
    "hermes, no end mark": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{"x":1}}<tool_call>{"name":"g","arguments":{}}',
        ("", [("f", '{"x":1}'), ("g", "{}")]),
    ),
    "hermes, other order and keys": (
        HERMES,
        '<tool_call>{"id": [1, {"name": "no"}], "arguments": {"x": 1}, "name": "f"}</tool_call>',
        ("", [("f", '{"x": 1}')]),
    ),
    "hermes, no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    "hermes, text behind": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nSo much for f.\n',
        ("\nSo much for f.", [("f", "{}")]),
    ),
    "hermes, arguments as text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\\\u00e9\\"}"}</tool_call>',
        ("", [("f", '{"x": "\\u00e9"}')]),
    ),
    "hermes, no call": (HERMES, "x <tool_call>oops</tool_call>", ("x <tool_call>oops</tool_call>", [])),
    "hermes, mark twice": (
        HERMES,
        '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ("<tool_call>", [("f", "{}")]),
    ),
    "hermes, nameless": (HERMES, '<tool_call>{"arguments": {}}', ('<tool_call>{"arguments": {}}', [])),
    "hermes, cut": (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "ab', ("", [("f", '{"x": "ab')])),
    "hermes, cut early": (HERMES, 'So <tool_call>{"name": "f', ('So <tool_call>{"name": "f', [])),
    "hermes, cut in the end mark": (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool', ("", [("f", "{}")])),
    "hermes, broken behind the name": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}} and more',
        (" and more", [("f", "{}")]),
    ),
    "llama3": (LLAMA3, '{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    "llama3, tagged": (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    "llama3, several": (
        LLAMA3,
        '\n{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {"y": 2}}\n{"name": "h"}',
        ("", [("f", '{"x": 1}'), ("g", '{"y": 2}'), ("h", "{}")]),
    ),
    "llama3, any object": (LLAMA3, '{"color": "red"} it is', ('{"color": "red"} it is', [])),
    "llama3, later": (LLAMA3, 'Look: {"name": "f", "parameters": {}}', ('Look: {"name": "f", "parameters": {}}', [])),
    "mistral": (
        MISTRAL,
        'Yes.[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {"s": "]"}}]',
        ("Yes.", [("f", '{"a": [1]}'), ("g", '{"s": "]"}')]),
    ),
    "mistral, no list": (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    "mistral, named": (
        MISTRAL_ARGS,
        '[TOOL_CALLS]get_time[ARGS]{"a": "{"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ("", [("get_time", '{"a": "{"}'), ("g", "{}")]),
    ),
    "mistral, no name": (MISTRAL_ARGS, "[TOOL_CALLS]what is\nthat", ("[TOOL_CALLS]what is\nthat", [])),
}


def read(style: ToolStyle, pieces: Sequence[str]) -> Read:
    """Text and calls; checks indices and that names and ids come first and once."""
    parser = ToolCallParser(style)
    text = ""
    calls = list[list[str]]()
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        if isinstance(event, TextPiece):
            assert event.text
            text += event.text
        elif event.name is not None:
            assert event.index == len(calls)
            assert event.id
            calls.append([event.name, event.arguments])
        else:
            assert event.index == len(calls) - 1
            assert event.id is None
            calls[-1][1] += event.arguments
    assert parser.calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES)
def test_one_piece(case: str) -> None:
    style, text, expected = CASES[case]
    assert read(style, [text]) == expected


@pytest.mark.parametrize("case", CASES)
def test_split_everywhere(case: str) -> None:
    style, text, expected = CASES[case]
    assert read(style, list(text)) == expected
    for at in range(len(text)):
        assert read(style, [text[:at], text[at:]]) == expected


ALPHABET = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", ',
    '"arguments": {"a": 1}',
    '"parameters": {}',
    "}",
    "{",
    "[",
    "]",
]
ALPHABET += ['"', "\\", ",", ";", "\n", " ", "x", "<", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "g"}', "é"]


@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS]),
    st.lists(st.sampled_from(ALPHABET), max_size=25),
    st.lists(st.integers(0, 120), max_size=6),
)
def test_any_text_any_split(style: ToolStyle, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(style, pieces) == read(style, [text]) == read(style, list(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=3), st.booleans())
def test_arguments_survive(arguments: list[dict[str, Any]], ascii_only: bool) -> None:
    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    calls = [("f", written(each)) for each in arguments]
    hermes = "".join(f"<tool_call>\n{written({'name': 'f', 'arguments': each})}\n</tool_call>\n" for each in arguments)
    llama = "; ".join(written({"name": "f", "parameters": each}) for each in arguments)
    mistral = "[TOOL_CALLS] " + written([{"name": "f", "arguments": each} for each in arguments])
    named = "".join(f"[TOOL_CALLS]f[ARGS]{written(each)}" for each in arguments)
    for style, text in ((HERMES, hermes), (LLAMA3, llama), (MISTRAL, mistral), (MISTRAL_ARGS, named)):
        assert read(style, [text]) == ("", calls)
        assert read(style, list(text)) == ("", calls)


def test_arguments_stream() -> None:
    """Nothing that is certain is held back."""
    parser = ToolCallParser(HERMES)
    assert parser.feed("Well, ") == [TextPiece("Well,")]
    assert parser.feed("yes") == [TextPiece(" yes")]
    assert parser.feed('\n<tool_call>{"name": "f') == []
    (start,) = parser.feed('", ')
    assert isinstance(start, CallPiece)
    assert start.name == "f"
    assert parser.feed('"arguments": {"x') == [CallPiece(0, '{"x')]
    assert parser.feed('": 1}') == [CallPiece(0, '": 1}')]
    assert parser.feed("}") == parser.finish() == []


def test_deltas() -> None:
    parser = ToolCallParser(HERMES, iter(["call_1"]).__next__)
    events = parser.feed('<tool_call>{"name": "f"') + parser.feed(', "arguments": {}}')
    assert [event.delta() for event in events if isinstance(event, CallPiece)] == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{}"}},
    ]


def test_ids() -> None:
    assert HERMES.new_id().startswith("call_")
    assert len({HERMES.new_id() for _ in range(100)}) == 100
    made = MISTRAL.new_id()  # their template refuses others
    assert len(made) == 9
    assert made.isalnum()
