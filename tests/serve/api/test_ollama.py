"""Ollama's routes as its clients call them, and LM Studio's list of models."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import httpx
import pytest

from eyas.serve.app import ENDPOINTS
from eyas.serve.playground.page import Gauges

from ...text.test_fill import QWEN, knowing
from ..conftest import client_of, post, run
from ..fakes import FakeEngine
from ..live import Live, live

HELLO = [{"role": "user", "content": "How many clips?"}]
TEXT = "Natalia sold 48/2 clips in May."


def engine(text: str = TEXT, **settings: Any) -> FakeEngine:
    return FakeEngine(text, chars=knowing(*QWEN), context=4096, **settings)


def ask(fake: FakeEngine, path: str, **body: Any) -> httpx.Response:
    answer: httpx.Response = run(post(fake, path, {"model": "tiny", **body}))
    return answer


def get(*paths: str, fake: FakeEngine | None = None, **settings: Any) -> list[Any]:
    async def talk() -> list[Any]:
        async with client_of(fake or engine(), **settings) as client:
            return [(await client.get(path)).json() for path in paths]

    found: list[Any] = run(talk())
    return found


def lines(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt_of(fake: FakeEngine) -> str:
    return str(fake.tokenizer.decode(fake.requests[0].prompt, skip_special_tokens=False))


def test_a_chat_is_streamed_as_lines_unless_it_is_not_to_be() -> None:
    got = lines(ask(engine(), "/api/chat", messages=HELLO))
    assert [line["done"] for line in got] == [False] * (len(got) - 1) + [True]
    assert "".join(line["message"]["content"] for line in got) == TEXT
    whole = ask(engine(), "/api/chat", messages=HELLO, stream=False, model="tiny:latest").json()
    assert whole["message"] == {"role": "assistant", "content": TEXT}
    assert whole["model"] == "tiny:latest"
    assert got[-1].keys() == whole.keys()
    assert whole["eval_count"] > 0
    assert whole["total_duration"] > whole["load_duration"] == 0
    assert all(isinstance(whole[name], int) for name in whole if name.endswith(("_count", "_duration")))
    assert whole["created_at"].endswith("Z")


def test_defaults_and_options_are_ollama_s() -> None:
    fake = engine()
    ask(fake, "/api/chat", messages=HELLO)
    params = fake.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.8, 40, 0.9, 1.0)
    assert params.max_tokens == 4096 - len(fake.requests[0].prompt)
    fake = engine()
    options = {
        "num_predict": 8.0, "num_ctx": 10**6, "top_k": 5.0, "seed": 3, "stop": ["48"], "min_p": 0.1, "temperature": 0,
        "repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0.5, "num_gpu": 99, "typical_p": 1.0,
        "unheard_of": 1, "top_p": None,
    }  # fmt: skip
    answer = ask(fake, "/api/chat", messages=HELLO, options=options, keep_alive="5m", stream=False)
    assert answer.json()["message"]["content"] == "Natalia sold "
    params = fake.requests[0].params
    assert (params.max_tokens, params.top_k, params.seed, params.min_p) == (8, 5, 3, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.temperature) == (1.1, 0.5, 0.0)


def test_penalties_that_look_at_nothing_are_off() -> None:
    fake = engine()
    options = {"repeat_penalty": 1.1, "frequency_penalty": 1, "repeat_last_n": 0, "num_predict": 10**6}
    assert ask(fake, "/api/chat", messages=HELLO, options=options).status_code == 200
    params = fake.requests[0].params
    assert (params.repetition_penalty, params.frequency_penalty) == (1.0, 0.0)
    assert params.max_tokens == 4096 - len(fake.requests[0].prompt)  # what fits


def test_calls_come_whole_with_an_object() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    expected = {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}
    for history in (HELLO, [*HELLO, said, result]):
        got = lines(ask(engine(f"Well. {call}"), "/api/chat", messages=history, tools=tools))
        calls = [each for line in got for each in line["message"].get("tool_calls", ())]
        assert [each["function"] for each in calls] == [expected]
        assert "".join(line["message"]["content"] for line in got) == "Well."
    whole = ask(engine(call * 2), "/api/chat", messages=HELLO, tools=tools, stream=False).json()
    assert [each["function"]["index"] for each in whole["message"]["tool_calls"]] == [0, 1]
    again = {**whole["message"], "thinking": "hm"}  # as clients send it back
    assert ask(engine(), "/api/chat", messages=[*HELLO, again, result, result], tools=tools).status_code == 200


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_format_is_a_grammar(path: str) -> None:
    asked: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "How many?", "raw": True}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for form, kind in (("json", "json_object"), (schema, "json_schema")):
        fake = engine()
        assert ask(fake, path, format=form, **asked).status_code == 200
        grammar = fake.requests[0].grammar
        assert grammar is not None
        assert grammar.kind == kind
    fake = engine()
    assert ask(fake, path, format="", **asked).status_code == 200
    assert fake.requests[0].grammar is None
    assert "a JSON schema" in ask(engine(), path, format="yaml", **asked).json()["error"]


def test_generate_asks_continues_and_fills_gaps() -> None:
    asked = engine()
    chat = engine()
    answer = ask(asked, "/api/generate", prompt="How many?", system="Be brief.", stream=False).json()
    assert answer["response"] == TEXT
    assert answer["done_reason"] == "length"
    ask(
        chat,
        "/api/chat",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}],
    )
    assert asked.requests[0].prompt == chat.requests[0].prompt
    raw = engine()
    assert "".join(line["response"] for line in lines(ask(raw, "/api/generate", prompt="P", raw=True))) == TEXT
    assert prompt_of(raw) == "P"
    for prefix in ("P", ""):
        fill = engine()
        got = lines(ask(fill, "/api/generate", prompt=prefix, suffix="S", options={"num_predict": 4}))
        assert TEXT.startswith("".join(line["response"] for line in got))
        assert prompt_of(fill) == f"<|fim_prefix|>{prefix}<|fim_suffix|>S<|fim_middle|>"


def test_an_assistant_message_at_the_end_is_continued() -> None:
    fake = engine()
    closed = engine()
    begun = [*HELLO, {"role": "assistant", "content": "There are"}]
    assert ask(fake, "/api/chat", messages=begun).status_code == 200
    assert prompt_of(fake).endswith("There are")
    ask(closed, "/api/chat", messages=HELLO)
    assert not prompt_of(closed).endswith("There are")


def test_log_probabilities_have_openai_s_form() -> None:
    for path, asked in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a", "raw": True})):
        got = lines(ask(engine(), path, logprobs=True, top_logprobs=2, options={"num_predict": 6}, **asked))
        scored = [each for line in got for each in line["logprobs"]]
        assert len(scored) == 6
        assert {"token", "logprob", "top_logprobs"} <= scored[0].keys()
        assert len(scored[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")]
)
def test_nothing_to_answer_loads_or_unloads(keep_alive: Any, reason: str) -> None:
    fake = engine()
    for path in ("/api/chat", "/api/generate"):
        answer = ask(fake, path, keep_alive=keep_alive).json()
        assert (answer["done"], answer["done_reason"]) == (True, reason)
        assert answer.get("response", answer.get("message", {}).get("content")) == ""
    assert not fake.requests


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", {"messages": HELLO, "model": "other"}, 404, "no model 'other'"),
        ("/api/chat", {"messages": HELLO, "model": "tiny:7b"}, 404, "no model 'tiny:7b'"),
        ("/api/chat", {"messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, "messages[0].images: images are not supp"),
        ("/api/chat", {"messages": [{"role": "user", "thinking": "a"}]}, 400, "messages[0]: only an assistant reasons"),
        ("/api/chat", {"messages": HELLO, "tool": []}, 400, "unknown field tool"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": "hot"}}, 400, "temperature: "),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty: "),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "mirostat is not supported here"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template: the model's own"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context: no state"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, 400, "images: images are not supported"),
        ("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, 400, "system has no place"),
        ("/api/show", {"model": None}, 400, "model is missing"),
        ("/api/pull", {}, 404, "/api/pull is not served: the server has one model"),
        ("/api/create", {}, 404, "/api/create is not served"),
        ("/api/embed", {"input": "a"}, 404, "embeddings"),
    ],
)  # fmt: skip
def test_errors_are_a_text(path: str, body: dict[str, Any], status: int, says: str) -> None:
    answer = ask(engine(), path, **body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert says in answer.json()["error"]


def test_a_model_that_fills_no_gaps_says_so() -> None:
    answer = ask(FakeEngine(), "/api/generate", prompt="a", suffix="b")
    assert answer.status_code == 400
    assert "no tokens that mark" in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line() -> None:
    fake = engine()
    fake.ending = "error"
    got = lines(ask(fake, "/api/chat", messages=HELLO))
    assert "it broke" in got[-1]["error"]
    assert ask(fake, "/api/chat", messages=HELLO, stream=False).status_code == 500


def test_the_model_is_listed_and_described() -> None:
    version, tags, running = get("/api/version", "/api/tags", "/api/ps", model_names=("tiny", "other"))
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # the least that VS Code takes
    assert [model["name"] for model in tags["models"]] == ["tiny", "other"]
    model = tags["models"][0]
    details = {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "1.00M",
        "quantization_level": "F32",
    }  # fmt: skip
    assert model["details"] == details
    assert (model["size"], len(model["digest"])) == (4 * 1001000, 64)
    assert running["models"][0].items() > model.items()
    assert running["models"][0]["context_length"] == 4096
    shown = ask(engine(), "/api/show", model="tiny:latest").json()
    assert shown == ask(engine(), "/api/show", model=None, name="tiny").json() | {"modified_at": shown["modified_at"]}
    assert shown["parameters"] == "num_ctx 4096"
    assert shown["template"].startswith("{{ if .Suffix }}<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_m")
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] == 4096
    plain = ask(FakeEngine(), "/api/show").json()
    assert ".Suffix" not in plain["template"]
    assert "insert" not in plain["capabilities"]


def test_lm_studio_s_list_and_chat() -> None:
    (models,) = get("/api/v0/models")
    assert models["data"] == [
        {
            "id": "tiny", "object": "model", "type": "llm", "publisher": "eyas", "arch": "llama", "state": "loaded",
            "compatibility_type": "gguf", "quantization": "F32", "max_context_length": 4096,
            "loaded_context_length": 4096, "capabilities": ["tool_use"],
        }
    ]  # fmt: skip
    answer = ask(engine(), "/api/v0/chat/completions", messages=HELLO).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert ask(engine(), "/api/v0/chat/completions").json()["error"]["param"] == "messages"


def test_clients_see_that_a_server_is_there() -> None:
    with live(engine(), gauges=Gauges(), api_keys=("one",)) as server:
        assert httpx.head(server.url).status_code == 200
        assert httpx.get(f"{server.url}/api/version").status_code == 200
        refused = httpx.get(f"{server.url}/api/tags")
        assert (refused.status_code, refused.json().keys()) == (401, {"error"})
    assert {"/api/chat", "/api/v0/models"} <= ENDPOINTS


def test_its_own_client_talks_to_a_model(server: Live) -> None:
    ollama = pytest.importorskip("ollama")
    with closing(ollama.Client(server.url)) as client:
        _talk(client, ollama.ResponseError)


def _talk(client: Any, error: type[Exception]) -> None:
    options = {"num_predict": 12, "temperature": 0}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "options": options}
    whole = client.chat(**asked)
    streamed = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content for part in streamed) == whole.message.content
    assert streamed[-1].eval_count == whole.eval_count == 12
    text = client.generate("tiny", "Natalia", raw=True, options=options)
    assert text.eval_duration > 0
    assert [model.model for model in client.list().models] == ["tiny"]
    assert client.ps().models[0].size == client.list().models[0].size > 0
    assert client.show("tiny").modelinfo["llama.context_length"] > 0
    with pytest.raises(error, match="one model") as refused:
        client.pull("tiny")
    assert refused.value.status_code == 404  # type: ignore[attr-defined]
