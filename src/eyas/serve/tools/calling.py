"""Tool calls: the grammar that constrains them to the tools' schemas, in the chat template's style (`styles.py`)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from eyas.errors import RequestError
from eyas.serve.errors import ApiError
from eyas.serve.schema.chat import ChatCompletionRequest
from eyas.serve.schema.messages import NamedToolChoice, tool_schemas
from eyas.serve.tools.parser import is_text
from eyas.serve.tools.structured import closed_schema
from eyas.serve.tools.styles import CDATA, ID, KEY, NAME, NUMBER, TYPE, ToolStyle, detect_tool_style, shows_tools
from eyas.text.detokenizer import special_token_ids
from eyas.text.reasoning import ReasoningMarks, all_marks
from eyas.types import GrammarSpec
from eyas.verify import WHITESPACE, lark_literal, lark_marker

log = logging.getLogger(__name__)


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
    grammar = _CallGrammar(style, tokenizer)
    begin, begin_rest = ("", "") if style.begun and forced else _split(style.begin)
    if not forced and (style.bare or style.begun or NAME in begin):
        raise RequestError(f"strict tools need tool_choice required: {style.name} calls begin like any other text")
    first, more = [], []
    for function in functions:
        name = function["name"]
        call = grammar.call(name, function.get("parameters"))
        first.append(f"{grammar.text((begin if forced else '') + begin_rest, name)} {call}")
        more.append(f"{grammar.text(style.between, name)} {call}")
    rules = [*grammar.rules, f"first: {' | '.join(first)}", f"more: {' | '.join(more)}"]
    calls = f"first {'more*' if parallel else ''} {grammar.text(style.end)}"
    if not forced:
        # text up to the marker, which is a token of its own or ends a lazy lexeme
        marker = lark_marker(begin, tokenizer)
        thinking = _thinking(tokenizer)
        single_token = not marker.startswith('"')
        head = f"text {marker}" if single_token else f"{thinking} text_and_marker"
        rules += [f"text: {thinking} TEXT"]
        rules += [] if single_token else [f"text_and_marker[lazy]: TEXT {marker}"]
        calls = f"({head} {calls})? text"
    return GrammarSpec("lark", "\n".join([f"start: {calls}", "TEXT: /(.|\\n)*/", *rules, ""]))


def _split(begin: str) -> tuple[str, str]:
    """The first mark of a style's beginning, and the rest."""
    found = re.match(r"\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\])", begin)
    return (begin[: found.end()], begin[found.end() :]) if found else (begin, "")


