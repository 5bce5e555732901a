"""langchain-openai: ChatOpenAI over chat completions and over responses, and OpenAI over completions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from common import KEY, MODEL, QUESTION, TOOL, URL, chat, fits
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from weather import Weather

OPTIONS: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}


def model(tokens: int, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(max_tokens=tokens, **options, **OPTIONS)


def test_text_and_usage() -> None:
    answer = model(24).invoke(QUESTION)
    assert answer.content == chat(24)
    assert answer.usage_metadata["output_tokens"] <= 24


def test_stream() -> None:
    total = AIMessageChunk("")
    for chunk in model(24, stream_usage=True).stream(QUESTION):
        total += chunk
    assert total.content == chat(24)
    assert total.usage_metadata["output_tokens"] <= 24


def test_async_batch() -> None:
    answers = asyncio.run(model(24).abatch([QUESTION] * 3))
    assert [answer.content for answer in answers] == [chat(24)] * 3


def test_tools() -> None:
    bound = model(120).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert fits(call["args"])
    after = [HumanMessage(QUESTION), answer, ToolMessage("Sun.", tool_call_id=call["id"])]
    assert model(8).bind_tools([TOOL]).invoke(after).type == "ai"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: Any) -> None:
    assert isinstance(model(400).with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_logprobs() -> None:
    answer = model(8, logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == chat(8)


def test_completions() -> None:
    completing = OpenAI(max_tokens=8, **OPTIONS)
    text = completing.invoke("def add(a, b):")
    assert text.strip()
    assert "".join(completing.stream("def add(a, b):")) == text


def test_responses() -> None:
    answering = model(24, use_responses_api=True)
    answer = answering.invoke(QUESTION)
    assert answer.text == chat(24)
    assert "".join(chunk.text for chunk in answering.stream(QUESTION)) == chat(24)
    (call,) = (
        model(120, use_responses_api=True)
        .bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
        .invoke(QUESTION)
        .tool_calls
    )
    assert fits(call["args"])
