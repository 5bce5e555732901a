"""Fields and routes that vLLM's clients use beyond OpenAI's: what they mean, and that none is ignored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from eyas.serve.api.generation import speculation_of
from eyas.serve.schema.chat import ChatCompletionChunk, ChatCompletionResponse, CompletionResponse
from eyas.session import load
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text
from eyas.types import Request, SamplingParams, Stats

from ...data.templates import templated
from ...pairs import Pair, tokenizer
from ..conftest import Ask, client_of, run
from ..conftest import post as post_to
from ..fakes import FakeEngine, ids
from ..live import Live
from .test_chat import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "How many?"}]
TEXT = "Natalia sold 48/2 clips in May."


def ask_of(engine: FakeEngine, path: str = CHAT, **body: Any) -> Any:
    sent = {"model": "tiny", **({"messages": HELLO} if path == CHAT else {"prompt": "a"}), **body}
    answer: httpx.Response = run(post_to(engine, path, sent))
    assert answer.status_code == 200, answer.text
    return answer if body.get("stream") else answer.json()


def prompt_of(messages: list[Any], **body: Any) -> str:
    """What the model is given, as text, with Qwen's template."""
    chars = templated("qwen2")
    engine = FakeEngine([chars.eos_token_id], chars=chars, context=4096)
    ask_of(engine, messages=messages, **body)
    text: str = chars.decode(engine.requests[0].prompt)
    return text


BEGUN = [*HELLO, {"role": "assistant", "content": "About seven"}]


def test_the_last_message_is_continued() -> None:
    begun = prompt_of(BEGUN, continue_final_message=True, add_generation_prompt=False)
    assert begun.endswith("About seven")
    assert prompt_of(BEGUN, add_generation_prompt=False).endswith("About seven<|im_end|>\n")
    assert prompt_of(BEGUN).endswith("<|im_start|>assistant\n")
    assert prompt_of(BEGUN, add_generation_prompt=True) == prompt_of(BEGUN)


def test_tokenize_continues_it_too(ask: Ask) -> None:
    body: dict[str, Any] = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
    turns = [Message(**turn) for turn in BEGUN]
    expected = encode_chat(tokenizer(), turns, add_generation_prompt=False, continue_final_message=True)
    assert ask("/tokenize", **body).json()["tokens"] == list(expected)
    assert list(expected) == list(encode_chat(tokenizer(), turns, add_generation_prompt=False))[: len(expected)]


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, {"messages": BEGUN, "continue_final_message": True}, "needs add_generation_prompt: false"),
        ("/tokenize", {"messages": BEGUN, "continue_final_message": True}, "needs add_generation_prompt: false"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "need messages"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "aren't ranked"),
        (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "less than n"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "prefix": True}]}, "only allowed in assistant messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "only an assistant reasons"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}]},
            "mean the same",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(ask: Ask, path: str, body: dict[str, Any], why: str) -> None:
    answer = ask(path, **body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_best_of_one_is_what_there_is(ask: Ask) -> None:
    assert ask(COMPLETIONS, prompt="a", best_of=1).status_code == 200


def test_what_an_answer_carried_may_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "Seven.", "refusal": None}
    plain = prompt_of([*HELLO, answer, *HELLO])
    for unseen in ({"annotations": [{"type": "url_citation"}]}, {"provider_specific_fields": {"refusal": None}}):
        assert prompt_of([*HELLO, {**answer, **unseen}, *HELLO]) == plain
    thought = {"reasoning": "6 + 1"}
    as_reasoning = prompt_of([*HELLO, {**answer, **thought}, *HELLO])
    assert as_reasoning == prompt_of([*HELLO, {**answer, "reasoning_content": "6 + 1"}, *HELLO])


