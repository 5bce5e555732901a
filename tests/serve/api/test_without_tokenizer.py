"""A model without tokenizer files is served: ids in and out work, and text is refused with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.serve.schema.chat import CompletionChunk, CompletionResponse
from eyas.session import load

from ... import tiny
from ..conftest import post, run

PROMPTS = tiny.prompts(9, 5)
MESSAGES = [{"role": "user", "content": "x"}]
TEXT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": PROMPTS[0], "echo": True}),
    ("/v1/completions", {"prompt": PROMPTS[0], "logprobs": 1}),
    ("/v1/completions", {"prompt": PROMPTS[0], "stop": "a"}),
    ("/v1/completions", {"prompt": PROMPTS[0], "eyas": {"trace": True}}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}),
    ("/tokenize", {"prompt": "x"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.build_model("llama").save_pretrained(path)
    return path


def test_ids_are_completed_with_ids(model: Path) -> None:
    expected = [tiny.continuation(tiny.build_model("llama"), prompt, 8) for prompt in PROMPTS]
    body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 8, "temperature": 0}
    engine = load(model, dtype="float32", device="cpu", batch_size=2)
    whole = run(post(engine, "/v1/completions", body)).json()
    lines = list(filter(None, run(post(engine, "/v1/completions", body | {"stream": True})).text.splitlines()))
    CompletionResponse.model_validate(whole)
    assert [(choice["token_ids"], choice["text"]) for choice in whole["choices"]] == [(ids, "") for ids in expected]
    assert whole["usage"]["completion_tokens"] == 16
    streamed: list[list[int]] = [[], []]
    for line in lines[:-1]:
        (choice,) = CompletionChunk.model_validate_json(line.removeprefix("data: ")).choices
        streamed[choice.index] += choice.token_ids or []
    assert lines[-1] == "data: [DONE]"
    assert streamed == expected


@pytest.mark.parametrize(("path", "body"), TEXT, ids=lambda part: part if isinstance(part, str) else ",".join(part))
def test_text_is_refused_with_what_is_missing(model: Path, path: str, body: dict[str, Any]) -> None:
    answer = run(post(load(model, dtype="float32", device="cpu"), path, {"model": "tiny", **body}))
    assert answer.status_code == 400
    message = json.loads(answer.text)["error"]["message"]
    assert "has no tokenizer files (tokenizer.json, tokenizer_config.json)" in message
