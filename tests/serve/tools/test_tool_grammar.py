"""Constrained calls are calls: what such a grammar allows is read back by the parser, and nothing else is allowed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import RequestError
from eyas.serve.tools.calling import callable_tools, tool_call_grammar
from eyas.serve.tools.styles import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolStyle
from eyas.verify import compile_grammar
from eyas.verify.constraint import Constraint

from ... import pairs
from .test_parser import read

pytest.importorskip("llguidance")

STYLES = [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS]
PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "maxLength": 20}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


@cache
def tokenizer(special: bool) -> Any:
    """One whose marks are tokens: special ones, or merely added ones."""
    made = pairs.tokenizer().__class__(
        tokenizer_object=pairs.tokenizer().backend_tokenizer.__class__.from_str(
            pairs.tokenizer().backend_tokenizer.to_str()
        ),
        eos_token=pairs.tokenizer().eos_token,
    )
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
    made.add_tokens(marks, special_tokens=special)
    return made


def allowed(text: str, choice: Any, style: ToolStyle, special: bool, tools: Any = TOOLS, **options: Any) -> bool:
    """May an answer be `text`?"""
    made = tokenizer(special)
    spec = tool_call_grammar(tools, choice, style, made, **options)
    assert spec is not None
    followed = Constraint(compile_grammar(made, spec), [made.eos_token_id])
    ids = [*made(text, add_special_tokens=False)["input_ids"], made.eos_token_id]
    return followed.consume(ids) == len(ids)


def written(style: ToolStyle, *calls: tuple[str, Any]) -> str:
    key = "parameters" if style is LLAMA3 else "arguments"
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    if style is HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if style is LLAMA3:
        return "; ".join(objects)
    if style is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.begin)
def test_calls_and_nothing_but_calls(style: ToolStyle, special: bool) -> None:
    one, two = ("weather", {"place": "Ulm"}), ("now", {})
    assert allowed(written(style, one), "required", style, special)
    assert allowed(written(style, two, one), "required", style, special)
    assert not allowed(written(style, two, one), "required", style, special, parallel=False)
    assert not allowed("It rains.", "required", style, special)
    assert not allowed(written(style, ("weather", {"days": 1})), "required", style, special)
    assert not allowed(written(style, ("snow", {})), "required", style, special)
    named = {"type": "function", "function": {"name": "now"}}
    assert allowed(written(style, two), named, style, special)
    assert not allowed(written(style, one), named, style, special)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.begin)
@given(place=st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=5), days=st.integers(-99, 99))
@settings(max_examples=15)
def test_what_is_allowed_is_read_back(style: ToolStyle, place: str, days: int) -> None:
    arguments = {"place": place, "days": days}
    text = written(style, ("weather", arguments)).replace(json.dumps(place), json.dumps(place, ensure_ascii=False))
    assert allowed(text, "required", style, True)
    ((name, found),) = read(style, [text])[1]
    assert (name, json.loads(found)) == ("weather", arguments)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda style: style.begin)
def test_strict_tools_leave_text_free(style: ToolStyle, special: bool) -> None:
    call = written(style, ("weather", {"place": "Ulm"}))
    assert allowed("It\nrains.", "auto", style, special, STRICT)
    assert allowed(call, "auto", style, special, STRICT)
    assert allowed(f"Let me see.\n{call}", "auto", style, special, STRICT)
    assert allowed(f"<think>\nRain?\n</think>\n\nYes.{call}", "auto", style, special, STRICT)
    assert not allowed(written(style, ("weather", {"days": 1})), "auto", style, special, STRICT)


def test_when_there_is_no_grammar() -> None:
    assert tool_call_grammar(TOOLS, "auto", HERMES, tokenizer(False)) is None
    assert tool_call_grammar(TOOLS, None, HERMES, tokenizer(False)) is None
    assert tool_call_grammar(TOOLS, "none", HERMES, tokenizer(False)) is None
    assert tool_call_grammar(STRICT, "none", HERMES, tokenizer(False)) is None
    with pytest.raises(RequestError, match="strict"):
        tool_call_grammar(STRICT, "auto", LLAMA3, tokenizer(False))


def test_tools_asked() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert callable_tools(TOOLS, "auto") == callable_tools(TOOLS, None) == ["weather", "now"]
    assert callable_tools(TOOLS, named) == ["now"]
    assert callable_tools(TOOLS, "none") == callable_tools(None, None) == []
    for tools, choice, why in (
        (TOOLS, {"function": {"name": "x"}}, "names 'x'"),
        (TOOLS, "maybe", "'maybe' is not supported"),
        (TOOLS + TOOLS[:1], None, "same name"),
    ):
        with pytest.raises(RequestError, match=why):
            callable_tools(tools, choice)