def test_token_ids_of_a_chat() -> None:
    engine = FakeEngine(TEXT)
    answer = ask_of(engine, return_token_ids=True, n=2)
    ChatCompletionResponse.model_validate(answer)
    assert answer["prompt_token_ids"] == list(engine.requests[0].prompt)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids(TEXT)] * 2
    chunks = events(ask_of(engine, return_token_ids=True, stream=True))
    assert ChatCompletionChunk.model_validate(chunks[0]).prompt_token_ids == list(engine.requests[0].prompt)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == ids(TEXT)
    assert "token_ids" not in str(ask_of(engine))


def test_token_ids_of_completions() -> None:
    engine = FakeEngine(TEXT)
    prompts = ["a b", "c"]
    answer = ask_of(engine, COMPLETIONS, return_token_ids=True, prompt=prompts, max_tokens=50)
    CompletionResponse.model_validate(answer)
    tokens = [list(encode_text(tokenizer(), prompt)) for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == tokens
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids(TEXT)] * 2
    streamed = ask_of(engine, COMPLETIONS, return_token_ids=True, prompt=prompts, max_tokens=50, stream=True).text
    assert streamed.count('"prompt_token_ids"') == 2
    assert "token_ids" not in str(ask_of(engine, COMPLETIONS))


def test_a_stop_string_ends_the_ids_it_came_with() -> None:
    """The tokens are those that were generated, also those whose text was cut off."""
    answer = ask_of(FakeEngine(TEXT, stride=1), return_token_ids=True, stop="clips")
    assert tokenizer().decode(answer["choices"][0]["token_ids"]) == "Natalia sold 48/2 clips"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("stride", [1, 3, 50])
def test_what_stops_an_answer_is_part_of_it_if_wanted(stride: int) -> None:
    def content(text: str | list[int] = TEXT, **body: Any) -> str:
        engine = FakeEngine(text, stride=stride)
        engine.ending = "stop"
        answer: str = ask_of(engine, **body)["choices"][0]["message"]["content"]
        return answer

    assert content(stop="cli") == "Natalia sold 48/2 "
    assert content(stop="cli", include_stop_str_in_output=True) == "Natalia sold 48/2 cli"
    end = tokenizer().eos_token_id
    last = ids(TEXT)[-1]
    mark = tokenizer().decode([end])
    shown = tokenizer().decode([last])
    assert content(stop_token_ids=[last]) == TEXT.removesuffix(shown)
    assert content(stop_token_ids=[last], include_stop_str_in_output=True) == TEXT
    ended: list[int] = [*ids(TEXT), end]
    assert content(ended) == content(ended, include_stop_str_in_output=True) == TEXT
    assert content(ended, skip_special_tokens=False) == TEXT
    assert content(ended, skip_special_tokens=False, include_stop_str_in_output=True) == TEXT + mark
    between = [*ids("a"), end, *ids("b")]
    assert content(between) == "ab"
    assert content(between, skip_special_tokens=True) == "ab"
    assert content(between, skip_special_tokens=False) == f"a{mark}b"


def test_probes_and_load_need_no_key() -> None:
    engine = FakeEngine(TEXT)
    engine.go.clear()

    async def probe() -> None:
        async with client_of(engine, api_keys=("secret",)) as client:
            for path in ("/health", "/ping"):
                whole, head = await client.get(path), await client.head(path)
                assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
            assert (await client.get("/load")).json() == {"server_load": 0}
            headers = {"Authorization": "Bearer secret"}
            body = {"model": "tiny", "prompt": "a", "n": 3}
            waiting = asyncio.ensure_future(client.post(COMPLETIONS, json=body, headers=headers))
            while (await client.get("/load")).json() != {"server_load": 3}:
                await asyncio.sleep(0.01)
            engine.go.set()
            assert (await waiting).status_code == 200
            assert (await client.get("/load")).json() == {"server_load": 0}
            client.thread.drain()  # type: ignore[attr-defined]
            assert [(await client.head(path)).status_code for path in ("/health", "/ping")] == [503, 503]

    run(probe())


