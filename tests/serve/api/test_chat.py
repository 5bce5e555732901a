"""`/v1/chat/completions` over an engine that writes what it is told to."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from eyas.serve.schema.chat import ChatCompletionChunk, ChatCompletionResponse
from eyas.text.chats import Message
from eyas.text.template import encode_chat

from ...pairs import tokenizer
from ..conftest import Ask, post, run
from ..fakes import FakeEngine, ids

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How many?"}]
TEXT = "Natalia sold 48/2 clips in May."


def events(response: httpx.Response) -> list[Any]:
    """The stream's chunks, each checked against the schema; the stream must have ended as streams end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for chunk in found:
        if "error" not in chunk:
            ChatCompletionChunk.model_validate(chunk)
    return found


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_an_answer_has_its_text_reason_usage_and_seed(ask: Ask, engine: FakeEngine) -> None:
    answer = ask(CHAT, messages=HELLO, max_tokens=50, seed=7).json()
    ChatCompletionResponse.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = encode_chat(tokenizer(), [Message(role="user", content="How many?")])
    assert engine.requests[0].prompt == prompt
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == len(ids(TEXT))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["eyas"]["accept_length"] == 2.0
    assert answer["eyas"] == {"seed": 7}
    assert engine.requests[0].params.seed == 7


@pytest.mark.parametrize("named", [{}, {"model": None}])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "How"}), ("/v1/responses", {"input": "How many?"})],
)
def test_without_a_model_s_name_the_served_one_answers(
    engine: FakeEngine, path: str, body: dict[str, Any], named: dict[str, None]
) -> None:
    response = run(post(engine, path, body | named))
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "tiny"


