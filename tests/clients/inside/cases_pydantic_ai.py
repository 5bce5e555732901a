"""pydantic-ai: agents that answer in text, through a tool, or under a native schema; chats and responses."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import pytest
from common import KEY, MODEL, QUESTION, URL, chat
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import Weather

MODELS = [OpenAIChatModel, OpenAIResponsesModel]


def agent(kind: Any, tokens: int, **options: Any) -> Agent[None, Any]:
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
    return Agent(model, model_settings={"temperature": 0.0, "max_tokens": tokens, "timeout": 300}, **options)


@pytest.mark.parametrize("kind", MODELS)
def test_text_and_usage(kind: Any) -> None:
    answer = agent(kind, 24).run_sync(QUESTION)
    assert answer.output == chat(24)
    assert answer.usage().output_tokens <= 24


@pytest.mark.parametrize("kind", MODELS)
def test_stream(kind: Any) -> None:
    async def work() -> str:
        async with agent(kind, 24).run_stream(QUESTION) as stream:
            return "".join([piece async for piece in stream.stream_text(delta=True)])

    assert asyncio.run(work()) == chat(24)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("output", [NativeOutput, ToolOutput])
def test_structured_output(kind: Any, output: Any) -> None:
    settings: Any = {"parallel_tool_calls": False} if output is ToolOutput else {}
    answer = agent(kind, 400, output_type=output(Weather)).run_sync(QUESTION, model_settings=settings)
    assert isinstance(answer.output, Weather)


@pytest.mark.parametrize("kind", MODELS)
def test_a_function_is_called_with_what_the_model_says(kind: Any) -> None:
    def get_weather(city: Literal["Bern", "Basel"], days: Literal[1, 2, 3]) -> str:
        """The weather in a city."""
        return f"Sun in {city} for {days}."

    answer = agent(kind, 400, output_type=get_weather).run_sync(QUESTION, model_settings={"parallel_tool_calls": False})
    assert re.fullmatch(r"Sun in (Bern|Basel) for [123]\.", answer.output)
