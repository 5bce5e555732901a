"""An endpoint that answers, stumbles, and is gone."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate import CompletionSettings, Connection, EndpointAnswerer, RewriteRule, regenerate
from eyas.data.regenerate.endpoint import RetryPolicy, retry_after
from eyas.errors import EndpointError, UsageError
from eyas.text.chats import Chat, Message, exchange, read_chats, write_chats
from eyas.types import SamplingParams

from .fake_endpoint import FakeEndpoint, Said, completion, echo, endpoint

ASK = CompletionSettings(model="big", sampling=SamplingParams(max_tokens=9, temperature=0.5, seed=3))
QUICK = RetryPolicy(attempts=3, first=0.001)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def answerer(
    server: FakeEndpoint, settings: CompletionSettings = ASK, retry: RetryPolicy = QUICK, **more: Any
) -> EndpointAnswerer:
    key = more.pop("api_key", None)
    return EndpointAnswerer(
        server.url, settings, Connection(retry=retry, **{"concurrency": 4, "timeout": 5, **more}), key
    )


def write_questions(path: Path, count: int) -> Path:
    write_chats(path, [exchange(f"c{i}", f"q{i}", "old") for i in range(count)])
    return path


def answers(path: Path) -> dict[str, str | None]:
    return {chat.id: chat.messages[-1].content for chat in read_chats(path)}


def test_every_chat_is_answered_whatever_the_order(tmp_path: Path) -> None:
    order = random.Random(1)

    def slow(body: dict[str, Any], before: int) -> Said:
        time.sleep(order.random() * 0.02)
        return echo(body, before)

    chats = write_questions(tmp_path / "in.jsonl", 30)
    outputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for output in outputs:
        with endpoint(slow) as server:
            summary = regenerate(chats, output, EndpointAnswererAt("http://same/v1", server))
            assert 1 < server.most_at_once <= 4
            assert len(server.requests) == 30
            assert regenerate(chats, output, EndpointAnswererAt("http://same/v1", server)) == summary
            assert len(server.requests) == 30  # nothing is asked again
        assert (summary.chats, summary.tokens, summary.unanswered) == (30, 90, [])
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert list(answers(outputs[0])) == [f"c{i}" for i in range(30)]
    assert len({body["seed"] for body in server.requests}) == 30


class EndpointAnswererAt(EndpointAnswerer):
    """Known by another name than the port it happened to get."""

    def __init__(self, name: str, server: FakeEndpoint) -> None:
        super().__init__(server.url, ASK, Connection(concurrency=4, timeout=5, retry=QUICK))
        self._name = name

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "answered_by": self._name}


def test_what_is_sent(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
    ]
    write_chats(tmp_path / "in.jsonl", [Chat.model_validate({"id": "c", "messages": messages, "tools": [TOOL]})])
    settings = ASK.model_copy(
        update={
            "tool_choice": "auto",
            "extra_body": {"seed": None, "chat_template_kwargs": {"enable_thinking": False}},
            "sampling": SamplingParams(max_tokens=9, temperature=0.5, top_k=4),
        }
    )
    with endpoint(lambda *_: Said(body=completion({"content": "ok"}))) as server:
        regenerate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", answerer(server, settings, api_key="s3cret"))
    sent = server.requests[0]
    assert sent["messages"][2] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call, "function": {"name": "look", "arguments": '{"at": "é"}'}}],
    }
    assert sent["messages"][3] == messages[3]
    del sent["messages"]
    assert sent == {
        "model": "big", "max_tokens": 9, "temperature": 0.5, "top_k": 4, "tools": [TOOL], "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert all(b"s3cret" not in file.read_bytes() for file in tmp_path.iterdir())


def test_calls_refusals_and_reasoning_are_taken(tmp_path: Path) -> None:
    said = {
        "q0": completion({"content": None, "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "y", "type": "function", "function": {"name": "look", "arguments": "{at"}},
        ]}, "tool_calls"),
        "q1": completion({"content": None, "refusal": "I won't."}),
        "q2": completion({"content": "5", "reasoning_content": "2+3"}),
        "q3": completion({"content": None, "reasoning": "2+3+"}, "length"),
    }  # fmt: skip
    for keep in (True, False):
        with endpoint(lambda body, _: Said(body=said[body["messages"][0]["content"]])) as server:
            settings = ASK.model_copy(update={"keep_reasoning": keep})
            output = tmp_path / f"{keep}.jsonl"
            summary = regenerate(write_questions(tmp_path / "in.jsonl", 4), output, answerer(server, settings))
        last = [chat.messages[-1] for chat in read_chats(output)]
        assert [call.function.arguments for call in last[0].tool_calls or ()] == [{"at": 1}, "{at"]
        assert last[0].content is None
        assert last[1] == Message(role="assistant", content="I won't.")
        assert last[2].reasoning_content == ("2+3" if keep else None)
        assert (last[3].content, last[3].reasoning_content) == ("", "2+3+" if keep else None)
        assert (summary.calls, summary.refusals, summary.unfinished) == (1, 1, 1)


STUMBLES = [
    Said(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
    Said(500, b"oops"),
    Said(503, {"error": "busy"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    Said(200, b"<html>"),
    Said(200, b"\xff\xfe"),
    Said(200, {"choices": []}),
    Said(200, [1]),
    Said(200, completion({"content": None})),
    Said(0),
]


@pytest.mark.parametrize("stumble", STUMBLES, ids=lambda said: f"{said.status}-{str(said.body)[:12]}")
def test_a_stumble_is_tried_again_and_lasting_trouble_given_up(tmp_path: Path, stumble: Said) -> None:
    def script(body: dict[str, Any], before: int) -> Said:
        bad = {"q1": 2, "q3": 99}.get(body["messages"][0]["content"], 0)
        return stumble if before < bad else echo(body)

    chats = write_questions(tmp_path / "in.jsonl", 5)
    output = tmp_path / "out.jsonl"
    with endpoint(script) as server:
        summary = regenerate(chats, output, answerer(server))
        assert list(answers(output)) == ["c0", "c1", "c2", "c4"]
        assert len(server.requests) == 4 + 2 + 3
        ((name, reason),) = summary.unanswered
        assert name == "c3"
        assert reason.endswith("(tried 3 times)")
        assert str(stumble.status) in reason or stumble.status in (0, 200)
        server.script = echo
        assert regenerate(chats, output, answerer(server)).unanswered == []
        assert len(server.requests) == 10  # only the one that was left
    assert list(answers(output)) == [f"c{i}" for i in range(5)]


def test_a_refused_chat_is_not_tried_again_in_this_run(tmp_path: Path) -> None:
    def script(body: dict[str, Any], before: int) -> Said:
        said = Said(400, {"error": {"message": "context length is 10"}})
        return said if body["messages"][0]["content"] == "q1" else echo(body, before)

    with endpoint(script) as server:
        summary = regenerate(write_questions(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl", answerer(server))
    assert len(server.requests) == 3
    assert summary.unanswered == [("c1", f"{server.url} says 400: context length is 10")]


def test_a_hanging_endpoint_times_out(tmp_path: Path) -> None:
    def script(body: dict[str, Any], before: int) -> Said:
        if before == 0:
            time.sleep(0.6)
        return echo(body)

    with endpoint(script) as server:
        summary = regenerate(
            write_questions(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl", answerer(server, timeout=0.25)
        )
    assert (summary.chats, len(server.requests)) == (2, 4)


def test_an_endpoint_that_is_not_there_stops_the_run(tmp_path: Path) -> None:
    with endpoint() as server:
        pass
    chats = write_questions(tmp_path / "in.jsonl", 40)
    output = tmp_path / "out.jsonl"
    with pytest.raises(EndpointError, match=r"10 chats in a row got no answer.*can't be reached"):
        regenerate(chats, output, answerer(server))
    assert not output.exists()


def test_an_endpoint_that_rejects_every_request_alike_stops_the_run(tmp_path: Path) -> None:
    def script(body: dict[str, Any], _: int) -> Said:
        text = "seed is not supported" if alike else f"{body['messages'][0]['content']} is too long"
        return Said(422, {"error": text})

    chats = write_questions(tmp_path / "in.jsonl", 60)
    output = tmp_path / "out.jsonl"
    alike = True
    with endpoint(script) as server:
        with pytest.raises(EndpointError, match=r"50 for the same reason: .* says 422: seed is not supported"):
            regenerate(chats, output, answerer(server))
        alike = False
        assert len(regenerate(chats, output, answerer(server)).unanswered) == 60


def test_an_endpoint_that_goes_away_stops_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    def script(body: dict[str, Any], _: int) -> Said:
        return echo(body) if len(server.requests) <= 12 or well else Said(401, {"error": {"message": "no more credit"}})

    chats = write_questions(tmp_path / "in.jsonl", 40)
    output = tmp_path / "out.jsonl"
    well = False
    with endpoint(script) as server:
        with pytest.raises(EndpointError, match="no more credit"):
            regenerate(chats, output, answerer(server))
        before = len(server.requests)
        well = True
        assert regenerate(chats, output, answerer(server)).chats == 40
        assert len(server.requests) == before + 28


def test_all_turns_are_asked_in_order(tmp_path: Path) -> None:
    talk = [("user", "a"), ("assistant", "x"), ("user", "b"), ("assistant", "y"), ("user", "c"), ("assistant", "z")]
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in talk)
    write_chats(tmp_path / "in.jsonl", [Chat(id=f"c{i}", messages=messages) for i in range(5)])
    with endpoint() as server:
        summary = regenerate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", answerer(server), RewriteRule("all"))
    assert (summary.chats, summary.answers, len(server.requests)) == (5, 15, 15)
    for chat in read_chats(tmp_path / "out.jsonl"):
        said = [message.content or "" for message in chat.messages]
        assert said[::2] == ["a", "b", "c"]
        assert [text.split()[0] for text in said[1::2]] == ["<a>", "<b>", "<c>"]
        assert len({text.split()[1] for text in said[1::2]}) == 3  # every turn has a seed of its own
        assert [message.for_template() for message in chat.messages[:-1]] in [
            body["messages"] for body in server.requests
        ]


def test_settings_must_stay(tmp_path: Path) -> None:
    chats = write_questions(tmp_path / "in.jsonl", 2)
    output = tmp_path / "out.jsonl"
    with endpoint() as server:
        regenerate(chats, output, answerer(server))
        with pytest.raises(UsageError, match=r"model was 'big', is 'small' \(`model=`\)"):
            regenerate(chats, output, answerer(server, ASK.model_copy(update={"model": "small"})))
        with pytest.raises(UsageError, match="turns was 'last', is 'all'"):
            regenerate(chats, output, answerer(server), RewriteRule("all"))
        regenerate(chats, output, answerer(server, concurrency=1))  # how it is reached is free


def test_backoff_and_retry_after() -> None:
    policy = RetryPolicy(first=1.0, longest=10.0)
    for failures, most in ((1, 1), (2, 2), (3, 4), (9, 10), (5000, 10)):
        waits = [policy.wait(failures) for _ in range(50)]
        assert most / 2 <= min(waits) <= max(waits) <= most
        assert len(set(waits)) > 1
    assert policy.wait(1, 70.0) == 70.0
    assert retry_after("7") == 7.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("soon") is None
    assert retry_after(None) is None


def test_a_url_is_needed() -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT/v1"):
        EndpointAnswerer("localhost:8000", ASK)


def test_the_journal_says_what_was_asked(tmp_path: Path) -> None:
    with endpoint() as server:
        regenerate(write_questions(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", answerer(server))
    settings = json.loads((tmp_path / "out.jsonl.journal").read_text().splitlines()[0])["settings"]
    assert settings["answered_by"] == server.url
    assert settings["sampling"]["temperature"] == 0.5
