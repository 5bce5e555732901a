"""Parsers for the row layouts of chat data sets: OpenAI, ShareGPT and Alpaca."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError

from eyas.errors import RowError
from eyas.text.chats import Message

UNKNOWN_LAYOUT = "unknown layout"
UNKNOWN_ROLE = "unknown role"
BAD_MESSAGE = "bad message"
BAD_TOOLS = "bad tools"

Record = dict[str, Any]


class ParsedChat(NamedTuple):
    """The messages and tools of a row; the caller adds the id."""

    messages: list[Message]
    tools: tuple[Record, ...] | None


_OPENAI = {name: name for name in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def read_layout(row: Any, layout: str | None = None) -> ParsedChat:
    """Parse a row whose layout is given, or detected from its keys. RowError if the row is not a chat."""
    if not isinstance(row, dict):
        raise RowError(UNKNOWN_LAYOUT, f"a row must be a JSON object, not {type(row).__name__}")
    name = layout or detect_layout(row)
    chat = LAYOUTS[name](row)
    if not chat.messages:
        raise RowError(BAD_MESSAGE, "the row has no messages")
    return chat


def detect_layout(row: Record) -> str:
    """The name of the layout that a row's keys belong to; RowError if they belong to none."""
    if row.get("messages") is not None:
        return "openai"
    turns = row.get("conversations", row.get("conversation"))
    if turns is not None:
        turns = _decoded(turns)
        first = turns[0] if isinstance(turns, list) and turns else None
        return "openai" if isinstance(first, dict) and "role" in first else "sharegpt"
    if row.get("instruction") is not None:
        return "alpaca"
    keys = ", ".join(map(repr, list(row)[:8])) or "nothing"
    raise RowError(UNKNOWN_LAYOUT, f"a row needs messages, conversations or instruction; found {keys}")


def _openai(row: Record) -> ParsedChat:
    turns = next((row[key] for key in ("messages", "conversations", "conversation") if row.get(key) is not None), None)
    messages = [_openai_message(turn) for turn in _listed(turns, "messages")]
    return ParsedChat(messages, _tools(row))


def _openai_message(turn: Record) -> Message:
    role = _role(turn.get("role"), _OPENAI)
    content = _text(turn.get("content"))
    calls = _listed(turn["tool_calls"], "tool_calls") if turn.get("tool_calls") else []
    if turn.get("function_call"):  # before there were tools
        calls = [*calls, {"function": turn["function_call"]}]
    if content is None and turn.get("refusal"):
        content = turn["refusal"]
    reasoning = next((turn[key] for key in ("reasoning_content", "reasoning", "thinking") if turn.get(key)), None)
    return _message(
        role=role,
        content=content if content is not None or calls else "",
        reasoning_content=reasoning,
        tool_calls=[_call(call) for call in calls] or None,
        tool_call_id=turn.get("tool_call_id"),
        name=turn.get("name"),
    )


def _sharegpt(row: Record) -> ParsedChat:
    turns = row.get("conversations", row.get("conversation"))
    messages = [_message(role="system", content=_text(row["system"]))] if row.get("system") else []
    number, answered = 0, 0
    names: list[str] = []
    for turn in _listed(turns, "conversations"):
        said, value = turn.get("from"), _text(turn.get("value"))
        role = _role(said, _SHAREGPT)
        if said == "function_call":
            calls = [_call(call) for call in _listed(_decoded(value or ""), "function_call", one=True)]
            for call in calls:
                call["id"] = f"call{number:05d}"  # nine letters and digits: some templates insist
                names.append(call["function"]["name"])
                number += 1
            before = messages.pop() if messages and messages[-1].role == "assistant" else None
            known = [call.model_dump() for call in (before.tool_calls or ()) if before] if before else []
            content = before.content if before else None
            messages.append(_message(role=role, content=content, tool_calls=[*known, *calls]))
        elif role == "tool" and answered < number:
            call_id = f"call{answered:05d}"
            messages.append(_message(role=role, content=value, tool_call_id=call_id, name=names[answered]))
            answered += 1
        else:
            messages.append(_message(role=role, content=value))
    return ParsedChat(messages, _tools(row))


def _alpaca(row: Record) -> ParsedChat:
    messages = [_message(role="system", content=_text(row["system"]))] if row.get("system") else []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RowError(BAD_MESSAGE, "history must be a list of [question, answer] pairs")
        messages += [_message(role="user", content=turn[0]), _message(role="assistant", content=turn[1])]
    parts = [_text(row.get("instruction")), _text(row.get("input"))]
    messages.append(_message(role="user", content="\n\n".join(part for part in parts if part)))
    if row.get("output") is not None:
        messages.append(_message(role="assistant", content=_text(row["output"])))
    return ParsedChat(messages, None)


LAYOUTS: dict[str, Callable[[Record], ParsedChat]] = {"openai": _openai, "sharegpt": _sharegpt, "alpaca": _alpaca}


def _role(name: Any, known: dict[str, str]) -> str:
    if not isinstance(name, str) or name not in known:
        raise RowError(UNKNOWN_ROLE, f"{name!r} is not one of {', '.join(known)}")
    return known[name]


def _text(content: Any) -> str | None:
    """Message content as text; the parts of a content list are joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(BAD_MESSAGE, f"content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(BAD_MESSAGE, f"content has a part that isn't text: {kind!r}")
        texts.append(text)
    return "".join(texts)


def _call(call: Record) -> Record:
    """A tool call in OpenAI's form; arguments given as JSON text are parsed if they hold an object."""
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(BAD_MESSAGE, "a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments is None or arguments == "" else arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    made: Record = {"function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if call.get("id") else {})


def _tools(row: Record) -> tuple[Record, ...] | None:
    given = next((row[key] for key in ("tools", "functions") if row.get(key)), None)
    if given is None:
        return None
    try:
        schemas = _listed(_decoded(given), "tools")
    except RowError as error:
        raise RowError(BAD_TOOLS, error.detail) from error
    tools = [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas]
    return tuple(tools) or None


def _decoded(value: Any) -> Any:
    """The value, parsed if it is JSON text: tables often store nested values that way."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(BAD_MESSAGE, f"expected JSON text: {error}") from error


def _listed(value: Any, name: str, one: bool = False) -> list[Record]:
    value = _decoded(value)
    if one and isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(BAD_MESSAGE, f"{name} must be a list of objects")
    return value


def _message(**fields: Any) -> Message:
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RowError(BAD_MESSAGE, f"{field}: {first['msg']}" if field else str(first["msg"])) from error
