"""llama-server's own routes as editors call them, and `suffix` of completions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from eyas.serve.api.llama import LineLimits, selected

from ...data.templates import templated
from ...text.test_fill import QWEN, knowing
from ..conftest import client_of, post, run
from ..fakes import FakeEngine

TEXT = "return a + b\n"
HELLO = [{"role": "user", "content": "How many?"}]


def engine(text: str = TEXT, **settings: Any) -> FakeEngine:
    return FakeEngine(text, chars=knowing(*QWEN), context=4096, **settings)


def ask(fake: FakeEngine, path: str, **body: Any) -> httpx.Response:
    answer: httpx.Response = run(post(fake, path, body))
    return answer


def prompt_of(fake: FakeEngine) -> str:
    return str(fake.tokenizer.decode(fake.requests[0].prompt, skip_special_tokens=False))


LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n",
    "input_extra": [{"text": "x = 1", "time": 1.0, "filename": "other.py"}],
    "prompt": "    ",
    "n_predict": 8,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached", "none/x"],
}


def test_llama_vim_gets_what_it_asks_for() -> None:
    fake = engine()
    answer = ask(fake, "/infill", **LLAMA_VIM)
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    assert set(fields) == {"content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"}
    assert TEXT.startswith(fields["content"])
    assert prompt_of(fake) == (
        "\n\n--- snippet ---\n\nx = 1<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>"
    )
    params = fake.requests[0].params
    assert (params.temperature, params.max_tokens) == (0.0, 8)


def test_its_warm_up_only_reads() -> None:
    fake = engine()
    answer = ask(fake, "/infill", **{**LLAMA_VIM, "n_predict": 0, "samplers": [], "response_fields": [""]})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {}
    assert fake.requests[0].params.max_tokens == 0


def test_llama_vscode_finds_a_server_and_gets_the_fields_of_its_status_bar() -> None:
    async def asked(fake: FakeEngine) -> list[httpx.Response]:
        body = {name: value for name, value in LLAMA_VIM.items() if name != "response_fields"}
        async with client_of(fake) as client:
            read = [await client.get(path) for path in ("/health", "/props", "/v1/models")]
            tokens = await client.post("/tokenize", json={"content": "def add"})
            first = await client.post("/infill", json={**body, "n_predict": 0, "samplers": []})
            return [*read, tokens, first, await client.post("/infill", json={**body, "top_p": 0.99, "lora": []})]

    answers = run(asked(engine()))
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert answers[3].json()["tokens"]
    fields = answers[5].json()
    assert TEXT.startswith(fields["content"])
    assert fields["generation_settings"]["n_ctx"] == 4096
    assert fields["tokens_cached"] >= fields["tokens_evaluated"]


def test_a_completion_has_llama_server_s_fields() -> None:
    fake = engine()
    fields = ask(fake, "/completion", prompt="def add", n_predict=64, stop=["+"], return_tokens=True, n_probs=1).json()
    assert fields["content"] == "return a "
    assert (fields["stop"], fields["stop_type"], fields["stopping_word"]) == (True, "word", "+")
    assert fields["tokens_evaluated"] == len(fake.requests[0].prompt)
    assert len(fields["tokens"]) == fields["tokens_predicted"] == len(fields["completion_probabilities"])
    assert fields["timings"]["predicted_n"] == fields["tokens_predicted"]
    assert fields["generation_settings"]["temperature"] == pytest.approx(0.8)
    assert {"cache_n", "prompt_ms", "predicted_per_second"} <= fields["timings"].keys()


def test_a_stream_ends_with_the_event_that_says_so() -> None:
    lines = ask(engine(), "/completion", prompt=["def", 7, " add"], n_predict=64, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == TEXT
    assert events[-1]["content"] == ""
    assert "timings" in events[-1]


@pytest.mark.parametrize(
    ("samplers", "expected"),
    [
        (None, (0.8, 40, 0.95)),
        (["temperature"], (0.8, 0, 1.0)),
        (["top_k", "unheard_of"], (1.0, 40, 1.0)),
        (["infill"], (0.0, 0, 1.0)),
    ],
)
def test_samplers_that_are_not_named_are_off(samplers: list[str] | None, expected: tuple[float, int, float]) -> None:
    fake = engine()
    assert ask(fake, "/completion", prompt="a", n_predict=4, samplers=samplers).status_code == 200
    params = fake.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == expected


def test_lines_that_are_indented_too_little_end_an_answer() -> None:
    fake = engine("x = 1\n    y = 2\nz = 3\n", stride=3)
    fields = ask(fake, "/infill", input_prefix="a", input_suffix="b", n_predict=64, n_indent=4).json()
    assert fields["content"] == "x = 1\n    y = 2\n"
    assert (fields["stop_type"], fields["has_new_line"]) == ("limit", True)


def test_line_limits_hold_however_the_text_is_split() -> None:
    text = "a\n\n  \tb\n c\nd"
    for size in range(1, len(text)):
        limits = LineLimits(3, 0)
        got = ""
        for start in range(0, len(text), size):
            if not limits.ended:
                got += limits.cut(text[start : start + size])
        assert got.rstrip(" ") == "a\n\n  \tb\n"


def test_paths_are_kept_as_names() -> None:
    assert selected({"a": {"b": 1}, "c": 2}, ["a/b", "c", "a/x", "d"]) == {"a/b": 1, "c": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/infill", {"input_prefix": "a"}, 400, "input_suffix is missing"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, 400, "text is missing"),
        ("/completion", {"prompt": "a", "grammer": "x"}, 400, "unknown field grammer"),
        ("/completion", {"prompt": "a", "grammar": "x"}, 400, "grammar is not supported here"),
        ("/completion", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/completion", {"prompt": [1, 10**8]}, 400, "vocabulary"),
        ("/completion", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], status: int, says: str) -> None:
    answer = ask(engine(), path, **body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_model_without_marks_says_so() -> None:
    for path, body in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}),
    ):
        answer = ask(FakeEngine(), path, **body)
        assert answer.status_code == 400
        assert "no tokens that mark" in answer.json()["error"]["message"]


def test_completions_fill_the_gap_before_a_suffix() -> None:
    fake = engine()
    answer = ask(fake, "/v1/completions", model="tiny", prompt=["P", "Q"], suffix="S", max_tokens=64)
    assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT, TEXT]
    assert prompt_of(fake) == "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"
    for none in ("", None, False):
        plain = engine()
        assert ask(plain, "/v1/completions", model="tiny", prompt="P", suffix=none).status_code == 200
        assert prompt_of(plain) == "P"
    refused = ask(engine(), "/v1/completions", model="tiny", prompt="P", suffix="S", echo=True)
    assert "echo repeats" in refused.json()["error"]["message"]


def test_a_chat_is_written_as_the_template_writes_it_tools_included() -> None:
    chars = templated("qwen2")
    fake = FakeEngine([chars.eos_token_id], chars=chars, context=4096)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    bare = ask(fake, "/apply-template", messages=HELLO).json()["prompt"]
    assert bare == chars.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert "look_up" in ask(fake, "/apply-template", messages=HELLO, tools=tools).json()["prompt"]
    assert ask(fake, "/apply-template", messages=HELLO, model="other").status_code == 404
    assert not fake.requests, "nothing is generated"


def test_the_server_describes_itself_and_tokenizes() -> None:
    async def talk() -> list[httpx.Response]:
        async with client_of(engine()) as client:
            return [
                await client.get("/props"),
                await client.get("/slots"),
                await client.post("/tokenize", json={"content": "def add", "add_special": False}),
                await client.post("/detokenize", json={"tokens": [5, 6]}),
            ]

    props, slots, tokens, text = run(talk())
    assert props.json()["default_generation_settings"]["n_ctx"] == 4096
    assert slots.status_code == 404
    assert "no slots of their own" in slots.json()["error"]["message"]
    assert tokens.json()["tokens"] == knowing(*QWEN)("def add", add_special_tokens=False)["input_ids"]
    assert text.json()["content"] == text.json()["prompt"]


@pytest.mark.parametrize("path", ["/completion", "/infill"])
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n", 2, "one answer is written"),
        ("echo", True, "only the answer is written"),
        ("logprobs", 0, "send n_probs"),
        ("prompt_logprobs", 1, "only the answer has log-probabilities"),
        ("return_token_ids", True, "send return_tokens"),
        ("eyas", {"trace": True}, "eyas.trace is only served by chat and text completions"),
    ],
)
def test_fields_that_its_response_has_no_place_for_are_refused(path: str, field: str, value: Any, said: str) -> None:
    prompt = {"prompt": "a"} if path == "/completion" else {"input_prefix": "a", "input_suffix": "b"}
    answer = ask(engine(), path, **prompt, **{field: value})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert ask(engine(), path, **prompt, n=1, echo=False, eyas={}).status_code == 200