class _MarkedText:
    """Makes rules for texts between marks, which may be special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.rules: list[str] = []
        self._tokenizer = tokenizer
        added = [text for text in tokenizer.get_added_vocab() if not lark_marker(text, tokenizer).startswith('"')]
        self._special = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")

    def text(self, text: str) -> str:
        """Lark for a text: its special tokens, and the texts between them."""
        found = []
        at = 0
        for match in self._special.finditer(text):
            found += [*self._plain(text[at : match.start()]), lark_marker(match[0], self._tokenizer)]
            at = match.end()
        return " ".join([*found, *self._plain(text[at:])])

    @staticmethod
    def _plain(text: str) -> Iterator[str]:
        for part in re.split(f"([{ID}{NUMBER}])", text):
            if part == ID:
                yield "/[a-zA-Z0-9]{9}/"
            elif part == NUMBER:
                yield "/[0-9]{1,3}/"
            elif part:
                yield lark_literal(part)

    def until(self, end: str) -> str:
        """Lark for any text up to the first `end`, which is Lark itself, and that end."""
        if end.startswith("<["):
            return f"TEXT {end}"
        literal, _, rest = end.partition(" <[")
        return f"{self.rule(f'TEXT {literal}', '[lazy]')} {'<[' + rest if rest else ''}"

    def rule(self, body: str, flags: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{flags}: {body}")
        return name


class _CallGrammar(_MarkedText):
    """Makes the rules of calls in a style."""

    def __init__(self, style: ToolStyle, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._style = style

    def text(self, text: str, name: str = "", key: str = "") -> str:
        """Lark for a text of the style, with this name of a tool and this key of an argument."""
        return super().text(text.replace(NAME, name).replace(KEY, key))

    def call(self, name: str, parameters: Mapping[str, Any] | None) -> str:
        """Lark for a call of one tool."""
        style = self._style
        schema = _closed(parameters)
        before = self.text(style.before_name + NAME, name)
        between = self.text(style.before_arguments, name)
        if style.form in ("object", "named"):
            arguments = self.rule(f"%json {_dump(schema)}")
        elif style.form == "elements":
            arguments = self._elements(schema)
        else:
            arguments = self._listed(schema)
        return f"{before} {between} {arguments} {self.text(style.after_arguments, name)}"

    def _elements(self, schema: Mapping[str, Any]) -> str:
        """Arguments as elements, in the schema's order."""
        element = self._style.element
        assert element is not None
        found = []
        for key, part, needed in _properties(schema):
            kind = element.text_type if is_text(part) else _type_name(part, element.other_type)
            middle = self.text(element.middle.replace(TYPE, kind))
            begin = f"{self.text(element.begin)} {lark_literal(key)} {middle}"
            end = self.text(element.end, key=key)
            found.append(f"({begin} {self._element(part, end, element.cdata)}){'' if needed else '?'}")
        if not found and schema.get("additionalProperties") is not False:
            middle = self.text(element.middle.replace(TYPE, element.text_type))
            end = self.text(element.end.replace(KEY, ""))
            found.append(f"({self.text(element.begin)} /[A-Za-z0-9_.-]+/ {middle} {self.until(end)})*")
        return " ".join(found)

    def _element(self, schema: Mapping[str, Any], end: str, cdata: bool) -> str:
        """The value of an element and its end: a text isn't quoted there."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if is_text(schema) and isinstance(values, list):
            return f"({' | '.join(lark_literal(value) for value in values)}) {end}"
        if is_text(schema) or _may_be_text(schema):
            if not cdata:
                return self.until(end)
            opened, closed = map(self.text, CDATA)
            return f"(/[^<]*/ | {opened} {self.until(closed)}) {end}"
        return f"{self.rule(f'%json {_dump(schema)}')} {end}"

    def _listed(self, schema: Mapping[str, Any]) -> str:
        """Arguments `key=value` or `key:value` between commas, in the schema's order."""
        python = self._style.form == "python"
        comma, sign = (lark_literal(", "), "=") if python else (lark_literal(","), ":")
        later = first = '""'
        for key, part, needed in reversed(list(_properties(schema))):
            value = self.rule(f"%json {_dump(part)}") if python else self._unquoted(part)
            pair = f"{lark_literal(key + sign)} {value}"
            missing = "" if needed else f" | {first}"
            first = self.rule(f"{pair} {later}{missing}")
            later = self.rule(f"{comma} {pair} {later}" + ("" if needed else f" | {later}"))
        return first

    def _unquoted(self, schema: Mapping[str, Any]) -> str:
        """A value of the form `braces`; objects and lists are constrained to the form only."""
        quote = self.text(self._style.quote)
        text = f"{quote} {self.until(quote)}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and is_text(schema):
            return f"({' | '.join(f'{quote} {lark_literal(value)} {quote}' for value in values)})"
        if is_text(schema):
            return f"({text})"
        if schema.get("type") in ("integer", "number", "boolean", "null"):
            return self.rule(f"%json {_dump(schema)}")
        if not any(rule.startswith("value: ") for rule in self.rules):
            plain = f'/-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null" | "None" | {text}'
            self.rules += [
                f'value: {plain} | "[" (value ("," value)*)? "]" | braced',
                'braced: "{" (pair ("," pair)*)? "}"',
                'pair: /[A-Za-z0-9_.-]+/ ":" value',
            ]
        return {"array": '"[" (value ("," value)*)? "]"', "object": "braced"}.get(str(schema.get("type")), "value")


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The listed properties of a schema: key, its schema with the definitions, and whether it is required."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    for key, part in properties.items() if isinstance(properties, dict) else ():
        yield key, {**(part if isinstance(part, dict) else {}), **shared}, key in required


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be a text among other things, or the schema doesn't say."""
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list):
        return any(isinstance(each, dict) and (is_text(each) or _may_be_text(each)) for each in choices)
    kinds = schema.get("type")
    return (
        "string" in kinds if isinstance(kinds, list) else kinds is None and not {"$ref", "enum", "const"} & set(schema)
    )


def _type_name(schema: Mapping[str, Any], number: str) -> str:
    """What a template writes as the type of an argument that isn't a text; `number`: what it writes of a number."""
    kind = schema.get("type")
    return str(kind) if number == "number" and kind in ("object", "array", "boolean", "null") else number


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
    marks = [lark_marker(name, tokenizer) for name in sorted(all_marks() & tokenizer.get_added_vocab().keys())]
    return f"(TEXT ({' | '.join(marks)}))*" if marks else ""


