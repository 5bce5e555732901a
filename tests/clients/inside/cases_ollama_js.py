"""ollama of npm: chats, streams, tools, formats and models, by scripts that Node.js runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from common import MESSAGES, MODEL, NAMES, QUESTION, SCHEMA, TOOL, URL, chat, fits

OPTIONS = {"temperature": 0, "num_predict": 24}
SCRIPT = """
const { Ollama } = require('ollama');
const [method, host, request] = process.argv.slice(1);
(async () => {
  const client = new Ollama({ host });
  const body = JSON.parse(request);
  const answer = await client[method](body);
  const parts = [];
  if (body.stream) for await (const part of answer) parts.push(part); else parts.push(answer);
  console.log(JSON.stringify(parts));
})().catch((error) => console.log(JSON.stringify([{ error: error.message, status: error.status_code }])));
"""


def call(method: str, **body: Any) -> list[Any]:
    """The answer of a method of the client: its parts if it is streamed, else one."""
    node = os.path.join(sys.prefix, "bin", "node")
    environment = {**os.environ, "NODE_PATH": os.path.join(sys.prefix, "node_modules")}
    command = [node, "-e", SCRIPT, method, URL, json.dumps(body)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    parts: list[Any] = json.loads(done.stdout)
    return parts


@pytest.mark.parametrize("stream", [False, True])
def test_chat(stream: bool) -> None:
    parts = call("chat", model=MODEL, messages=MESSAGES, options=OPTIONS, stream=stream)
    assert "".join(part["message"]["content"] for part in parts) == chat(24)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["eval_count"] <= 24
    assert (len(parts) > 1) == stream


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_shown_and_results_are_read(stream: bool) -> None:
    """Ollama's API can't require a call: whether there is one is the model's choice."""
    called = {"function": {"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}}
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sun."}
    for messages in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [called]}, result]):
        parts = call("chat", model=MODEL, messages=messages, tools=[TOOL], options=OPTIONS, stream=stream)
        assert parts[-1]["done"]
        assert any(part["message"]["content"] or part["message"].get("tool_calls") for part in parts)


def test_format() -> None:
    long = {**OPTIONS, "num_predict": 400}
    (answer,) = call("chat", model=MODEL, messages=MESSAGES, format=SCHEMA, options=long)
    assert fits(json.loads(answer["message"]["content"]))


@pytest.mark.parametrize("stream", [False, True])
def test_generate(stream: bool) -> None:
    parts = call("generate", model=MODEL, prompt=QUESTION, options=OPTIONS, stream=stream)
    assert "".join(part["response"] for part in parts) == chat(24)


def test_models() -> None:
    for method in ("list", "ps"):
        (found,) = call(method)
        assert [model["name"] for model in found["models"]] == NAMES
    (shown,) = call("show", model=MODEL)
    assert {"completion", "tools"} <= set(shown["capabilities"])


def test_errors() -> None:
    (unknown,) = call("chat", model="other", messages=MESSAGES)
    assert unknown["status"] == 404
    (refused,) = call("pull", model="other")
    assert refused["error"]
