"""Tools in a chat: which the template shows, which grammar the answer is held to, how calls are read out of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from eyas.data.detokenizer import specials
from eyas.errors import RequestError
from eyas.serve.errors import ApiError
from eyas.serve.tool_grammar import tool_call_grammar, tools_asked
from eyas.serve.tool_styles import ToolStyle, detect_tool_style
from eyas.serve.wire.chat import ChatRequest
from eyas.serve.wire.messages import NamedTool
from eyas.types import GrammarSpec


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
    return frozenset(vocabulary[name] for name in names if name in vocabulary) & specials(tokenizer)
