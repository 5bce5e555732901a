"""`eyas serve --engine`: what is printed, refused and started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ...forks import Fork
from ...pairs import Pair, save_drafter
from ...toy.pair import TOY_DRAFTER
from ..conftest import Run

SERVER = """
import json, os, signal, sys, time
place = sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
told = {"arguments": sys.argv[2:], "key": os.environ.get("VLLM_API_KEY"), "pid": os.getpid()}
open(place + ".new", "w").write(json.dumps(told))
os.replace(place + ".new", place)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def exported(run: Run, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / "vllm"
    assert run("export", pair.drafter, "--to", "vllm", "--output", place, "--model", pair.model).exit_code == 0
    return place


@pytest.fixture
def serve(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("EYAS_API_KEY", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")

    def call(engine: str, *arguments: Any) -> Any:
        return run("serve", "--engine", engine, "--model", pair.model, *arguments)

    return call


def test_the_command_is_printed(serve: Run, pair: Pair, exported: Path) -> None:
    result = serve("vllm", "--draft-model", exported, "--print-command", "-n", 4, "--max-running", 64)
    assert result.exit_code == 0, result.stderr
    speculation = {"method": "eagle3", "model": str(exported), "num_speculative_tokens": 4}
    assert shlex.split(result.stdout) == [
        *("vllm", "serve", str(pair.model), "--speculative-config", json.dumps(speculation)),
        *("--host", "127.0.0.1", "--port", "8000", "--max-num-seqs", "64"),  # given, although it is our default
    ]
    assert result.stderr == ""


def test_an_engine_that_is_not_installed(serve: Run, pair: Pair) -> None:
    result = serve("sglang", "--max-model-len", 99)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"python -m sglang.launch_server --model-path {pair.model} --enable-metrics --host")
    assert "SGLang isn't installed here" in result.stderr
    result = serve("vllm", "--engine-command", "/no/such/vllm serve")
    assert (result.exit_code, result.stdout.split()[0]) == (1, "/no/such/vllm")
    assert "there is no program" in result.stderr


def test_a_key_stays_unseen(serve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "geheim")
    for engine in ("vllm", "sglang"):
        result = serve(engine, "--print-command")
        assert '"$EYAS_API_KEY"' in result.stdout
        assert "geheim" not in result.output
    assert "--api-key other" in serve("vllm", "--api-key", "other", "--print-command").stdout


def test_exported_first(serve: Run, tmp_path: Path) -> None:
    place = tmp_path / "out"
    drafter = save_drafter(tmp_path / "drafter", taps=[1, 2, 3], embedding="shared")
    asked = ("--draft-model", drafter, "--export-to", place, "--print-command", "--tree", "dynamic:3,2,5")
    for _ in range(2):
        result = serve("sglang", *asked)
        assert result.exit_code == 0, result.stderr
        assert f"--speculative-draft-model-path {place} --speculative-num-steps 3" in result.stdout
        assert (place / "README.md").exists()


@pytest.mark.parametrize(
    ("engine", "options", "code", "words"),
    [
        ("mlx", [], 2, "unknown engine 'mlx': write eyas, vllm, sglang, llama.cpp"),
        ("vllm", ["--drain-seconds", 30, "--max-body-bytes", 9], 2, "vLLM has no counterpart to --max-body-bytes"),
        ("vllm", ["--tree", "chain:2"], 2, "needs a drafter"),
        ("vllm", ["--draft-model", TOY_DRAFTER, "-n", "auto"], 2, "not --num-speculative-tokens auto"),
        ("vllm", ["--draft-model", TOY_DRAFTER, "--tree", "chain:x"], 2, "unknown tree"),
        ("vllm", ["--draft-model", TOY_DRAFTER, "--coupled"], 2, "no counterpart to --coupled"),
        ("vllm", ["--method", "none", "--draft-model", TOY_DRAFTER], 2, "would be ignored"),
        ("vllm", ["--export-to", "x"], 2, "--export-to is about a drafter"),
        ("vllm", ["--draft-model", TOY_DRAFTER, "--export-target", "x"], 2, "--export-target is for llama.cpp"),
        ("llama.cpp", ["--draft-model", TOY_DRAFTER, "--export-to", "x"], 2, "--export-target MODEL belong together"),
        ("llama.cpp", ["--draft-model", TOY_DRAFTER], 1, "convert_hf_to_gguf.py"),
        ("llama.cpp", [], 1, "convert_hf_to_gguf.py"),
        ("eyas", ["--print-command"], 2, "--print-command: about other engines"),
        ("eyas", ["--engine-option=-x", "--export-to", "x"], 2, "--engine-option, --export-to: about"),
    ],
)
def test_what_is_refused(serve: Run, engine: str, options: list[Any], code: int, words: str) -> None:
    result = serve(engine, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr


def test_a_drafter_the_engine_would_misread(serve: Run, pair: Pair, tmp_path: Path) -> None:
    drafter = save_drafter(tmp_path / "drafter", taps=[1, 2, 3], embedding="shared")
    result = serve("sglang", "--draft-model", drafter)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "read as boundaries [2, 3, 4], but the drafter has boundaries [1, 2, 3]" in result.stderr
    assert f"eyas export {drafter} --to sglang --output DIR --model {pair.model}" in result.stderr


def test_it_becomes_the_server(pair: Pair, exported: Path, tmp_path: Path) -> None:
    """Same process: a signal reaches the server, its exit code is ours."""
    script, told = tmp_path / "server.py", tmp_path / "told.json"
    script.write_text(SERVER)
    command = [
        *("-m", "eyas", "serve", "--engine", "vllm", "--model", pair.model),
        *("--draft-model", exported, "--engine-command", shlex.join([sys.executable, str(script), str(told)])),
        *("--port", "81", "--engine-option=--enforce-eager"),
    ]
    with Fork(command, env=os.environ | {"EYAS_API_KEY": "k"}) as process:
        try:
            limit = time.monotonic() + 60
            while not told.exists():
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 7
        finally:
            process.kill()
    said = json.loads(told.read_text())
    assert (said["pid"], said["key"]) == (process.pid, "k")
    assert said["arguments"][:2] == ["--model", str(pair.model)]
    assert said["arguments"][-5:] == ["--host", "127.0.0.1", "--port", "81", "--enforce-eager"]
