"""Every verb that reads a target takes a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from eyas.drafters.checkpoint import save_network
from eyas.targets.native.library import kernels
from tests import tiny

Run = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    save_network(tiny.eagle3_module(hidden_size=64, target_hidden_size=64, taps=[1, 2, 4]), path)
    return path


@pytest.mark.slow
def test_decoded_certified_and_looked_into(run: Run, gguf_file: Path, drafter: Path, tmp_path: Path) -> None:
    prompt = ("--prompt", "abc", "--raw", "--max-new-tokens", 8, "--dtype", "float32")
    texts = [run("generate", gguf_file, *prompt, *more).stdout for more in ((), ("--draft-model", drafter))]
    assert texts[0] == texts[1]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "ab"}) + "\n")
    pair = ("verify", gguf_file, "--draft-model", drafter, "--prompt-file", rows, "--tree", "chain:2")
    few = ("--max-new-tokens", 6, "--batch-sizes", "1", "--temperatures", "0,1")
    verified = run(*pair, *few, "--dtype", "float32", "--transformers")
    assert verified.stdout.rstrip().endswith("\nEQUAL"), verified.output
    as_served = run(*pair, *few, "--dtype", "auto", "--json")
    certificate = json.loads(as_served.stdout)
    assert (certificate["weights"], certificate["equal"]) == (None if kernels() is None else "Q8_0", True)
    inspected = run("inspect", gguf_file, "--json")
    assert inspected.exit_code == 0, inspected.output
    report = json.loads(inspected.stdout)
    count = sum(
        weight.numel() for weight in tiny.build_model("llama", hidden_size=64, intermediate_size=128).parameters()
    )
    assert (report["layers"], report["parameters"], report["path"]) == (4, count, str(gguf_file))
    assert (report["usable"], report["dtypes"], report["quantized_by"]) == (True, ["F32", "Q8_0"], "GGUF")
    doctored = run("doctor", gguf_file, "--draft-model", drafter, "--max-new-tokens", 16, "--json")
    assert doctored.exit_code in (0, 1), doctored.output
    assert json.loads(doctored.stdout)


def test_trained_for_and_exported_for(run: Run, gguf_file: Path, drafter: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": str(i), "messages": [*chat, *chat[: i % 2]]}) + "\n" for i in range(2)))
    answered = run(
        "data",
        "regenerate",
        "--model",
        gguf_file,
        "--chats",
        rows,
        "--output",
        tmp_path / "answered.jsonl",
        "--max-new-tokens",
        6,
        "--dtype",
        "float32",
    )
    assert answered.exit_code == 0, answered.output
    store = tmp_path / "store"
    captured = run("data", "capture", "--model", gguf_file, "--chats", tmp_path / "answered.jsonl", "--output", store)
    assert captured.exit_code == 0, captured.output
    planned = run("plan", gguf_file, "--samples", 100, "--length", 60)
    assert planned.exit_code == 0, planned.output
    for engine, option in (("gguf", "-m"), ("vllm", "serve")):
        exported = run("export", drafter, "--to", engine, "--model", gguf_file, "--output", tmp_path / engine)
        assert exported.exit_code == 0, exported.output
        words = exported.stdout.split()
        assert words[words.index(option) + 1] == str(gguf_file)


def test_llama_cpp_is_given_the_file_itself(run: Run, gguf_file: Path, drafter: Path, tmp_path: Path) -> None:
    exported = ("--draft-model", drafter, "--export-to", tmp_path / "out", "--export-target", gguf_file)
    for more in ((), exported):
        command = ("serve", "--engine", "llama.cpp", "--model", gguf_file, *more, "--print-command")
        served = run(*command, "--engine-command", "llama-server")
        assert served.exit_code == 0, served.output
        words = served.stdout.split()
        assert words[words.index("-m") + 1] == str(gguf_file)
        assert ("-md" in words) is bool(more)
