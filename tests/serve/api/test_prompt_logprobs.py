"""Log-probabilities of prompts over HTTP: `echo` with `logprobs` as evaluation harnesses send it, `prompt_logprobs`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.serve.schema.chat import ChatCompletionResponse, CompletionChunk, CompletionResponse
from eyas.text.template import encode_text

from ...pairs import Pair, tokenizer
from ..conftest import Ask, run
from ..conftest import post as post_to
from ..fakes import FakeEngine
from ..live import Live

COMPLETIONS = "/v1/completions"
TEXTS = ["def add(a, b):\n    return a + b", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.", "a"]


def post(server: Live, path: str = COMPLETIONS, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def log_softmax(pair: Pair) -> Any:
    """`transformers`' own pass over some ids: log-probabilities [positions][vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(pair.model)

    def forward(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return scores

    return forward


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize("most", [0, 1])
def test_a_harness_s_request_gets_the_model_s_own_log_probabilities(
    server: Live, log_softmax: Any, as_ids: bool, most: int
) -> None:
    """What lm-eval sends and reads, twice: the prefix cache must not shorten the second answer."""
    prompts = [list(encode_text(tokenizer(), each)) for each in TEXTS]
    for _ in range(2):
        asked: Any = {"prompt": prompts if as_ids else TEXTS, "max_tokens": most, "temperature": 0, "seed": 1234}
        answer = post(server, **asked, logprobs=1, echo=True)
        CompletionResponse.model_validate(answer)
        assert answer["usage"]["completion_tokens"] == most * len(prompts)
        for choice, text, prompt in zip(answer["choices"], TEXTS, prompts, strict=True):
            found = choice["logprobs"]
            assert len({len(values) for values in found.values()}) == 1
            assert choice["text"].startswith(text)
            assert choice["finish_reason"] in ("length", "stop")
            given = found["token_logprobs"]
            assert len(given) == len(prompt) + most
            assert given[0] is found["top_logprobs"][0] is None
            raw = log_softmax(prompt)
            for i, token in enumerate(prompt[1:], start=1):
                assert given[i] == pytest.approx(float(raw[i - 1, token]), abs=1e-4)
                (best,) = found["top_logprobs"][i].values()
                assert best == pytest.approx(float(raw[i - 1].max()), abs=1e-4)
                greedy = int(raw[i - 1].argmax()) == token
                assert (given[i] == best) == greedy  # exactly: this is how a harness finds out


def test_the_tokens_lie_where_the_offsets_say(server: Live) -> None:
    for prompt in (TEXTS[1], list(encode_text(tokenizer(), TEXTS[1]))):
        choice = post(server, prompt=prompt, max_tokens=6, temperature=0, logprobs=0, echo=True)["choices"][0]
        found = choice["logprobs"]
        assert sorted(found["text_offset"]) == found["text_offset"]
        for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
            assert "\ufffd" in token or choice["text"][offset:].lstrip("\ufffd").startswith(token)


def test_streamed_echoes_are_the_same(server: Live) -> None:
    asked: Any = {"prompt": TEXTS[:2], "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    whole = post(server, **asked)["choices"]
    streamed = httpx.post(server.url + COMPLETIONS, json={"model": "tiny", **asked, "stream": True}, timeout=60).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
    for index, expected in enumerate(whole):
        choices = [CompletionChunk.model_validate(chunk).choices[0] for chunk in chunks]
        choices = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == expected["text"]
        for name in expected["logprobs"]:
            parts = [getattr(choice.logprobs, name) for choice in choices if choice.logprobs is not None]
            assert [each for part in parts for each in part] == expected["logprobs"][name]


def test_the_end_token_counts_among_the_log_probabilities() -> None:
    """A harness drops the last entry, which has to be the generated one, text or none."""
    end = tokenizer().eos_token_id
    engine = FakeEngine([end])
    engine.ending = "stop"
    answer = run(
        post_to(engine, COMPLETIONS, {"model": "tiny", "prompt": "a b", "max_tokens": 1, "logprobs": 1, "echo": True})
    ).json()
    choice = answer["choices"][0]
    assert choice["text"] == "a b"
    assert len(choice["logprobs"]["tokens"]) == len(encode_text(tokenizer(), "a b")) + 1


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_prompt_logprobs_have_vllm_s_form(server: Live, log_softmax: Any, path: str) -> None:
    asked: Any = {"prompt": TEXTS[0]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXTS[0]}]}
    answer = post(server, path, **asked, prompt_logprobs=2, max_tokens=1)
    if path == COMPLETIONS:
        CompletionResponse.model_validate(answer)
        prompt = list(encode_text(tokenizer(), TEXTS[0]))
        entries = answer["choices"][0]["prompt_logprobs"]
    else:
        ChatCompletionResponse.model_validate(answer)
        body = {"model": "tiny", **asked}
        prompt = httpx.post(server.url + "/tokenize", json=body, timeout=60).json()["tokens"]
        entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    raw = log_softmax(prompt)
    for i, entry in enumerate(entries[1:], start=1):
        best = raw[i - 1].topk(2).indices.tolist()
        assert set(entry) == {str(token) for token in (prompt[i], *best)}
        for token, fields in entry.items():
            assert fields["logprob"] == pytest.approx(float(raw[i - 1, int(token)]), abs=1e-4)
            assert fields["rank"] == 1 + int((raw[i - 1] > raw[i - 1, int(token)]).sum())
            assert isinstance(fields["decoded_token"], str)


def test_what_can_t_be_is_refused(ask: Ask) -> None:
    for wrong, why in (
        ({"max_tokens": 0}, "generates nothing"),
        ({"prompt_logprobs": 1, "stream": True}, "can't be streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ):
        answer = ask(COMPLETIONS, prompt="a", **wrong)
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
    assert ask("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=0).status_code == 400


def test_without_logprobs_nothing_is_scored(ask: Ask, engine: FakeEngine) -> None:
    answer = ask(COMPLETIONS, prompt="a b", max_tokens=0, echo=True).json()
    assert engine.requests[0].params.prompt_logprobs is None
    assert engine.requests[0].params.max_tokens == 0
    assert answer["choices"][0]["text"] == "a b"
    assert answer["choices"][0]["logprobs"] is None
