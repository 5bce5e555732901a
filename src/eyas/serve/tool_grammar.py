"""Grammars that make a model call tools, in its own style, with arguments that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import RequestError
from eyas.serve.tool_styles import ToolStyle
from eyas.types import GrammarSpec
from eyas.verify import WHITESPACE, mark, quoted

_THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]")


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    style: ToolStyle,
    tokenizer: Any,
    *,
    parallel: bool = True,
) -> GrammarSpec | None:
    """A grammar of calls of `tools` (OpenAI's form); more than one call only if `parallel`.

    `required` or a named tool: nothing but calls. `auto`: None, but where a tool is `strict` text and calls, the
    calls constrained. RequestError if a named tool doesn't exist, or a strict one can't be told from text.
    """
    names = tools_asked(tools, tool_choice)
    forced = tool_choice == "required" or isinstance(tool_choice, Mapping)
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    if not functions or not (forced or any(function.get("strict") for function in functions)):
        return None
    announced = "" if style.bare else mark(style.marker, tokenizer)
    begin, between, end = _frame(style, announced, tokenizer)
    alternatives, rules = [], []
    for index, function in enumerate(functions):
        rules.append(f"args_{index}: %json {_schema(function.get('parameters'))}")
        alternatives.append(_call(function["name"], f"args_{index}", style, tokenizer))
    rules.append(f"call: {' | '.join(alternatives)}")
    more = f"({between} call)*" if parallel else ""
    calls = f"{announced} {begin} call {more} {end}"
    if not forced:
        if style.bare:
            raise RequestError(f"strict tools need tool_choice required: {style.name} calls begin like any other text")
        # text up to the mark, which is a token of its own or ends a lazy lexeme
        alone = not announced.startswith('"')
        aside = _aside(tokenizer)
        head = f"text {announced}" if alone else f"{aside} text_and_mark"
        rules += ["TEXT: /(.|\\n)*/", f"text: {aside} TEXT"]
        rules += [] if alone else [f"text_and_mark[lazy]: TEXT {announced}"]
        calls = f"({head} {begin} call {more} {end})? text"
    return GrammarSpec("lark", "\n".join([f"start: {calls}", *rules, ""]))


def tools_asked(tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None) -> list[str]:
    """The names of the tools that may be called: none of them, all, or the one that was named."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if len(set(names)) < len(names):
        raise RequestError(f"two tools have the same name: {', '.join(names)}")
    if tool_choice == "none":
        return []
    if isinstance(tool_choice, Mapping):
        name = tool_choice.get("function", {}).get("name")
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools: {', '.join(names)}")
        return [name]
    if tool_choice not in (None, "auto", "required"):
        raise RequestError(f"tool_choice {tool_choice!r} is not supported: use none, auto, required or a function")
    return names


def _aside(tokenizer: Any) -> str:
    """Tokens of thinking aloud, which are no text, and what stands before them; nothing where there are none."""
    marks = [mark(name, tokenizer) for name in _THOUGHTS if name in tokenizer.get_added_vocab()]
    return f"(TEXT ({' | '.join(marks)}))*" if marks else ""


def _frame(style: ToolStyle, announced: str, tokenizer: Any) -> tuple[str, str, str]:
    """What stands behind the first mark, between calls and at the end."""
    if style.bare:
        return "", quoted("; "), ""
    if style.named:
        return "", announced, ""
    if style.listed:
        return f"{quoted(' ')}? {quoted('[')}", quoted(", "), quoted("]")
    line = quoted("\n")
    end = f"{line} {mark(style.end, tokenizer)}"
    return line, f"{end} {line} {announced} {line}", end


def _call(name: str, arguments: str, style: ToolStyle, tokenizer: Any) -> str:
    if style.named:
        return f"{quoted(name)} {mark('[ARGS]', tokenizer)} {arguments}"
    begin = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
    return f"{quoted(begin)} {arguments} {quoted('}')}"


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = dict(parameters or {"type": "object", "properties": {}, "additionalProperties": False})
    schema.setdefault("type", "object")
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
