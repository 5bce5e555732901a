"""Tool calls: the style in which a model writes them, and the grammar that constrains calls to the tools' schemas.

The style is recognized from the chat template:

| style | an answer with calls |
|---|---|
| `hermes` | text, then `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call (Hermes, Qwen) |
| `llama3` | only `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>` |
| `mistral` | text, then `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` |
| `mistral_args` | text, then `[TOOL_CALLS]name[ARGS]{...}`, once per call (from Mistral's tokenizer 11 on) |
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import RequestError
from eyas.serve.errors import ApiError
from eyas.serve.schema.chat import ChatCompletionRequest
from eyas.serve.schema.messages import NamedToolChoice, tool_schemas
from eyas.serve.tools.structured import closed_schema
from eyas.text.detokenizer import special_token_ids
from eyas.types import GrammarSpec
from eyas.verify import WHITESPACE, lark_literal, lark_marker

_THINKING_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")


@dataclass(frozen=True)
class ToolStyle:
    """One style of writing tool calls."""

    name: str
    marker: str
    """The text before a call. It may be a special token, which the parser needs to see in the decoded answer."""
    arguments: str
    """The key of the arguments in a call that is written as an object."""
    end: str = ""
    """The text after a call; empty if a call needs no end mark."""
    bare: bool = False
    """Whether an answer that begins with an object is a call even without the marker; `;` may separate calls."""
    listed: bool = False
    """Whether one marker may be followed by a list of all calls."""
    named: bool = False
    """Whether the name may precede the object, which then contains only the arguments."""
    id_length: int = 0
    """Number of letters and digits in a call's id; 0 = an id in OpenAI's form."""

    def new_id(self) -> str:
        """Make a random id for a new call."""
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


HERMES = ToolStyle("hermes", "<tool_call>", "arguments", end="</tool_call>")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", "parameters", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", "arguments", listed=True, id_length=9)
MISTRAL_ARGS = ToolStyle("mistral_args", "[TOOL_CALLS]", "arguments", listed=True, named=True, id_length=9)


def detect_tool_style(template: str | Mapping[str, str] | None) -> ToolStyle | None:
    """The style of the calls in a chat template; None if it shows no tools, or writes calls in an unknown style.

    If there are several named templates, the one for tools is read.
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:  # the same marker with other contents: Qwen3-Coder, GLM
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|eot_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    style: ToolStyle,
    tokenizer: Any,
    *,
    parallel: bool = True,
) -> GrammarSpec | None:
    """The grammar of answers that call `tools` (in OpenAI's form) in a style; several calls only if `parallel`.

    With `tool_choice` `required` or a named tool, an answer consists only of calls. With `auto` there is no grammar
    (None) unless a tool is `strict`: then an answer is text, and calls whose arguments fit the schema. Raises
    RequestError if the named tool doesn't exist, or if calls of strict tools can't be distinguished from text.
    """
    names = callable_tools(tools, tool_choice)
    forced = _is_forced(tool_choice)
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    if not functions or not (forced or any(function.get("strict") for function in functions)):
        return None
    marker = "" if style.bare else lark_marker(style.marker, tokenizer)
    begin, between, end = _frame(style, marker, tokenizer)
    alternatives, rules = [], []
    for index, function in enumerate(functions):
        rules.append(f"args_{index}: %json {_schema(function.get('parameters'))}")
        alternatives.append(_call(function["name"], f"args_{index}", style, tokenizer))
    rules.append(f"call: {' | '.join(alternatives)}")
    more = f"({between} call)*" if parallel else ""
    calls = f"{marker} {begin} call {more} {end}"
    if not forced:
        if style.bare:
            raise RequestError(f"strict tools need tool_choice required: {style.name} calls begin like any other text")
        # text up to the marker, which is a token of its own or ends a lazy lexeme
        single_token = not marker.startswith('"')
        thinking = _thinking(tokenizer)
        head = f"text {marker}" if single_token else f"{thinking} text_and_marker"
        rules += ["TEXT: /(.|\\n)*/", f"text: {thinking} TEXT"]
        rules += [] if single_token else [f"text_and_marker[lazy]: TEXT {marker}"]
        calls = f"({head} {begin} call {more} {end})? text"
    return GrammarSpec("lark", "\n".join([f"start: {calls}", *rules, ""]))


