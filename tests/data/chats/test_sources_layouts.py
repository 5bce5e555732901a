# ruff: noqa: E501
"""Rows of the three layouts, and rows of none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.data.chats.sources import detect_layout, read_layout
from eyas.errors import RowError
from eyas.text.chats import Message

SCHEMA = {"name": "look_up", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}


def messages(row: dict[str, Any], layout: str | None = None) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json") for message in read_layout(row, layout).messages]


def test_openai() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "eyas", "n": null}'}}
    row = {
        "messages": [
            {"role": "developer", "content": "Brief.", "weight": 0},
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "an eyas?"}]},
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "a", "content": "hawk"},
            {"role": "assistant", "content": None, "refusal": "I can't say."},
        ],
        "functions": [SCHEMA],
        "source": "web",
    }
    read = messages(row)
    assert [m["role"] for m in read] == ["developer", "user", "assistant", "tool", "assistant"]
    assert read[1] == {"role": "user", "content": "What is an eyas?"}
    assert read[2]["reasoning_content"] == "Hm."
    assert read[2]["tool_calls"][0]["function"]["arguments"] == {"word": "eyas", "n": None}
    assert "content" not in read[2]
    assert read[3]["tool_call_id"] == "a"
    assert read[4] == {"role": "assistant", "content": "I can't say."}
    assert read_layout(row).tools == (TOOL,)
    assert messages({"messages": json.dumps(row["messages"])}) == read  # as tables keep them
    assert messages({"conversations": row["messages"]}) == read
    old = {"role": "assistant", "content": "", "function_call": {"name": "look_up", "arguments": "not json"}}
    assert messages({"messages": [old]})[0]["tool_calls"][0]["function"]["arguments"] == "not json"


def test_sharegpt() -> None:
    calls = [{"name": "look_up", "arguments": {"word": "eyas"}}, {"name": "sum", "arguments": {}}]
    row = {
        "conversations": [
            {"from": "human", "value": "What?"},
            {"from": "gpt", "value": "I'll look."},
            {"from": "function_call", "value": json.dumps(calls[0])},
            {"from": "function_call", "value": json.dumps(calls[1:])},
            {"from": "observation", "value": "hawk"},
            {"from": "function_response", "value": "2"},
            {"from": "gpt", "value": "A hawk."},
        ],
        "system": "Brief.",
        "tools": json.dumps([SCHEMA]),
    }
    read = messages(row)
    assert [m["role"] for m in read] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert read[2]["content"] == "I'll look."  # one turn with the calls: templates want turns to alternate
    assert [call["function"] for call in read[2]["tool_calls"]] == calls
    assert [call["id"] for call in read[2]["tool_calls"]] == ["call00000", "call00001"]
    assert [(m["tool_call_id"], m["name"]) for m in read[3:5]] == [("call00000", "look_up"), ("call00001", "sum")]
    assert read_layout(row).tools == (TOOL,)


def test_alpaca() -> None:
    row = {"instruction": "Sort.", "input": "2 1", "output": "1 2", "system": "Brief.", "history": [["Hi", "Hello"]]}
    assert [(m["role"], m["content"]) for m in messages(row)] == [
        ("system", "Brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Sort.\n\n2 1"), ("assistant", "1 2"),
    ]  # fmt: skip
    assert [m["role"] for m in messages({"instruction": "Sort.", "input": ""})] == ["user"]


def test_the_layout_is_given_or_found_from_the_keys() -> None:
    both = {"messages": [{"role": "user", "content": "a"}], "instruction": "b"}
    assert detect_layout(both) == "openai"
    assert messages(both, "alpaca") == [{"role": "user", "content": "b"}]
    assert detect_layout({"messages": None, "conversations": [{"from": "human"}]}) == "sharegpt"
    turns = [{"from": "human", "value": "a"}]
    assert detect_layout(unused := {"conversations": None, "conversation": turns}) == "sharegpt"
    assert messages(unused) == [{"role": "user", "content": "a"}]
    assert detect_layout({"conversations": []}) == "sharegpt"


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ([1], "unknown layout", "object, not list"),
        ({"text": "a"}, "unknown layout", "found 'text'"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role", "'robot'"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role", "'narrator'"),
        ({"messages": []}, "bad message", "no messages"),
        ({"messages": "{"}, "bad message", "expected JSON text"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad message", "not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad message", "'image_url'"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]}, "bad message", "only an assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad message", "no name"),
        ({"conversations": [{"from": "function_call", "value": "look!"}]}, "bad message", "expected JSON text"),
        ({"instruction": "a", "history": ["b"]}, "bad message", "pairs"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "["}, "bad tools", "expected JSON text"),
    ],
)  # fmt: skip
def test_bad_rows_say_why(row: Any, reason: str, detail: str) -> None:
    with pytest.raises(RowError) as caught:
        read_layout(row)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_a_message_is_written_without_what_is_absent() -> None:
    message = Message.model_validate(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}
    )
    assert message.for_template() == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}],
    }
