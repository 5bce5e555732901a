"""anthropic: messages, streams, tool calls and results, counting, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from common import KEY, MESSAGES, MODEL, SCHEMA, URL, chat, fits

OPTIONS: dict[str, Any] = {"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": 300}
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client() -> Any:
    with anthropic.Anthropic(**OPTIONS) as made:
        yield made


def test_text_and_usage(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(max_tokens=24, **GREEDY)
    assert answer.content[0].text == chat(24)
    assert 0 < answer.usage.output_tokens <= 24
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_a_message_is_sent_back_as_it_came(client: anthropic.Anthropic) -> None:
    first = client.messages.create(max_tokens=8, **GREEDY)
    asked = {"role": "assistant", "content": first.content}, {"role": "user", "content": "Why?"}
    assert client.messages.create(max_tokens=8, **{**GREEDY, "messages": [*MESSAGES, *asked]}).content


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(max_tokens=24, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == chat(24)
    assert final.usage.output_tokens <= 24


def test_tools(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(max_tokens=120, tools=[TOOL], tool_choice=ONE, **GREEDY)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert fits(call.input)
    with client.messages.stream(max_tokens=120, tools=[TOOL], tool_choice=ONE, **GREEDY) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun."}
    after = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(max_tokens=8, tools=[TOOL], **{**GREEDY, "messages": after}).content


def test_counting(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(max_tokens=1, **GREEDY).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.messages.create(max_tokens=1, **{**GREEDY, "model": "claude"})
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a/b"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="eyas serves text"):
        client.messages.create(max_tokens=1, **{**GREEDY, "messages": image})
