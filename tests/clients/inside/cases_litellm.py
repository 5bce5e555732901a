"""litellm: as an OpenAI, a vLLM and an Ollama server; chats, streams, tools, schemas, log-probabilities, responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from common import KEY, MESSAGES, MODEL, QUESTION, TOOL, URL, chat, fits
from weather import Weather

OPTIONS: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
PROVIDERS = ["openai", "hosted_vllm"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_text_and_usage(provider: str) -> None:
    answer = litellm.completion(f"{provider}/{MODEL}", MESSAGES, max_tokens=24, **OPTIONS)
    assert answer.choices[0].message.content == chat(24)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stream(provider: str) -> None:
    options = {"max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(f"{provider}/{MODEL}", MESSAGES, **options, **OPTIONS))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == chat(24)
    assert chunks[-1].usage.completion_tokens <= 24


def test_async() -> None:
    answer = asyncio.run(litellm.acompletion(f"openai/{MODEL}", MESSAGES, max_tokens=24, **OPTIONS))
    assert answer.choices[0].message.content == chat(24)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools(provider: str) -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    answer = litellm.completion(f"{provider}/{MODEL}", MESSAGES, **asked, **OPTIONS)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert fits(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sun."}
    after = [*MESSAGES, answer.choices[0].message, result]
    assert litellm.completion(f"{provider}/{MODEL}", after, tools=[TOOL], max_tokens=8, **OPTIONS).choices


@pytest.mark.parametrize("provider", PROVIDERS)
def test_schema(provider: str) -> None:
    answer = litellm.completion(f"{provider}/{MODEL}", MESSAGES, response_format=Weather, max_tokens=400, **OPTIONS)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_logprobs() -> None:
    answer = litellm.completion(f"openai/{MODEL}", MESSAGES, max_tokens=8, logprobs=True, top_logprobs=2, **OPTIONS)
    tokens = answer.choices[0].logprobs["content"]
    assert "".join(token["token"] for token in tokens) == chat(8)
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_text_completion() -> None:
    options = {**OPTIONS, "max_tokens": 8}
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def add(a, b):", **options)
    assert answer.choices[0].text.strip()


def test_responses() -> None:
    answer = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=24, **OPTIONS)
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert "".join(texts) == chat(24)
    stream = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=24, stream=True, **OPTIONS)
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == chat(24)


OLLAMA: dict[str, Any] = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "temperature": 0}


def test_ollama() -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=24, **OLLAMA)
    assert answer.choices[0].message.content == chat(24)
    assert answer.usage.completion_tokens <= 24
    chunks = list(litellm.completion(messages=MESSAGES, max_tokens=24, stream=True, **OLLAMA))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat(24)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_tools(stream: bool) -> None:
    """Ollama's API can't require a call: whether there is one is the model's choice."""
    called = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    result = {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "Sun."}
    for messages in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [called]}, result]):
        answer = litellm.completion(messages=messages, tools=[TOOL], max_tokens=24, stream=stream, **OLLAMA)
        choices = [part.choices[0] for part in (answer if stream else [answer])]
        said = [choice.delta if stream else choice.message for choice in choices]
        assert any(each.content or each.tool_calls for each in said)


def test_ollama_schema() -> None:
    answer = litellm.completion(messages=MESSAGES, response_format=Weather, max_tokens=400, **OLLAMA)
    Weather.model_validate_json(answer.choices[0].message.content)
