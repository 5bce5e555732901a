"""Tools through the chat API: shown to the template, read out of the answer, refused where they can't be."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import httpx
import pytest

from eyas.serve.schema.chat import ChatCompletionResponse

from ...data.templates import templated
from ...pairs import tokenizer
from ..conftest import post, run
from ..fakes import FakeEngine
from ..http.test_errors import error
from .test_chat import events

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Sun or rain",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def qwen(text: str, **options: Any) -> FakeEngine:
    tokenizer = templated("qwen2")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return FakeEngine([*tokens, tokenizer.eos_token_id], chars=tokenizer, context=4096, **options)


def ask(engine: FakeEngine, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "How is the weather?"}]
    engine.ending = "stop"
    sent = {"model": "tiny", "messages": messages, "tools": [WEATHER], **body}
    response: httpx.Response = run(post(engine, CHAT, sent))
    return response


def test_a_call_is_read_out_of_the_answer() -> None:
    engine = qwen("Let me see.\n" + CALL)
    answer = ask(engine).json()
    ChatCompletionResponse.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert "Sun or rain" in templated("qwen2").decode(engine.requests[0].prompt)


def test_nothing_but_a_call_has_no_content() -> None:
    message = ask(qwen(CALL)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_calls_stream_in_pieces() -> None:
    chunks = events(ask(qwen("Well.\n" + CALL + "\n" + CALL, stride=1), stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1]
    for index in (0, 1):
        mine = [piece["function"]["arguments"] for piece in pieces if piece["index"] == index]
        assert json.loads("".join(mine)) == {"city": "Bern"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_at_a_time_ends_at_the_second() -> None:
    engine = qwen((CALL + "\n") * 8, stride=1, pause=0.002)
    answer = ask(engine, parallel_tool_calls=False).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.cancelled == [0]
    chunks = events(ask(qwen((CALL + "\n") * 8, stride=1, pause=0.002), parallel_tool_calls=False, stream=True))
    ids = [p["id"] for c in chunks for ch in c["choices"] for p in ch["delta"].get("tool_calls", ()) if "id" in p]
    assert len(ids) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_beginning_of_a_call_that_had_to_be_made_is_no_text() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for cut in ("<tool_c", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "weath'):
        for choice in ("required", named):
            answer = ask_cut(cut, tool_choice=choice).json()["choices"][0]
            assert answer["message"]["content"] == ""
            assert "tool_calls" not in answer["message"]
            assert answer["finish_reason"] == "length"
            chunks = events(ask_cut(cut, tool_choice=choice, stream=True))
            assert not any(c["delta"].get("content") for chunk in chunks for c in chunk["choices"])
    answer = ask_cut('<tool_call>\n{"name": "weather", "arguments": {"ci', tool_choice="required").json()["choices"][0]
    assert answer["message"]["content"] is None
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'


def ask_cut(text: str, **body: Any) -> httpx.Response:
    """An answer that its length ends."""
    tokens = templated("qwen2")(text, add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": "How is the weather?"}]
    engine = FakeEngine(tokens, chars=templated("qwen2"), context=4096)
    response: httpx.Response = run(
        post(engine, CHAT, {"model": "tiny", "messages": messages, "tools": [WEATHER], **body})
    )
    return response


def test_tools_that_may_not_be_called_are_not_shown_and_not_read() -> None:
    engine = qwen(CALL)
    answer = ask(engine, tool_choice="none").json()
    assert "Sun or rain" not in templated("qwen2").decode(engine.requests[0].prompt)
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_calls_that_must_be_made_are_a_grammar() -> None:
    engine = qwen(CALL)
    assert ask(engine, tool_choice="required").status_code == 200
    assert ask(engine, tool_choice={"type": "function", "function": {"name": "weather"}}).status_code == 200
    assert [request.grammar is not None and request.grammar.kind for request in engine.requests] == ["lark", "lark"]
    ask(engine)
    assert engine.requests[-1].grammar is None


def test_tools_are_refused_where_they_can_not_be_served() -> None:
    nobody = {"type": "function", "function": {"name": "nobody"}}
    assert "nobody" in error(ask(qwen(CALL), tool_choice=nobody), 400)["message"]
    error(ask(qwen(CALL), response_format={"type": "json_object"}), 400)
    messages = [{"role": "user", "content": "x"}]
    toolless = copy.deepcopy(tokenizer())
    toolless.chat_template = "{{ messages[0].content }}"
    plain = run(post(FakeEngine(chars=toolless), CHAT, {"model": "tiny", "messages": messages, "tools": [WEATHER]}))
    assert error(plain, 400)["param"] == "tools"


def test_an_unknown_style_is_served_as_text(caplog: pytest.LogCaptureFixture) -> None:
    chars = copy.deepcopy(tokenizer())
    chars.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
    engine = FakeEngine(chars=chars, context=2048)
    with caplog.at_level(logging.WARNING):
        for choice in ("auto", "required"):
            answer = run(post(engine, CHAT, {**body, "tool_choice": choice}))
            assert answer.status_code == 200, answer.text
            assert "clips" in answer.json()["choices"][0]["message"]["content"]
    assert not any(request.grammar for request in engine.requests)
    assert sum("unknown style" in record.message for record in caplog.records) == 1


def test_answers_of_tools_go_back_to_the_template() -> None:
    engine = qwen("It rains.")
    asked = [
        {"role": "user", "content": "How is the weather?"},
        {**ask(qwen(CALL)).json()["choices"][0]["message"]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain over Bern"},
    ]
    assert ask(engine, messages=asked).status_code == 200
    assert "rain over Bern" in templated("qwen2").decode(engine.requests[0].prompt)


def test_what_an_answer_must_look_like_is_compiled_before_it_is_queued() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "x"}]

    def send(**body: Any) -> httpx.Response:
        response: httpx.Response = run(post(engine, CHAT, {"model": "tiny", "messages": messages, **body}))
        return response

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert send(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).is_success
    assert send(response_format={"type": "json_object"}).is_success
    assert send(structured_outputs={"choice": ["yes", "no"]}).is_success
    assert send(guided_regex="[0-9]+").is_success
    kinds = [request.grammar.kind for request in engine.requests if request.grammar is not None]
    assert kinds == ["json_schema", "json_object", "choice", "regex"]
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error(send(response_format=bad), 400)
    error(send(guided_regex="("), 400)
    error(send(guided_regex="a", structured_outputs={"regex": "b"}), 400)
    error(send(response_format={"type": "xml"}), 400)
    assert len(engine.requests) == 4
