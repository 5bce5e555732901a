"""The official client, unmodified, against a server over a tiny pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from eyas.engine import Engine
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text
from eyas.types import Request, SamplingParams

from ...pairs import tokenizer
from ..conftest import run
from ..live import Live

HELLO: Any = [{"role": "user", "content": "How many clips?"}]


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def offline_tokens(offline: Engine, prompt: tuple[int, ...], **params: Any) -> list[int]:
    return offline.generate([Request(prompt, SamplingParams(**params))])[0].token_ids


def text(ids: list[int]) -> str:
    decoded: str = tokenizer().decode(ids, skip_special_tokens=True)
    return decoded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_seeded_chat_is_the_offline_answer(client: openai.OpenAI, offline: Engine, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=24, temperature=temperature, top_p=0.9, seed=11, n=2
    )
    prompt = encode_chat(tokenizer(), [Message(role="user", content="How many clips?")])
    for place, choice in enumerate(answer.choices):
        ids = offline_tokens(offline, prompt, max_tokens=24, temperature=temperature, top_p=0.9, seed=11 + place)
        assert choice.message.content == text(ids)
        assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.eyas["target_passes"] <= 48  # type: ignore[attr-defined]
    assert answer._request_id


def test_a_stream_is_the_same_text(client: openai.OpenAI, offline: Engine) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=24,
        temperature=0.7,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    prompt = encode_chat(tokenizer(), [Message(role="user", content="How many clips?")])
    ids = offline_tokens(offline, prompt, max_tokens=24, temperature=0.7, seed=5)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text(ids)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)


def test_the_stream_helper_puts_the_same_answer_together(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    whole = client.chat.completions.create(**asked).choices[0]
    assert streamed.message.content == whole.message.content
    assert streamed.logprobs is not None
    assert whole.logprobs is not None
    assert len(whole.logprobs.content or ()) == 12
    assert [t.token for t in streamed.logprobs.content or ()] == [t.token for t in whole.logprobs.content or ()]


def test_completions_take_texts_and_tokens(client: openai.OpenAI, offline: Engine) -> None:
    prompts = ["def add(a, b):", "Natalia"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0, n=2, echo=True)
    expected = [text(offline_tokens(offline, encode_text(tokenizer(), p), max_tokens=8)) for p in prompts]
    assert [choice.text for choice in answer.choices] == [
        prompt + said for prompt, said in zip(prompts, expected, strict=True) for _ in range(2)
    ]
    ids = [list(encode_text(tokenizer(), prompt)) for prompt in prompts]
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0)
    assert [choice.text for choice in by_ids.choices] == expected
    streamed = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[0]


def test_logprobs_are_the_target_s(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or ()) == 6
    for entry in chat.choices[0].logprobs.content or ():
        assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob <= 0
    plain = client.completions.create(model="tiny", prompt="Natalia", max_tokens=6, temperature=0, logprobs=2)
    found = plain.choices[0].logprobs
    assert found is not None
    assert len(found.tokens or ()) == len(found.token_logprobs or ()) > 0
    for token, offset in zip(found.tokens or (), found.text_offset or (), strict=True):
        assert "\ufffd" in token or plain.choices[0].text[offset:].lstrip("\ufffd").startswith(token)
    assert sorted(found.text_offset or ()) == found.text_offset


def test_json_of_a_shape(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    blank = {str(token): -100 for token in range(len(tokenizer())) if not tokenizer().decode([token]).strip()}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=100,
            temperature=0.5,
            seed=seed,
            logit_bias=blank,  # a random model would write little else
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        )
        value = json.loads(answer.choices[0].message.content or "")
        assert set(value) == {"n", "ok"}
        assert answer.choices[0].finish_reason == "stop"


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="context holds"):
        client.completions.create(model="tiny", prompt="a " * 500)
    seen: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(model="tiny", messages=seen)


def test_models_can_be_listed_and_asked_for(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_closing_a_stream_cancels_the_request_at_once(client: openai.OpenAI, server: Live) -> None:
    before = server.engine.state().finished_total.get("cancelled", 0)
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=200, stream=True, extra_body={"ignore_eos": True}, n=2
    )
    next(iter(stream))
    stream.close()
    assert server.idle_soon()
    assert server.engine.state().finished_total["cancelled"] - before == 2
    server.engine.check_invariants()


def test_many_at_once_are_each_the_offline_answer(server: Live, offline: Engine) -> None:
    """Under load, some cancelled: seeded equality holds."""

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=f"clips {seed % 5}", max_tokens=10 + seed % 7, temperature=0.9, seed=seed
        )
        return answer.choices[0].text

    async def leave(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="clips", max_tokens=150, temperature=0.9, seed=seed, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        return ""

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*((leave if seed % 3 == 0 else ask)(client, seed) for seed in range(24)))

    for seed, got in enumerate(run(work())):
        if seed % 3:
            prompt = encode_text(tokenizer(), f"clips {seed % 5}")
            ids = offline_tokens(offline, prompt, max_tokens=10 + seed % 7, temperature=0.9, seed=seed)
            assert got == text(ids)
    assert server.idle_soon()
    server.engine.check_invariants()


def test_what_begins_alike_is_read_once(client: openai.OpenAI) -> None:
    prompt = list(range(20, 120))
    seen = []
    for more in (5, 6):
        usage = client.completions.create(model="tiny", prompt=[*prompt, more], max_tokens=2, n=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        seen.append(usage.prompt_tokens_details.cached_tokens)
    assert seen[0] == 0
    assert 50 < (seen[1] or 0) <= 100


def test_tokens_there_and_back(server: Live) -> None:
    with httpx.Client(base_url=server.url) as client:
        told = client.post("/tokenize", json={"model": "tiny", "prompt": "Natalia sold", "return_token_strs": True})
        ids = told.json()["tokens"]
        assert ids == list(encode_text(tokenizer(), "Natalia sold"))
        assert told.json()["count"] == len(ids) == len(told.json()["token_strs"])
        chat = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        assert chat == list(encode_chat(tokenizer(), [Message(role="user", content="How many clips?")]))
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Natalia sold"
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/version").json()["version"]
        assert "eyas:request_success_total" in client.get("/metrics").text


def test_a_request_keeps_its_id(server: Live) -> None:
    with httpx.Client(base_url=server.url) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        named = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-7"})
        assert named.headers["x-request-id"] == "mine-7"
        assert named.json()["id"] == "cmpl-mine-7"
        hostile = client.get("/nothing", headers={"X-Request-Id": "a b\tc"})
        assert hostile.headers["x-request-id"] != "a b\tc"
