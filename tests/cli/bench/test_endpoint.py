"""`eyas bench --endpoint`: a server beside our own engine, beside another server, alone; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.session import load

from ...bench.serving.fake_server import event, serving, stream
from ...pairs import Pair, write_rows
from ..conftest import Run

FEW = ("--max-new-tokens", 4, "--repeats", 1, "--warmup", 0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "math.jsonl", [{"turns": ["48/2?", "and then?"]}, {"prompt": "clips"}])


def answer(body: dict[str, Any]) -> list[bytes]:
    if "messages" in body:
        return stream(["a", "b"])
    return [event({"choices": [{"text": "t"}]}), event({"choices": [], "usage": {"completion_tokens": 4}})]


def lines_of(file: Path) -> dict[str, dict[str, Any]]:
    return {line["method"]: line for line in json.loads(file.read_text())["lines"]}


def test_our_server_beside_our_engine(run: Run, pair: Pair, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from ...serve.live import live

    file = tmp_path / "out.json"
    with live(load(pair.model, pair.drafter, tree="chain:2"), model_names=("tiny",)) as server:
        trees = ("--draft-model", pair.drafter, "--tree", "chain:2", "--batch-size", 2)
        result = run(
            *("bench", "--endpoint", server.url, "--model", pair.model, "--prompt-file", prompts, "--output", file),
            *(*FEW, *trees),
        )
    assert result.exit_code == 0, result.output
    lines = lines_of(file)
    assert list(lines) == ["none", "chain:2", "endpoint"]
    assert {(line["same"], line["answers"]) for line in lines.values()} == {(3, 3)}
    assert lines["endpoint"]["accept_length"] == pytest.approx(lines["chain:2"]["accept_length"], abs=1e-3)
    assert all(line["ttft_ms"] > 0 and line["tpot_ms"] > 0 for line in lines.values())
    settings = json.loads(file.read_text())["settings"]
    assert (settings["baseline"], settings["token_ids"], settings["dtype"]) == ("none", {"endpoint": True}, "float32")
    assert settings["servers"]["endpoint"]["url"] == f"{server.url}/v1"


def test_two_servers(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with serving(answer, pause=0.03) as slow, serving(answer) as fast:
        result = run(
            *("bench", "--endpoint", f"{fast.url},model=x", "--baseline-endpoint", f"{slow.url},speculate=false"),
            *("--prompt-file", prompts, "--output", file, "--api-key", "k", *FEW),
        )
    assert result.exit_code == 0, result.output
    lines = lines_of(file)
    assert list(lines) == ["baseline", "endpoint"]
    assert lines["endpoint"]["speedup"] > 1.0
    assert (lines["endpoint"]["same"], lines["endpoint"]["accept_length"]) == (3, None)
    assert {body["model"] for _, body in fast.asked} == {"x"}
    assert all(body["eyas"] == {"speculate": False} for _, body in slow.asked)
    assert "TTFT" in result.stdout


def test_one_server_alone_has_no_speedup(run: Run, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with serving(answer) as server:
        result = run("bench", "--endpoint", server.url, "--prompt-file", prompts, "--output", file, *FEW)
    assert result.exit_code == 0, result.output
    (line,) = lines_of(file).values()
    assert (line["speedup"], line["efficiency"], line["answers"]) == (None, None, 0)
    assert line["tokens_per_second"] > 0


def test_text_is_sent_and_said_where_ids_are_not_taken(run: Run, pair: Pair, prompts: Path) -> None:
    def script(body: dict[str, Any]) -> list[bytes] | int:
        return 422 if isinstance(body.get("prompt"), list) else answer(body)

    with serving(script) as server:
        result = run("bench", "--endpoint", server.url, "--tokenizer", pair.model, "--prompt-file", prompts, *FEW)
    assert result.exit_code == 0, result.output
    assert "takes no token ids" in result.stderr


def test_errors_fail(run: Run, prompts: Path) -> None:
    with serving(lambda _: 503) as server:
        result = run("bench", "--endpoint", server.url, "--prompt-file", prompts, *FEW)
    assert result.exit_code == 1
    assert "error: math, endpoint: 2 times 503" in result.stderr
    gone = run("bench", "--endpoint", "http://127.0.0.1:9", "--prompt-file", prompts, *FEW)
    assert gone.exit_code == 1
    assert "can't be reached" in gone.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --model, or --endpoint"),
        (["--model", "m", "--timeout", 5], "--timeout: about a server"),
        (["--model", "m", "--baseline-endpoint", "http://h"], "--baseline-endpoint: about a server"),
        (["--model", "m", "--api-key", "k"], "--api-key: about a server"),
        (["--endpoint", "http://h", "--dtype", "float32"], "--dtype: about an engine here"),
        (["--endpoint", "http://h", "--draft-model", "d", "--tree", "chain:2"], "--draft-model, --tree: about"),
        (["--endpoint", "http://h", "--model", "m", "--baseline-endpoint", "http://i"], "two baselines"),
        (["--endpoint", "h:8000"], "write http://HOST:PORT"),
    ],
)
def test_what_is_refused(
    run: Run, prompts: Path, options: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EYAS_API_KEY", raising=False)
    result = run("bench", "--prompt-file", prompts, *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_key_in_the_environment_is_no_option(
    run: Run, pair: Pair, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "k")
    assert run("bench", "--model", pair.model, "--prompt-file", prompts, *FEW).exit_code == 0