def _closed(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    schema = dict(parameters or {"type": "object", "properties": {}, "additionalProperties": False})
    schema.setdefault("type", "object")
    closed: dict[str, Any] = closed_schema(schema)
    return closed


def _dump(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


@dataclass(frozen=True)
class Calling:
    """How the answers to one chat may call tools."""

    style: ToolStyle | None
    """None if it is unknown: then calls are left in the text."""
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
    opening: tuple[str, ...] = ()
    """The mark before calls, if it is a token of its own: models also call tools before they have ended a thought."""


def tool_calling(body: ChatCompletionRequest, tokenizer: Any) -> Calling | None:
    """How a chat's answers may call tools; None if they may not call any.

    Calls in an unknown style are left in the text, and nothing is enforced. Raises ApiError 400 if the chat template
    shows no tools, and RequestError if tools and `tool_choice` don't fit together.
    """
    schemas = tool_schemas(body.tools)
    choice = body.tool_choice
    tool_choice = choice.model_dump(mode="json") if isinstance(choice, NamedToolChoice) else choice
    if not callable_tools(schemas, tool_choice):
        return None
    if not shows_tools(tokenizer.chat_template):
        message = "this model's chat template shows no tools: send none, or serve a model that was trained with tools"
        raise ApiError(400, message, code="unsupported_parameter", param="tools")
    style = _style_of(tokenizer, str(tokenizer.chat_template))
    # naming a function asks for one call of it, as in OpenAI's API and vLLM
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    if style is None:
        return Calling(None, schemas, None, False, parallel, frozenset())
    grammar = tool_call_grammar(schemas, tool_choice, style, tokenizer, parallel=parallel)
    opening = _split(style.begin)[0].strip()
    openings = (opening,) if opening in tokenizer.get_added_vocab() else ()
    tokens = _call_tokens(style, tokenizer)
    return Calling(style, schemas, grammar, _is_forced(tool_choice), parallel, tokens, openings)


@lru_cache(maxsize=4)
def _style_of(tokenizer: Any, source: str) -> ToolStyle | None:  # noqa: ARG001  # a template can be replaced
    """The style of a tokenizer's chat template; a warning if it is unknown, once for each template."""
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    style = detect_tool_style(tokenizer.chat_template, special, tokenizer.get_added_vocab())
    if style is None:
        log.warning("the chat template writes tool calls in an unknown style: they are text, and none is enforced")
    return style


def after_thought(
    grammar: GrammarSpec | None, tools: Calling | None, marks: ReasoningMarks | None, *, inside: bool, tokenizer: Any
) -> GrammarSpec | None:
    """The grammar of an answer that may begin with a thought, or that begins `inside` one: it applies after that.

    A grammar for text with calls in it allows thoughts anyway.
    """
    if grammar is None or marks is None or (tools is not None and not tools.forced):
        return grammar
    lark = _MarkedText(tokenizer)
    opens, closes, heads = (
        [lark.text(mark) for mark in each] for each in (marks.opens, marks.closes, marks.answer_opens)
    )
    thought = f"({' | '.join(lark.until(close) for close in closes)}) BREAKS"
    if not inside:
        thought = f"(({' | '.join(opens)}) {thought})?"
    head = f"(({' | '.join(heads)}) BREAKS)?" if heads else ""
    lines = [f"start: {thought} {head} @answer", "TEXT: /(.|\\n)*/", "BREAKS: /(\\r?\\n){0,3}/", *lark.rules, ""]
    return replace(grammar, preface="\n".join(lines))


def one_grammar(tools: Calling | None, requested: GrammarSpec | None) -> GrammarSpec | None:
    """The grammar of the answer: its tool calls' or the requested one. Raises RequestError if both may apply."""
    if tools is None:
        return requested
    if requested is not None:
        raise RequestError('response_format and tools both constrain the answer: send tool_choice "none", or no tools')
    return tools.grammar


def _call_tokens(style: ToolStyle, tokenizer: Any) -> frozenset[int]:
    special = special_token_ids(tokenizer)
    texts = style.texts
    added = tokenizer.get_added_vocab().items()
    return frozenset(number for name, number in added if number in special and any(name in text for text in texts))
