"""ollama: chats, streams, tools, formats, thoughts, raw prompts, and what it asks about models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
import pytest
from common import CITIES, MESSAGES, MODEL, NAMES, QUESTION, SCHEMA, TOOL, URL, chat, fits

GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24}
TOOL_RESULT: list[Any] = [
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}}],
    },
    {"role": "tool", "tool_name": "get_weather", "content": "Sun."},
]


@pytest.fixture(scope="module")
def client() -> ollama.Client:
    return ollama.Client(host=URL, timeout=300)


def test_chat_and_counts(client: ollama.Client) -> None:
    answer = client.chat(MODEL, MESSAGES, options=GREEDY)
    assert answer.message.content == chat(24)
    assert answer.done
    assert answer.eval_count <= 24
    assert answer.prompt_eval_count > 0


def test_stream(client: ollama.Client) -> None:
    parts = list(client.chat(MODEL, MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == chat(24)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_async_stream() -> None:
    async def text() -> str:
        parts = await ollama.AsyncClient(host=URL).chat(MODEL, MESSAGES, options=GREEDY, stream=True)
        return "".join([part.message.content async for part in parts])

    assert asyncio.run(text()) == chat(24)


def get_weather(city: str, days: int) -> str:
    """The weather in a city.

    Args:
      city: where
      days: how many

    Returns:
      str: words
    """
    return f"{city} {days}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", [TOOL, get_weather])
def test_tools_are_shown_and_results_are_read(client: ollama.Client, tool: Any, stream: bool) -> None:
    """Ollama's API can't require a call: whether there is one is the model's choice."""
    for messages in (MESSAGES, [*MESSAGES, *TOOL_RESULT]):
        asked = client.chat(MODEL, messages, tools=[tool], options=GREEDY, stream=stream)
        parts = list(asked) if stream else [asked]
        assert parts[-1].done
        calls = [call.function for part in parts for call in part.message.tool_calls or ()]
        assert all(call.name == "get_weather" and fits(call.arguments) for call in calls)
        assert calls or any(part.message.content for part in parts)


def test_formats(client: ollama.Client) -> None:
    long = {**GREEDY, "num_predict": 400}
    assert fits(json.loads(client.chat(MODEL, MESSAGES, format=SCHEMA, options=long).message.content))
    city = {"type": "object", "properties": {"city": {"enum": list(CITIES)}}, "required": ["city"]}
    parts = client.generate(MODEL, QUESTION, format=city, options=long, stream=True)
    assert json.loads("".join(part.response for part in parts))["city"] in CITIES


def test_generate(client: ollama.Client) -> None:
    assert client.generate(MODEL, QUESTION, options=GREEDY).response == chat(24)
    parts = list(client.generate(MODEL, "def add(a, b):", raw=True, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts).strip()
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"


def test_log_probabilities(client: ollama.Client) -> None:
    answer = client.chat(MODEL, MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2)
    assert "".join(each.token for each in answer.logprobs) == chat(24)
    assert all(len(each.top_logprobs) == 2 for each in answer.logprobs)


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == NAMES
    assert [model.model for model in client.ps().models] == NAMES
    assert {"completion", "tools"} <= set(client.show(MODEL).capabilities)


def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no model") as unknown:
        client.chat("other", MESSAGES)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(MODEL, [{**MESSAGES[0], "images": [b"..."]}])
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError):
        client.pull("other")
    with pytest.raises(ollama.ResponseError):
        client.embed(MODEL, "text")
