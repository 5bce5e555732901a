"""`/v1/messages`: Anthropic's shapes and events, the chat that is read, tools, stops, refusals, keys, counts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from eyas.serve.schema.anthropic import AnthropicErrorBody, MessageEvent, MessageResponse

from ...data.templates import templated
from ..conftest import Ask, client_of, post, run
from ..fakes import FakeEngine
from ..live import Live
from .test_tool_calls import CALL, qwen

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
HELLO = [{"role": "user", "content": "How many?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Sun or rain", "input_schema": PARAMETERS}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Sun or rain", "parameters": PARAMETERS},
}


def message(engine: FakeEngine, path: str = MESSAGES, **body: Any) -> httpx.Response:
    engine.ending = "stop"
    sent = {"model": "tiny", "messages": HELLO, **({"max_tokens": 250} if path == MESSAGES else {}), **body}
    found: httpx.Response = run(post(engine, path, sent))
    return found


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error's type and message; the body must be exactly Anthropic's."""
    assert response.status_code == status, response.text
    AnthropicErrorBody.model_validate(response.json())
    found: dict[str, Any] = response.json()["error"]
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's events; each is named by its type, and nothing follows the last."""
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in found]
    for event in found:
        MessageEvent.model_validate(event)
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream, as Anthropic documents it."""
    made: dict[str, Any] = {}
    for event in found:
        if event["type"] == "message_start":
            made = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(made["content"])
            made["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], made["content"][event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["json"] += delta["partial_json"]
        elif event["type"] == "content_block_stop":
            written = made["content"][event["index"]].pop("json")
            if written:
                made["content"][event["index"]]["input"] = json.loads(written)
        elif event["type"] == "message_delta":
            made |= event["delta"]
            made["usage"] = event["usage"]
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_seeded_answer_is_the_chat_s(server: Live, stream: bool) -> None:
    shared: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 11}
    chat = httpx.post(server.url + CHAT, json={**shared, "messages": HELLO}, timeout=60).json()
    for more in ({}, {"eyas": {"speculate": False}}):
        sent = {**shared, **more, "messages": HELLO, "stream": stream}
        answer = httpx.post(server.url + MESSAGES, json=sent, timeout=60)
        made = together(events(answer)) if stream else answer.json()
        assert made["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert made["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 20
        read = made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"]
        assert read == chat["usage"]["prompt_tokens"]
        assert made["stop_reason"] == "max_tokens"


def test_an_answer_is_as_documented(ask: Ask, engine: FakeEngine) -> None:
    engine.ending = "stop"
    answer = MessageResponse.model_validate(ask(MESSAGES, messages=HELLO, max_tokens=60, seed=7).json())
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.eyas.seed) == ("end_turn", 7)


def test_a_stream_has_anthropic_s_events_in_their_order_and_the_same_message() -> None:
    text = "Let me see.\n" + CALL + "\n" + CALL
    found = events(message(qwen(text, stride=1), tools=[TOOL], stream=True))
    kinds = [event["type"] for event in found]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert found[0]["message"]["usage"] == {"input_tokens": found[-2]["usage"]["input_tokens"], "output_tokens": 0}
    whole = message(qwen(text), tools=[TOOL]).json()
    streamed = together(found)
    MessageResponse.model_validate(whole)
    assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use"
    for made in (whole, streamed):
        assert [block["type"] for block in made["content"]] == ["text", "tool_use", "tool_use"]
        assert made["content"][0]["text"] == "Let me see."
        assert made["content"][1]["input"] == {"city": "Bern"}
        assert made["content"][1]["name"] == "weather"
    assert len({block["id"] for block in whole["content"][1:]}) == 2


def test_blocks_are_read_as_the_chat_that_they_are() -> None:
    engine = qwen("Sun.")
    blocks = [
        {"type": "thinking", "thinking": "A secret.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    sent = [
        {"role": "user", "content": "Sun?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{**result, "is_error": False}, {"type": "text", "text": "So?"}]},
    ]
    answer = message(engine, messages=sent, system=[cached], tools=[{**TOOL, "type": "custom"}])
    assert answer.status_code == 200, answer.text
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sun?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "So?"},
    ]
    message(engine, CHAT, messages=chat, tools=[CHAT_TOOL])
    assert engine.requests[0].prompt == engine.requests[1].prompt
    assert "A secret." not in templated("qwen2").decode(engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
    ids=str,
)
def test_tool_choices_are_the_chat_s(choice: dict[str, Any], chat: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    engine = qwen(CALL)
    assert message(engine, tools=[TOOL], tool_choice=choice).status_code == 200
    assert message(engine, CHAT, tools=[CHAT_TOOL], **chat).status_code == 200
    first, second = engine.requests
    assert (first.prompt, first.grammar) == (second.prompt, second.grammar)


def test_sampling_and_stops_are_the_chat_s(engine: FakeEngine) -> None:
    answer = message(engine, temperature=0.5, top_p=0.5, top_k=3, stop_sequences=["in", " clips"], max_tokens=9)
    assert answer.json()["stop_reason"] == "stop_sequence"
    assert answer.json()["stop_sequence"] == " clips"
    assert answer.json()["content"][0]["text"].endswith("48/2")
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.5, 3, 9)


def test_a_schema_and_effort_are_the_chat_s() -> None:
    pytest.importorskip("llguidance")
    engine = FakeEngine('{"city": "Bern"}')
    config = {"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}}
    assert message(engine, output_config=config, thinking={"type": "enabled", "budget_tokens": 9}).status_code == 200
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
    assert message(engine, CHAT, response_format=wanted).status_code == 200
    assert engine.requests[0].grammar == engine.requests[1].grammar is not None


def test_an_assistant_s_message_at_the_end_is_gone_on_with() -> None:
    engine = qwen("Sun.")
    assert message(engine, messages=[*HELLO, {"role": "assistant", "content": "There are"}]).status_code == 200
    assert templated("qwen2").decode(engine.requests[0].prompt).endswith("There are")


def test_more_tokens_than_the_context_leaves_are_as_many_as_it_leaves(engine: FakeEngine) -> None:
    engine.text = engine.text * 100
    run(post(engine, MESSAGES, {"model": "tiny", "messages": HELLO, "max_tokens": 32000}))
    answer = run(post(engine, MESSAGES, {"model": "tiny", "messages": HELLO, "max_tokens": 32000})).json()
    assert answer["usage"]["output_tokens"] == 256 - answer["usage"]["input_tokens"]
    assert answer["stop_reason"] == "model_context_window_exceeded"
    long = [{"role": "user", "content": "a " * 1000}]
    found = refusal(run(post(engine, MESSAGES, {"model": "tiny", "messages": long, "max_tokens": 1})), 400)
    assert found["message"].startswith("prompt is too long: ")


def test_a_call_that_is_cut_off_has_what_was_written() -> None:
    engine = qwen(CALL[: CALL.index("ern")])
    engine.text = engine.text[:-1]  # without an end token
    engine.ending = "length"
    sent = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "max_tokens": len(engine.text)}
    answer = run(post(engine, MESSAGES, sent)).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"city": "B"}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"nonsense": 1}, "unknown field nonsense"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "eyas serves text"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "belongs to the assis"),
        ({"system": [{"type": "image"}]}, "eyas serves text"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "run at Anthropic"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "must have a name"),
        ({"mcp_servers": [{"url": "x"}]}, "offer them as tools"),
        ({"container": "x"}, "no containers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "isn't shortened"),
        ({"eyas": {"trace": True}}, "trace"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_a_reason(ask: Ask, wrong: dict[str, Any], why: str) -> None:
    found = refusal(ask(MESSAGES, **{"messages": HELLO, "max_tokens": 9, **wrong}), 400)
    assert found["type"] == "invalid_request_error"
    assert why in found["message"]


def test_errors_of_all_layers_have_anthropic_s_form() -> None:
    async def ask_all() -> None:
        async with client_of(FakeEngine(most=0), max_body_bytes=400, api_keys=("secret",)) as client:
            body = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
            assert refusal(await client.post(MESSAGES, json=body), 401)["type"] == "authentication_error"
            client.headers["x-api-key"] = "wrong"
            refusal(await client.post(MESSAGES, json=body), 401)
            client.headers["x-api-key"] = "secret"
            refusal(await client.get(MESSAGES), 405)
            refusal(await client.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"}), 415)
            large = await client.post(MESSAGES, json={**body, "system": "a" * 500})
            assert refusal(large, 413)["type"] == "request_too_large"
            missing = await client.post(MESSAGES, json={**body, "model": "claude"})
            assert refusal(missing, 404)["type"] == "not_found_error"
            full = await client.post(MESSAGES, json=body)
            assert refusal(full, 429)["type"] == "rate_limit_error"
            assert full.json()["request_id"] == full.headers["x-request-id"]
            assert "no batches" in refusal(await client.post(f"{MESSAGES}/batches", json={}), 404)["message"]

    run(ask_all())


def test_a_key_is_taken_as_anthropic_s_clients_send_it() -> None:
    async def ask_both() -> None:
        async with client_of(FakeEngine(), api_keys=("secret",)) as client:
            body = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
            for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
                sent = {**headers, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
                assert (await client.post(f"{MESSAGES}?beta=true", json=body, headers=sent)).status_code == 200

    run(ask_both())


def test_what_goes_wrong_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine()
    engine.ending = "error"
    found = events(run(post(engine, MESSAGES, {"model": "tiny", "messages": HELLO, "max_tokens": 60, "stream": True})))
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    assert "it broke" in found[-1]["error"]["message"]


def test_users_have_queues_of_their_own(engine: FakeEngine) -> None:
    message(engine, metadata={"user_id": "u" * 300})
    message(engine, metadata={"user_id": "v"})
    assert len(set(engine.keys)) == 2


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"tools": [TOOL], "tool_choice": {"type": "auto"}}])
def test_counts_are_those_of_the_prompt(more: dict[str, Any]) -> None:
    engine = qwen("Sun.")
    count = message(engine, COUNT, **more)
    assert count.status_code == 200, count.text
    message(engine, **more)
    assert count.json() == {"input_tokens": len(engine.requests[0].prompt)}


def test_counting_is_bounded_as_answering_is(ask: Ask) -> None:
    found = refusal(ask(COUNT, messages=[{"role": "user", "content": "a" * (4 << 20)}]), 400)
    assert "the context holds" in found["message"]
    refusal(ask(COUNT, messages=HELLO, model="claude"), 404)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/audio/speech", "neither images nor sound"),
        ("/v1/files", "nothing is stored"),
    ],
)
def test_well_known_routes_are_refused_with_a_reason(ask: Ask, path: str, why: str) -> None:
    answer = ask(path, input="a")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_served"
    assert why in answer.json()["error"]["message"]
    assert ask("/v1/embeddingsx", input="a").json()["error"]["code"] == "not_found"
