"""openai: chats, streams, tools, parsed answers, log-probabilities, completions and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from common import KEY, MESSAGES, MODEL, NAMES, QUESTION, TOOL, URL, chat, fits
from openai import AsyncOpenAI, OpenAI
from weather import Weather

OPTIONS: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 300}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client() -> Any:
    with OpenAI(**OPTIONS) as made:
        yield made


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == NAMES
    assert client.models.retrieve(MODEL).owned_by == "eyas"


def test_text_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=24, seed=1, **GREEDY)
    assert answer.choices[0].message.content == chat(24)
    assert answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_message_is_sent_back_as_it_came(client: OpenAI) -> None:
    first = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **GREEDY).choices[0].message
    more = [*MESSAGES, first, {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(messages=more, max_tokens=8, **GREEDY).choices[0].message.content


def test_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat(24)
    assert chunks[-1].usage.completion_tokens <= 24


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(messages=MESSAGES, max_tokens=24, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == chat(24) == stream.current_completion_snapshot.choices[0].message.content


def test_async_streams_side_by_side() -> None:
    async def one(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(messages=MESSAGES, max_tokens=24, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(**OPTIONS) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    assert asyncio.run(all_of_them()) == [chat(24)] * 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client: OpenAI, choice: Any) -> None:
    asked = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(max_tokens=120, **asked, **GREEDY)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert fits(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sun."}
    after = [*MESSAGES, answer.choices[0].message, result]
    assert client.chat.completions.create(messages=after, tools=[TOOL], max_tokens=8, **GREEDY).choices
    streamed = client.chat.completions.create(max_tokens=120, stream=True, **asked, **GREEDY)
    deltas = [piece for chunk in streamed for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in deltas) == call.function.arguments


def test_parsed_answers(client: OpenAI) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Weather, max_tokens=400, **GREEDY)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == chat(8)
    assert all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in tokens)


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(prompt="def add(a, b):", max_tokens=8, logprobs=2, **GREEDY)
    assert answer.choices[0].text == "".join(answer.choices[0].logprobs.tokens)
    stream = client.completions.create(prompt="def add(a, b):", max_tokens=8, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(input=QUESTION, max_output_tokens=24, **GREEDY)
    assert answer.output_text == chat(24)
    assert answer.usage.output_tokens <= 24
    events = list(client.responses.create(input=MESSAGES, max_output_tokens=24, stream=True, **GREEDY))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat(24)
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_responses_with_tools_and_schemas(client: OpenAI) -> None:
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    answer = client.responses.create(
        input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=120, **GREEDY
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert fits(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    after: Any = [*MESSAGES, *answer.output, result]
    assert client.responses.create(input=after, tools=[tool], max_output_tokens=16, **GREEDY).output
    parsed = client.responses.parse(input=QUESTION, text_format=Weather, max_output_tokens=400, **GREEDY)
    assert isinstance(parsed.output_parsed, Weather)
