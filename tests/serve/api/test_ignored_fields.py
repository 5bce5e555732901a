"""Fields that agents send and that change nothing: any value is taken, the log names each once, answers stay."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from eyas.serve.schema.chat import ChatCompletionRequest
from eyas.serve.schema.request import IgnoredFields, names_ignored

from ..conftest import Ask, client_of, run
from ..fakes import FakeEngine
from .test_tool_calls import WEATHER, qwen

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "How many?"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}
SENT: dict[str, dict[str, Any]] = {
    "openai": {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k",
               "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
    "llama.cpp": {"cache_prompt": True, "id_slot": 0, "timings_per_token": True, "return_progress": True,
                  "mirostat": 0, "mirostat_tau": 5.0, "typ_p": 1.0, "xtc_probability": 0, "dry_multiplier": 0},
    "openrouter": {"usage": {"include": True}, "provider": {"sort": "price"}, "include_reasoning": True},
    "vllm": {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("client", SENT)
def test_what_clients_add_changes_no_answer(ask: Ask, engine: FakeEngine, path: str, client: str) -> None:
    sent = SENT[client] | ({"stream_options": {"include_obfuscation": True}, "stream": True} if path == CHAT else {})
    assert ask(path, **BODIES[path], seed=1).status_code == 200
    answer = ask(path, **BODIES[path], seed=1, **sent)
    assert answer.status_code == 200, answer.text
    first, second = engine.requests
    assert (first.prompt, first.params) == (second.prompt, second.params)


@pytest.mark.every(3)
@pytest.mark.parametrize("field", sorted(IgnoredFields.model_fields.keys() & names_ignored(ChatCompletionRequest)))
def test_any_value_of_an_ignored_field_is_taken(ask: Ask, field: str) -> None:
    for value in (True, -1, "x", [], {"a": [None]}):
        assert ask(CHAT, messages=HELLO, **{field: value}).status_code == 200


AGENTS: dict[str, Any] = {
    "id": "x",
    "logit_bias": {},
    "tools": [],
    "stop": [],
    "audio": None,
    "whatever": None,
    "functions": [],
}


@pytest.mark.parametrize("path", BODIES)
def test_nulls_and_empty_values_are_absent(ask: Ask, engine: FakeEngine, path: str) -> None:
    assert ask(path, **BODIES[path], seed=1).status_code == 200
    sent = AGENTS if path == CHAT else {name: value for name, value in AGENTS.items() if name not in ("tools",)}
    answer = ask(path, **BODIES[path], seed=1, **sent)
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].params == engine.requests[1].params


def test_what_comes_with_messages_is_not_shown(ask: Ask, engine: FakeEngine) -> None:
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": {"a": 1}}}
    told = {
        "id": "m",
        "reasoning_details": [{}],
        "refusal": None,
        "audio": None,
        "function_call": None,
        "prefix": False,
    }
    answers = [
        ask(CHAT, messages=[*HELLO, {"role": "assistant", "content": "7", **further}, *HELLO], seed=1)
        for further in ({}, told)
    ]
    assert [each.status_code for each in answers] == [200, 200], answers[1].text
    assert engine.requests[0].prompt == engine.requests[1].prompt
    sent = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call], **told},
        {"role": "tool", "content": "7"},
    ]
    assert ask(CHAT, messages=sent).status_code == 200


def test_numbers_that_mean_no_setting(ask: Ask, engine: FakeEngine) -> None:
    assert ask(CHAT, messages=HELLO, seed=-1, max_tokens=-1, top_p=0).status_code == 200
    params = engine.requests[0].params
    assert params.seed >= 0
    assert params.max_tokens > 16
    assert (params.top_k, params.top_p) == (1, 1.0)
    assert ask(TEXT, prompt="a", max_tokens=-1).status_code == 200
    assert engine.requests[1].params.max_tokens > 16
    assert ask(CHAT, messages=HELLO, max_tokens=0).status_code == 400
    assert ask(CHAT, messages=HELLO, seed=-7).status_code == 200
    anthropic = ask("/v1/messages", messages=HELLO, max_tokens=-1, top_p=0, seed=-1)
    assert anthropic.status_code == 200, anthropic.text


def test_a_message_with_prefix_is_continued(ask: Ask, engine: FakeEngine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Seven", "prefix": True}]
    assert ask(CHAT, messages=begun).status_code == 200
    plain = [*HELLO, {"role": "assistant", "content": "Seven"}]
    assert ask(CHAT, messages=plain, add_generation_prompt=False, continue_final_message=True).status_code == 200
    assert engine.requests[0].prompt == engine.requests[1].prompt
    assert ask(CHAT, messages=[*begun, *HELLO]).status_code == 400


@pytest.mark.parametrize(("field", "value"), [("mirostat", 2), ("xtc_probability", 0.5), ("use_beam_search", True)])
def test_what_would_change_the_answer_is_still_refused(ask: Ask, field: str, value: Any) -> None:
    found = ask(CHAT, messages=HELLO, **{field: value})
    assert found.status_code == 400
    assert "isn't served" in found.json()["error"]["message"]


def test_the_log_names_each_ignored_field_once(caplog: pytest.LogCaptureFixture) -> None:
    marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    body = {"model": "tiny", "store": True, "prompt_cache_key": None, "messages": [{"role": "user", "content": marked}]}

    async def ask_thrice() -> None:
        async with client_of(FakeEngine()) as client:
            for _ in range(3):
                assert (await client.post(CHAT, json=body)).status_code == 200

    with caplog.at_level(logging.INFO, "eyas.serve.context"):
        run(ask_thrice())
    fields = [getattr(record, "fields") for record in caplog.records if "ignored" in record.message]  # noqa: B009
    assert [each["field"] for each in fields] == ["messages.content.cache_control", "store"]
    assert fields[1]["reason"] == "nothing is stored"


def test_marks_of_caches_in_tools_reach_no_template() -> None:
    engine = qwen("Sun.")
    engine.ending = "stop"

    async def ask_both() -> None:
        async with client_of(engine) as client:
            for tool in (WEATHER, {**WEATHER, "cache_control": {"type": "ephemeral"}}):
                body = {"model": "tiny", "messages": HELLO, "tools": [tool]}
                assert (await client.post(CHAT, json=body)).status_code == 200

    run(ask_both())
    assert engine.requests[0].prompt == engine.requests[1].prompt


def test_effort_and_thinking_reach_templates_that_read_them(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = "{{ reasoning_effort }}{% if enable_thinking is false %}off{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", read)
    sent: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HELLO, "reasoning_effort": "low", "enable_thinking": False}),
        (RESPONSES, {"input": "How many?", "reasoning": {"effort": "low", "summary": "auto"}}),
        (CHAT, {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
    ]

    async def ask_all() -> None:
        async with client_of(engine) as client:
            for path, body in sent:
                assert (await client.post(path, json={"model": "tiny", **body})).status_code == 200

    run(ask_all())
    texts = [engine.tokenizer.decode(request.prompt) for request in engine.requests]
    assert texts == ["lowoffHow many?", "lowHow many?", "highHow many?"]


def test_effort_is_ignored_where_no_template_reads_it(ask: Ask, engine: FakeEngine) -> None:
    ask(CHAT, messages=HELLO)
    assert ask(CHAT, messages=HELLO, reasoning_effort="high", enable_thinking=True).status_code == 200
    assert engine.requests[0].prompt == engine.requests[1].prompt