def callable_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None) -> list[str]:
    """The names of the tools that `tool_choice` allows: none, all or the named one. Raises RequestError if invalid."""
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


def _is_forced(tool_choice: str | Mapping[str, Any] | None) -> bool:
    return tool_choice == "required" or isinstance(tool_choice, Mapping)


def _thinking(tokenizer: Any) -> str:
    """Lark for thinking markers, which are tokens but not text, and the text before each; empty without markers."""
    marks = [lark_marker(name, tokenizer) for name in _THINKING_MARKS if name in tokenizer.get_added_vocab()]
    return f"(TEXT ({' | '.join(marks)}))*" if marks else ""


def _frame(style: ToolStyle, marker: str, tokenizer: Any) -> tuple[str, str, str]:
    """Lark for what comes between the first marker and a call, between two calls, and after the last call."""
    if style.bare:
        return "", lark_literal("; "), ""
    if style.named:
        return "", marker, ""
    if style.listed:
        return f"{lark_literal(' ')}? {lark_literal('[')}", lark_literal(", "), lark_literal("]")
    line = lark_literal("\n")
    end = f"{line} {lark_marker(style.end, tokenizer)}"
    return line, f"{end} {line} {marker} {line}", end


def _call(name: str, arguments: str, style: ToolStyle, tokenizer: Any) -> str:
    if style.named:
        return f"{lark_literal(name)} {lark_marker('[ARGS]', tokenizer)} {arguments}"
    begin = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
    return f"{lark_literal(begin)} {arguments} {lark_literal('}')}"


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = dict(parameters or {"type": "object", "properties": {}, "additionalProperties": False})
    schema.setdefault("type", "object")
    schema = closed_schema(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


@dataclass(frozen=True)
class Calling:
    """How the answers to one chat may call tools."""

    style: ToolStyle
    schemas: list[dict[str, Any]]
    """The tools as chat templates expect them."""
    grammar: GrammarSpec | None
    """The grammar that constrains the calls; None = they are only parsed out of the answer."""
    forced: bool
    """Whether an answer consists only of calls; then even the beginning of a truncated call isn't text."""
    parallel: bool
    """Whether an answer may make several calls."""
    special_tokens: frozenset[int]
    """Special tokens that calls are written with, to be kept in the text for the parser."""


def tool_calling(body: ChatCompletionRequest, tokenizer: Any) -> Calling | None:
    """How a chat's answers may call tools; None if they may not call any.

    Raises ApiError 400 if the chat template shows no tools or writes calls in an unknown style, and RequestError if
    tools and `tool_choice` don't fit together.
    """
    schemas = tool_schemas(body.tools)
    choice = body.tool_choice
    tool_choice = choice.model_dump(mode="json") if isinstance(choice, NamedToolChoice) else choice
    if not callable_tools(schemas, tool_choice):
        return None
    style = detect_tool_style(tokenizer.chat_template)
    if style is None:
        message = "this model's chat template shows no tools, or writes calls in a style that isn't supported"
        raise ApiError(400, message, code="unsupported_parameter", param="tools")
    # naming a function asks for one call of it, as at OpenAI and in vLLM
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    grammar = tool_call_grammar(schemas, tool_choice, style, tokenizer, parallel=parallel)
    return Calling(style, schemas, grammar, _is_forced(tool_choice), parallel, _call_tokens(style, tokenizer))


def one_grammar(tools: Calling | None, requested: GrammarSpec | None) -> GrammarSpec | None:
    """The grammar of the answer: its tool calls' or the requested one. Raises RequestError if both may apply."""
    if tools is None:
        return requested
    if requested is not None:
        raise RequestError('response_format and tools both constrain the answer: send tool_choice "none", or no tools')
    return tools.grammar


def _call_tokens(style: ToolStyle, tokenizer: Any) -> frozenset[int]:
    names: Collection[str] = (style.marker, style.end, "[ARGS]", "[CALL_ID]")
    vocabulary = tokenizer.get_added_vocab()
    return frozenset(vocabulary[name] for name in names if name in vocabulary) & special_token_ids(tokenizer)