def test_bad_words_are_tokenized_as_vllm_does(ask: Ask, engine: FakeEngine) -> None:
    assert ask(CHAT, messages=HELLO, bad_words=["clips", " May", "48/2 ="]).status_code == 200
    expected = []
    for word in ("clips", "May", "48/2 ="):
        first = ids(word)
        spaced = ids(" " + word)
        expected.append(tuple(first))
        if len(spaced) == len(first) and spaced[0] != first[0]:
            expected.append(tuple(spaced))
    assert engine.requests[0].params.bad_words_ids == tuple(expected)
    assert ask(COMPLETIONS, prompt="a", bad_words=["clips"]).status_code == 200
    assert engine.requests[1].params.bad_words_ids == tuple(expected[:1])
    refused = ask(COMPLETIONS, prompt="a", bad_words=[" "])
    assert refused.status_code == 400
    assert "no tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bad_words_stay_out_with_and_without_speculation(server: Live, temperature: float) -> None:
    def answer(**body: Any) -> Any:
        sent = {"model": "tiny", "prompt": "Natalia", "max_tokens": 20, "temperature": temperature, "seed": 5, **body}
        found = httpx.post(server.url + COMPLETIONS, json={**sent, "return_token_ids": True}, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["token_ids"]

    free = answer()
    texts = [tokenizer().decode([token]) for token in free]
    words = [text for text in texts if text.strip() and "\ufffd" not in text and len(ids(text)) == 1][:3]
    assert words
    held = answer(bad_words=words)
    assert held == answer(bad_words=words, eyas={"speculate": False})
    banned = {token for word in words for token in ids(word.lstrip())}
    assert not banned & set(held)
    assert banned & set(free)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_metrics_of_speculation_are_written_where_they_are_asked_for(path: str, stream: bool) -> None:
    """As vLLM's #48915: of one choice alone, in the chunk with the usage if it is streamed."""
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    body = {"model": "tiny", **prompt, "stream": stream, "max_tokens": 4}
    body |= {"stream_options": {"include_usage": True}} if stream else {}

    def last(level: str, n: int = 1) -> dict[str, Any]:
        answer = run(
            post_to(FakeEngine(ids("abcd"), stride=4), path, body | {"n": n}, per_request_spec_decode_metrics=level)
        )
        assert answer.status_code == 200, answer.text
        text = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
        found: dict[str, Any] = json.loads(text)
        return found

    assert "metrics" not in last("none")
    assert "metrics" not in last("summary", n=2)
    assert last("summary")["metrics"] == {
        "speculative_decoding": {  # the fake's only round accepts three of four
            "mean_acceptance_length": 4.0, "draft_acceptance_rate": 0.75, "acceptance_histogram": [0, 0, 0, 1, 0],
            "num_spec_steps": 1, "num_accepted_draft_tokens": 3, "num_draft_tokens": 4, "num_spec_tokens": 4,
        }
    }  # fmt: skip
    found = last("detailed")["metrics"]["speculative_decoding"]
    assert found.pop("per_step_accepted") == [3]
    assert found.pop("per_step_drafted") == [4]
    assert found == last("summary")["metrics"]["speculative_decoding"]


def test_every_step_is_counted_by_the_engine(pair: Pair) -> None:
    engine = load(pair.model, pair.drafter, tree="dynamic:3,3,8")
    *_, last = engine.stream([Request((5, 6, 7), SamplingParams(max_tokens=30))])
    assert last.completion is not None
    stats = last.completion.stats
    found = speculation_of(stats, detailed=True)
    assert len(stats.steps) == found["num_spec_steps"] > 0
    assert sum(offered for offered, _ in stats.steps) == found["num_draft_tokens"]
    assert sum(accepted for _, accepted in stats.steps) == found["num_accepted_draft_tokens"]


def test_rounds_without_drafts_are_no_steps() -> None:
    stats = Stats()
    for accepted, offered in ((0, 0), (2, 3), (0, 3), (0, 0)):
        stats.record(accepted, offered, 10)
    assert speculation_of(stats)["acceptance_histogram"] == [1, 0, 1, 0]
    assert speculation_of(stats)["mean_acceptance_length"] == 2.0
    assert speculation_of(Stats())["acceptance_histogram"] == [0]
