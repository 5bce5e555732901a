"""Whatever is wrong with a request is said in OpenAI's words, by name, and never a 5xx."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from eyas.serve.engine_thread import EngineStoppedError
from eyas.serve.errors import as_api_error
from eyas.serve.observe.observer import Observers
from eyas.serve.schema.request import NEUTRAL, NOT_SERVED
from eyas.serve.schema.response import ErrorBody

from ..conftest import Ask, client_of, post, run
from ..fakes import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "How many?"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error's fields; the body must be exactly OpenAI's."""
    assert response.status_code == status, response.text
    ErrorBody.model_validate(response.json())
    found: dict[str, Any] = response.json()["error"]
    return found


async def raw(path: str, content: bytes, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async with client_of(FakeEngine(), **settings) as client:
        return await client.post(path, content=content, headers={"content-type": "application/json", **(headers or {})})


@pytest.mark.parametrize("field", ["frobnicate", "max_new_tokens", "best_of_n", "max-tokens", "body"])
def test_unknown_fields_are_refused_by_name(ask: Ask, field: str) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        found = error(ask(path, **body, **{field: 1}), 400)
        assert found["param"] == field
        assert found["message"] == f"unknown field {field}"


def test_unknown_fields_inside_others_are_named_with_their_path(ask: Ask) -> None:
    message = {"role": "user", "content": "x", "cache-control": 1}
    assert error(ask(CHAT, messages=[message]), 400)["param"] == "messages[0].cache-control"
    assert error(ask(CHAT, messages=HELLO, eyas={"a b\n": 1}), 400)["param"] == 'eyas."a b\\n"'
    assert error(ask(CHAT, messages=HELLO, structured_outputs={"a-b": 1}), 400)["param"] == "structured_outputs.a-b"
    assert error(ask(CHAT, messages=[{"content": "x"}]), 400)["param"] == "messages[0].role"


@pytest.mark.parametrize(
    "name", ["messages", "self", "conversations", "conversation", "tokenizer", "tools", "chat_template", "thinking", ""]
)
def test_what_the_chat_template_does_not_take_is_refused_by_name(ask: Ask, name: str) -> None:
    found = error(ask(CHAT, messages=HELLO, chat_template_kwargs={name: []}), 400)
    assert found["param"] == f"chat_template_kwargs.{name}"
    assert (
        found["message"]
        == f"chat_template_kwargs may not set {name!r}: this model's chat template takes nothing from it"
    )


def test_parts_that_are_not_text_are_refused_by_their_type(ask: Ask) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    found = error(ask(CHAT, messages=[{"role": "user", "content": parts}]), 400)
    assert found["param"] == "messages[0].content"
    assert found["message"] == "messages[0].content: parts of type 'image_url' are not supported: eyas serves text"


@pytest.mark.parametrize("field", sorted(NOT_SERVED))
def test_fields_of_openai_that_are_not_served_are_refused_with_a_reason_unless_null(ask: Ask, field: str) -> None:
    found = error(ask(CHAT, messages=HELLO, **{field: {"some": "value"}}), 400)
    assert found["code"] == "unsupported_parameter"
    assert found["param"] == field
    assert NOT_SERVED[field] in found["message"]
    for value in (None, NEUTRAL.get(field)):
        assert ask(CHAT, messages=HELLO, **{field: value}).status_code == 200


NOTHING_ASKED: dict[str, Any] = {
    "n": 1,
    "store": False,
    "service_tier": "auto",
    "metadata": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "stop": None,
    "logit_bias": {},
    "logprobs": False,
    "stream": False,
    "user": "me",
}


def test_neutral_values_of_known_fields_are_taken(ask: Ask) -> None:
    assert ask(CHAT, messages=HELLO, **NOTHING_ASKED).status_code == 200


def test_messages_that_clients_send_back_are_taken(ask: Ask) -> None:
    said = ask(CHAT, messages=HELLO).json()["choices"][0]["message"]
    nulls = {"audio": None, "function_call": None, "tool_calls": None, "annotations": None}
    again = [*HELLO, {**said, **nulls}, {"role": "user", "content": [{"type": "text", "text": "And then?"}]}]
    assert ask(CHAT, messages=again).status_code == 200


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**80}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"top_logprobs": 5}, ""),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, ""),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages"),
    ({"eyas": {"depth": 3}}, "eyas"),
    ({"min_tokens": 300}, "min_tokens"),
    ({"tool_choice": "required"}, ""),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_named(ask: Ask, body: dict[str, Any], param: str) -> None:
    found = error(ask(CHAT, **{"messages": HELLO, **body}), 400)
    assert (found["param"] or "").startswith(param)
    assert len(found["message"]) < 1100
    assert "pydantic" not in found["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], ["a", 1], [-1], [2**40], [1.5], {"a": 1}, None, ["a"] * 200]
)
def test_wrong_prompts_are_named(ask: Ask, prompt: Any) -> None:
    error(ask(TEXT, prompt=prompt), 400)


