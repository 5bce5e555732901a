"""llama-index: OpenAILike as chat model, as completion model, with tools and with structured output."""

from __future__ import annotations

import asyncio
from typing import Any

from common import KEY, MODEL, QUESTION, URL, chat, fits
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from weather import Weather

ASKED = [ChatMessage(role="user", content=QUESTION)]


def model(tokens: int, **options: Any) -> OpenAILike:
    settings: dict[str, Any] = {
        "model": MODEL, "api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_tokens": tokens,
        "context_window": 2048, "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0,
    }  # fmt: skip
    return OpenAILike(**{**settings, **options})


def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"Sun in {city} for {days} days."


def test_chat_and_usage() -> None:
    answer = model(24).chat(ASKED)
    assert answer.message.content == chat(24)
    assert answer.raw.usage.completion_tokens <= 24


def test_stream() -> None:
    assert "".join(piece.delta or "" for piece in model(24).stream_chat(ASKED)) == chat(24)


def test_async() -> None:
    assert asyncio.run(model(24).achat(ASKED)).message.content == chat(24)


def test_completions() -> None:
    completing = model(8, is_chat_model=False)
    text = completing.complete("def add(a, b):").text
    assert text.strip()
    assert "".join(piece.delta or "" for piece in completing.stream_complete("def add(a, b):")) == text


def test_tools() -> None:
    tool = FunctionTool.from_defaults(get_weather, fn_schema=Weather)
    answering = model(120)
    answer = answering.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = answering.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"
    assert fits(call.tool_kwargs)


def test_structured_output() -> None:
    assert isinstance(model(400).as_structured_llm(Weather).chat(ASKED).raw, Weather)


def test_logprobs() -> None:
    answer = model(8, additional_kwargs={"logprobs": True, "top_logprobs": 2}).chat(ASKED)
    assert "".join(token.token for token in answer.raw.choices[0].logprobs.content) == chat(8)
