"""How models write tool calls, told from their chat template.

| style | an answer with calls |
|---|---|
| `hermes` | text, then `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once a call (Hermes, Qwen) |
| `llama3` | nothing but `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>` |
| `mistral` | text, then `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` |
| `mistral_args` | text, then `[TOOL_CALLS]name[ARGS]{...}`, once a call (from Mistral's tokenizer 11 on) |
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import RequestError
from eyas.serve.api.schema.chat import ChatRequest
from eyas.serve.api.schema.messages import NamedTool
from eyas.serve.http.errors import ApiError
from eyas.text.detokenizer import special_token_ids
from eyas.types import GrammarSpec
from eyas.verify import WHITESPACE, lark_literal, lark_marker


@dataclass(frozen=True)
class ToolStyle:
    """One way of writing calls."""

    name: str
    marker: str
    """What announces a call. It may be a special token: decode answers with special tokens for the parser."""
    arguments: str
    """The key of the arguments, where a call is an object."""
    end: str = ""
    """What ends a call."""
    bare: bool = False
    """An answer that begins with an object is a call without a marker too; `;` may stand between calls."""
    listed: bool = False
    """All calls may stand in one list behind one marker."""
    named: bool = False
    """The name may stand before the object, which is the arguments then."""
    id_length: int = 0
    """Letters and digits of a call's id; 0 = OpenAI's form."""

    def new_id(self) -> str:
        """A call's id, random."""
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


HERMES = ToolStyle("hermes", "<tool_call>", "arguments", end="</tool_call>")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", "parameters", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", "arguments", listed=True, id_length=9)
MISTRAL_ARGS = ToolStyle("mistral_args", "[TOOL_CALLS]", "arguments", listed=True, named=True, id_length=9)


def detect_tool_style(template: str | Mapping[str, str] | None) -> ToolStyle | None:
    """How the model of a chat template calls tools; None if the template knows no tools, or in a way not known here.

    Of several templates the one for tools counts.
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:  # the same mark with other contents: Qwen3-Coder, GLM
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "<|eot_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


# Grammars that make a model call tools, in its own style, with arguments that fit their schemas.


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
    announced = "" if style.bare else lark_marker(style.marker, tokenizer)
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
        # text up to the lark_marker, which is a token of its own or ends a lazy lexeme
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
    marks = [lark_marker(name, tokenizer) for name in _THOUGHTS if name in tokenizer.get_added_vocab()]
    return f"(TEXT ({' | '.join(marks)}))*" if marks else ""


def _frame(style: ToolStyle, announced: str, tokenizer: Any) -> tuple[str, str, str]:
    """What stands behind the first lark_marker, between calls and at the end."""
    if style.bare:
        return "", lark_literal("; "), ""
    if style.named:
        return "", announced, ""
    if style.listed:
        return f"{lark_literal(' ')}? {lark_literal('[')}", lark_literal(", "), lark_literal("]")
    line = lark_literal("\n")
    end = f"{line} {lark_marker(style.end, tokenizer)}"
    return line, f"{end} {line} {announced} {line}", end


def _call(name: str, arguments: str, style: ToolStyle, tokenizer: Any) -> str:
    if style.named:
        return f"{lark_literal(name)} {lark_marker('[ARGS]', tokenizer)} {arguments}"
    begin = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
    return f"{lark_literal(begin)} {arguments} {lark_literal('}')}"


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = dict(parameters or {"type": "object", "properties": {}, "additionalProperties": False})
    schema.setdefault("type", "object")
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


# Tools in a chat: which the template shows, which grammar the answer is held to, how calls are read out of it.


@dataclass(frozen=True)
class Calling:
    """How one chat's answers may call tools."""

    style: ToolStyle
    schemas: list[dict[str, Any]]
    """The tools, as templates take them."""
    grammar: GrammarSpec | None
    parallel: bool
    kept: frozenset[int]
    """Special tokens that calls are written with."""


def calling(asked: ChatRequest, tokenizer: Any) -> Calling | None:
    """None where nothing may be called. ApiError or RequestError where tools are asked for that can't be."""
    schemas = [tool.model_dump(mode="json", exclude_none=True) for tool in asked.tools or ()]
    asked_choice = asked.tool_choice
    choice = asked_choice.model_dump(mode="json") if isinstance(asked_choice, NamedTool) else asked_choice
    if not tools_asked(schemas, choice):
        return None
    style = detect_tool_style(tokenizer.chat_template)
    if style is None:
        message = "this model's chat template shows no tools, or writes calls in a way that can't be read here"
        raise ApiError(400, message, code="unsupported_parameter", param="tools")
    parallel = asked.parallel_tool_calls is not False
    grammar = tool_call_grammar(schemas, choice, style, tokenizer, parallel=parallel)
    return Calling(style, schemas, grammar, parallel, _marks(style, tokenizer))


def one_grammar(tools: Calling | None, text: GrammarSpec | None) -> GrammarSpec | None:
    """The grammar of an answer that may call tools, or must look like something, but not both."""
    if tools is None:
        return text
    if text is not None:
        raise RequestError(
            'response_format and tools both say what the answer is: send tool_choice "none", or no tools'
        )
    return tools.grammar


def _marks(style: ToolStyle, tokenizer: Any) -> frozenset[int]:
    names: Collection[str] = (style.marker, style.end, "[ARGS]", "[CALL_ID]")
    vocabulary = tokenizer.get_added_vocab()
    return frozenset(vocabulary[name] for name in names if name in vocabulary) & special_token_ids(tokenizer)