def test_tokens_outside_the_vocabulary_are_refused(ask: Ask) -> None:
    error(ask(TEXT, prompt=[1, 2, 10**6]), 400)
    error(ask("/detokenize", tokens=[10**6]), 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "tiny", "messages": NaN}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": Infinity}',
        b'{"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "model": "tiny"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"null",
        b'"text"',
        b"[1, 2]",
        "{}".encode("utf-16"),
        b"\x00",
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_bodies_that_are_not_the_json_that_is_needed_are_400(path: str, content: bytes) -> None:
    error(run(raw(path, content)), 400)


def test_a_key_that_comes_twice_is_named() -> None:
    message = b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "content": "b"}]}'
    found = error(run(raw(CHAT, message)), 400)
    assert found["code"] == "invalid_json"
    assert "key" in found["message"]
    assert '"content"' in found["message"]


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "x"])
def test_other_content_types_are_415(kind: str) -> None:
    error(run(raw(CHAT, b"{}", {"content-type": kind})), 415)


@pytest.mark.parametrize("kind", ["", FORM, f"{FORM}; charset=utf-8"])
def test_programs_need_not_declare_a_body_but_browsers_must(kind: str) -> None:
    """As litellm sends to Ollama, and as curl does; a form on another site looks the same, but has its origin."""
    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 2}).encode()
    assert run(raw(CHAT, body, {"content-type": kind})).status_code == 200
    for browser in ({"origin": "null"}, {"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        error(run(raw(CHAT, body, {"content-type": kind, **browser})), 415)


def test_bodies_over_the_limit_are_413_whether_declared_or_not() -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100

    async def ask_both() -> None:
        async with client_of(FakeEngine(), max_body_bytes=1000) as client:
            headers = {"content-type": "application/json"}
            for content in (b" " * 1001, chunks()):
                response = await client.post(CHAT, content=content, headers=headers)
                assert error(response, 413)["code"] == "body_too_large"
                assert response.headers["connection"] == "close"
            just = json.dumps({"model": "tiny", "messages": HELLO}).encode().ljust(1000)
            assert (await client.post(CHAT, content=just, headers=headers)).status_code == 200

    run(ask_both())


def test_what_does_not_fit_the_context_is_told_with_the_numbers(ask: Ask, engine: FakeEngine) -> None:
    found = error(ask(TEXT, prompt=[5] * 200, max_tokens=57), 400)
    assert found["code"] == "context_length_exceeded"
    assert all(number in found["message"] for number in ("256", "200", "57", "257"))
    assert ask(TEXT, prompt=[5] * 200, max_tokens=56).status_code == 200
    found = error(ask(CHAT, messages=[{"role": "user", "content": "a " * 1000}]), 400)
    assert found["code"] == "context_length_exceeded"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("text", ["a" * (4 << 20), "🙂 " * (1 << 20)], ids=["letters", "faces"])
def test_megabytes_of_text_are_refused_before_they_are_tokenized(ask: Ask, text: str) -> None:
    began = time.monotonic()
    for path, body in ((TEXT, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        assert error(ask(path, **body), 400)["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 3


def test_a_smaller_context_can_be_asked_for(ask: Ask) -> None:
    error(ask(TEXT, {"max_model_len": 20}, prompt=[5] * 10, max_tokens=11), 400)
    assert ask(TEXT, {"max_model_len": 20}, prompt=[5] * 10, max_tokens=10).status_code == 200


def test_a_model_that_is_not_here_is_404(ask: Ask) -> None:
    found = error(ask(CHAT, model="gpt-5", messages=HELLO), 404)
    assert found["code"] == "model_not_found"
    assert "tiny" in found["message"]


def test_a_full_queue_is_429_with_retry_after_and_queues_nothing() -> None:
    engine = FakeEngine(most=2)
    response = run(post(engine, CHAT, {"model": "tiny", "messages": HELLO, "n": 3}))
    assert error(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "7"
    assert sorted(engine.cancelled) == [0, 1]


def test_too_many_answers_at_once_are_refused(ask: Ask) -> None:
    assert error(ask(TEXT, prompt=["a"] * 100, n=2), 400)["param"] == "n"


def test_unknown_addresses_and_methods_are_told_alike() -> None:
    async def ask_them() -> None:
        async with client_of(FakeEngine()) as client:
            error(await client.get("/v2/nothing"), 404)
            response = await client.get(CHAT)
            error(response, 405)
            assert response.headers["allow"] == "POST"

    run(ask_them())


def test_a_bug_is_500_without_its_insides() -> None:
    class Broken(FakeEngine):
        def check(self, request: Any) -> None:  # noqa: ARG002
            raise KeyError("secret")

    found = error(run(post(Broken(), CHAT, {"model": "tiny", "messages": HELLO})), 500)
    assert "secret" not in found["message"]


def test_refusals_are_reported_to_the_observer() -> None:
    class Recorder(Observers):
        refusals: list[tuple[str, int, str, str]]

        def refused(self, endpoint: str, status: int, code: str, path: str) -> None:
            self.refusals.append((endpoint, status, code, path))

    recorder = Recorder()
    recorder.refusals = []

    async def ask_them() -> None:
        async with client_of(FakeEngine(), recorder) as client:
            await client.post(CHAT, json={"model": "tiny", "messages": HELLO, "x": 1})
            await client.get("/nothing")

    run(ask_them())
    assert recorder.refusals == [(CHAT, 400, "unknown_parameter", CHAT), ("", 404, "not_found", "/nothing")]


MEGABYTES = 3 << 19
MESSAGE = b'{"model": "tiny", "messages": [{"role": "user", "content": '
MANY = {
    "ids": (TEXT, b'{"model": "tiny", "prompt": [' + b"-1," * (MEGABYTES // 3) + b"1]}", "prompt"),
    "lists": (TEXT, b'{"model": "tiny", "prompt": [' + b"[]," * (MEGABYTES // 3) + b"[1]]}", None),
    "choices": (TEXT, b'{"model": "tiny", "prompt": "a", "guided_choice": [' + b"1," * (MEGABYTES // 2) + b"1]}", None),
    "parts": (CHAT, MESSAGE + b"[" + b"1," * (MEGABYTES // 2) + b"1]}]}", None),
    "fields": (CHAT, b"{%s}" % b",".join(b'"f%d":1' % i for i in range(MEGABYTES // 12)), None),
    "tokens": ("/detokenize", b'{"tokens": [' + b"-1," * (MEGABYTES // 3) + b"1]}", "tokens[0]"),
    "files": (
        "/infill",
        b'{"input_prefix": "", "input_suffix": "", "input_extra": [' + b"1," * (MEGABYTES // 2) + b"1]}",
        None,
    ),
    "mixed prompt": ("/completion", b'{"prompt": [' + b"[]," * (MEGABYTES // 3) + b"1]}", None),
    "stop strings": ("/completion", b'{"prompt": "a", "stop": [' + b"1," * (MEGABYTES // 2) + b"1]}", None),
    "characters": ("/tokenize", b'{"prompt": "' + b"a" * MEGABYTES + b'"}', "prompt"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", MANY)
def test_megabytes_of_wrong_values_are_refused_at_once(kind: str) -> None:
    """Told one by one they took minutes, while nobody else was answered."""
    path, body, param = MANY[kind]
    began = time.process_time()
    found = error(run(raw(path, body)), 400)
    assert time.process_time() - began < 8
    assert found["param"] == param
    assert param is not None or found["code"] == "too_many_values"


@pytest.mark.parametrize(("path", "field"), [("/api/chat", b"messages"), ("/api/generate", b"context")])
def test_megabytes_of_wrong_values_are_refused_at_once_in_ollama_s_words(path: str, field: bytes) -> None:
    began = time.process_time()
    answer = run(raw(path, b'{"model": "tiny", "%s": [' % field + b"1," * (MEGABYTES // 2) + b"1]}"))
    assert time.process_time() - began < 8
    assert answer.status_code == 400
    assert "send less at a time" in answer.json()["error"]


def test_megabytes_of_prediction_are_refused_at_once() -> None:
    expected = b'"a"}], "prediction": {"type": "content", "content": "' + b"a" * MEGABYTES + b'"}}'
    began = time.process_time()
    found = error(run(raw(CHAT, MESSAGE + expected)), 400)
    assert time.process_time() - began < 8
    assert found["code"] == "context_length_exceeded"


def test_a_prompt_of_many_tokens_is_not_too_many_values(ask: Ask) -> None:
    found = error(ask(TEXT, prompt=[1] * 40_000), 400)
    assert found["code"] == "context_length_exceeded"
    found = error(ask(TEXT, prompt=[[1] * 20_000] * 2), 400)
    assert found["code"] == "context_length_exceeded"


def test_a_field_that_may_be_several_things_says_what_was_wrong_with_each(ask: Ask) -> None:
    found = error(ask(TEXT, prompt=[2**40]), 400)
    assert found["param"] == "prompt"
    assert "valid string, or" in found["message"]
    assert "less than 2147483648" in found["message"]


def test_what_was_given_up_when_the_engine_ended_is_503() -> None:
    error = as_api_error(EngineStoppedError("the server is going down"))
    assert (error.status, error.headers) == (503, {"Retry-After": "1"})


@pytest.mark.parametrize("error_name", ["PassMemoryError", "CacheMemoryError"])
def test_what_memory_has_no_room_for_is_503_and_advice_not_the_allocators_words(error_name: str) -> None:
    engine = FakeEngine()
    engine.ending = "error"
    engine.error = f"{error_name}: tried to allocate 9.25 GiB"
    answer = run(post(engine, TEXT, {"model": "tiny", "prompt": "a"}))
    found = error(answer, 503)
    assert found["code"] == "out_of_memory"
    assert "shorten the prompt" in found["message"]
    assert "GiB" not in found["message"]
    assert answer.headers["retry-after"] == "60"