def test_a_stream_begins_with_the_role_and_ends_with_reason_usage_and_done(ask: Ask) -> None:
    chunks = events(ask(CHAT, messages=HELLO, stream=True, stream_options={"include_usage": True}, seed=3))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["eyas"] == {"seed": 3}
    assert text_of(chunks) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids(TEXT))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_continuous_usage_stats_count_each_choice_in_every_chunk(ask: Ask, engine: FakeEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, total = events(ask(CHAT, messages=HELLO, stream=True, n=2, stream_options=options))
    prompt = len(engine.requests[0].prompt)
    tokens = len(ids(TEXT))
    for index in range(2):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert len(set(counts)) > 3
        assert (counts[0], counts[-1]) == (0, tokens)
        assert all(
            u == {"prompt_tokens": prompt, "completion_tokens": c, "total_tokens": prompt + c}
            for u, c in zip(usages, counts, strict=True)
        )
    assert total["usage"]["completion_tokens"] == 2 * tokens
    alone = ask(CHAT, messages=HELLO, stream=True, stream_options={"continuous_usage_stats": True})
    assert alone.status_code == 400
    assert "needs include_usage" in alone.json()["error"]["message"]


def test_without_include_usage_no_chunk_has_usage(ask: Ask) -> None:
    assert not any("usage" in chunk for chunk in events(ask(CHAT, messages=HELLO, stream=True)))


def test_choices_have_seeds_of_their_own_that_follow_from_the_request_s(ask: Ask, engine: FakeEngine) -> None:
    answer = ask(CHAT, messages=HELLO, n=3, seed=2**63 - 2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [request.params.seed for request in engine.requests] == [2**63 - 2, 2**63 - 1, 0]
    assert answer["usage"]["completion_tokens"] == 3 * len(ids(TEXT))
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)  # counted once


def test_an_absent_seed_is_drawn_and_told(ask: Ask, engine: FakeEngine) -> None:
    told = [ask(CHAT, messages=HELLO).json()["eyas"]["seed"] for _ in range(2)]
    assert told == [request.params.seed for request in engine.requests]
    assert told[0] != told[1]


def test_several_choices_stream_side_by_side(ask: Ask) -> None:
    chunks = events(ask(CHAT, messages=HELLO, n=2, stream=True))
    assert text_of(chunks, 0) == text_of(chunks, 1) == TEXT
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_parameters_reach_the_engine(ask: Ask, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    ask(CHAT, messages=HELLO, max_completion_tokens=20, logit_bias={"5": -100, "7": 2.5}, stop_token_ids=[9], **asked)
    params = engine.requests[0].params.model_dump()
    assert {name: params[name] for name in asked} == asked
    assert params["max_tokens"] == 20
    assert params["logit_bias"] == {5: -100, 7: 2.5}
    assert params["stop_token_ids"] == (9,)


def test_variables_reach_the_chat_template_that_reads_them() -> None:
    chars = copy.deepcopy(tokenizer())
    chars.chat_template = "{{ style }}{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = FakeEngine(chars=chars)
    assert _ask(engine, chat_template_kwargs={"style": "clips"}).status_code == 200
    assert chars.decode(engine.requests[0].prompt) == "clips" + HELLO[0]["content"]
    message = _ask(engine, chat_template_kwargs={"style": "clips", "stile": 1}).json()["error"]["message"]
    assert message == "chat_template_kwargs may not set 'stile': this model's chat template takes style from it"


def test_defaults_are_openai_s(ask: Ask, engine: FakeEngine) -> None:
    ask(CHAT, messages=HELLO)
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.max_tokens == 256 - len(engine.requests[0].prompt)  # what is left of the context


@pytest.mark.parametrize("stride", [1, 2, 5, 40])
@pytest.mark.parametrize("stop", ["clips", [" in Ju", "lips"], "8/2 cli"])
def test_stop_strings_cut_exactly_however_tokens_come(stride: int, stop: Any) -> None:
    engine = FakeEngine(stride=stride)
    at = min(TEXT.index(each) for each in ([stop] if isinstance(stop, str) else stop) if each in TEXT)
    complete = "8/2 cli" if stop == "8/2 cli" else "lips"
    needed = next(n for n in range(99) if complete in tokenizer().decode(ids(TEXT)[:n]))
    whole = _ask(engine, stop=stop).json()
    assert whole["choices"][0]["message"]["content"] == TEXT[:at]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == needed
    chunks = events(_ask(engine, stop=stop, stream=True))
    assert text_of(chunks) == TEXT[:at]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def _ask(engine: FakeEngine, **body: Any) -> httpx.Response:
    response: httpx.Response = run(post(engine, CHAT, {"model": "tiny", "messages": HELLO, **body}))
    return response


def test_a_stop_string_ends_the_sequence_in_the_engine() -> None:
    engine = FakeEngine(stride=1, pause=0.01)
    _ask(engine, stop="Nat")
    assert engine.cancelled == [0]


def test_characters_are_never_split() -> None:
    engine = FakeEngine("naïve 🦅 €", stride=1)
    chunks = events(_ask(engine, stream=True))
    assert text_of(chunks) == "naïve 🦅 €"
    assert "\ufffd" not in "".join(json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


def test_logprobs_go_with_their_text(ask: Ask) -> None:
    answer = ask(CHAT, messages=HELLO, logprobs=True, top_logprobs=2).json()
    ChatCompletionResponse.model_validate(answer)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == TEXT
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    assert content[0]["logprob"] == -0.5
    chunks = events(ask(CHAT, messages=HELLO, logprobs=True, stream=True))
    streamed = [e for c in chunks for ch in c["choices"] for e in (ch["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


def test_logprobs_of_parts_of_a_character_have_their_bytes() -> None:
    content = _ask(FakeEngine("€", stride=1), logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "€"


def test_logprobs_end_where_the_text_is_cut(ask: Ask) -> None:
    answer = ask(CHAT, messages=HELLO, logprobs=True, stop=" sold").json()
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == answer["choices"][0]["message"]["content"] == "Natalia"


def test_a_trace_tells_every_round(ask: Ask) -> None:
    answer = ask(CHAT, messages=HELLO, eyas={"trace": True}).json()
    rounds = answer["choices"][0]["eyas"]["rounds"]
    assert "".join(piece for each in rounds for piece in each["pieces"]) == TEXT
    chunks = events(ask(CHAT, messages=HELLO, eyas={"trace": True, "speculate": False}, stream=True))
    traced = [choice["eyas"] for chunk in chunks for choice in chunk["choices"] if "eyas" in choice]
    assert [each["token_ids"] for each in traced] == [each["token_ids"] for each in rounds]


def test_speculation_can_be_refused(ask: Ask, engine: FakeEngine) -> None:
    ask(CHAT, messages=HELLO, eyas={"speculate": False})
    ask(CHAT, messages=HELLO)
    assert [request.speculate for request in engine.requests] == [False, True]


@pytest.mark.parametrize(
    ("ending", "status", "code"), [("error", 500, "engine_error"), ("deadline", 504, "deadline_exceeded")]
)
def test_endings_that_are_no_answers_are_errors(ending: str, status: int, code: str) -> None:
    engine = FakeEngine()
    engine.ending = ending
    response = _ask(engine)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    last = events(_ask(engine, stream=True))[-1]
    assert last["error"]["code"] == code


def test_users_wait_in_queues_of_their_own(ask: Ask, engine: FakeEngine) -> None:
    for user in ("ann", "ben"):
        ask(CHAT, messages=HELLO, user=user)
    ask(CHAT, messages=HELLO, safety_identifier="ann")
    assert engine.keys[0] == engine.keys[2] != engine.keys[1]


def test_a_request_without_a_seed_gets_the_server_s(ask: Ask, engine: FakeEngine) -> None:
    settings = {"seed": 11}
    answers = [ask(CHAT, settings, messages=HELLO, max_tokens=2, n=2, **body).json() for body in ({}, {}, {"seed": 3})]
    assert [answer["eyas"]["seed"] for answer in answers] == [11, 11, 3]
    assert [request.params.seed for request in engine.requests] == [11, 12, 11, 12, 3, 4]


def test_answers_of_a_lossy_server_are_labeled(engine: FakeEngine, ask: Ask) -> None:
    assert "lossy" not in ask(CHAT, messages=HELLO).json()["usage"]["eyas"]
    engine.lossy = True
    assert ask(CHAT, messages=HELLO).json()["usage"]["eyas"]["lossy"] is True


def test_a_prediction_is_what_the_engine_may_copy(engine: FakeEngine, ask: Ask) -> None:
    for content in ("def add", [{"type": "text", "text": "def "}, {"type": "text", "text": "add"}]):
        answer = ask(CHAT, messages=HELLO, prediction={"type": "content", "content": content})
        assert answer.status_code == 200, answer.text
        assert list(engine.requests[-1].prediction) == ids("def add")
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert ask(CHAT, messages=HELLO, prediction={"type": "image", "content": "a"}).status_code == 400
