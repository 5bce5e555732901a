"""`eyas bench serve` as a user calls it, against servers in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ...bench.serving.fake_server import serving, stream
from ...pairs import Pair, write_rows
from ..conftest import Run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [{"turns": [f"q{i}"]} for i in range(4)])


def test_two_servers_side_by_side(run: Run, prompts: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    with serving(lambda _: stream(["a"]), pause=0.02) as slow, serving(lambda _: stream(["b"])) as fast:
        result = run(
            *("bench", "serve", "--side", f"plain={slow.url}", "--endpoint", fast.url),
            *("--concurrency", "1,2", "--requests", 2, "--repeats", 2, "--ignore-eos", "--max-new-tokens", 4),
            *("--prompt-file", prompts, "--output", out, "--plot", plot, "--markdown"),
        )
    assert result.exit_code == 0, result.output
    assert "no crossover: endpoint is not slower than plain at 2 at once" in result.output
    assert "| 1 at once | endpoint |" in result.output
    content = json.loads(out.read_text(encoding="utf-8"))
    assert [(line["load"]["level"], line["side"]) for line in content["lines"]] == [
        (1, "plain"),
        (1, "endpoint"),
        (2, "plain"),
        (2, "endpoint"),
    ]
    assert content["lines"][1]["ratio_least"] > 1
    assert (content["lines"][1]["same"], content["lines"][1]["compared"]) == (0, 4)
    assert {(body["ignore_eos"], body["max_tokens"]) for _, body in fast.asked} == {(True, 4)}
    assert plot.read_bytes().startswith(b"<?xml")
    assert content["settings"]["repeated_requests"] == 15 - 4  # warm-up 1 + 2, then 2 + 4 requests, twice
    assert "11 of 15 requests to a side repeat a prompt" in result.stderr


def test_errors_are_told_and_fail(run: Run, prompts: Path) -> None:
    with serving(lambda _: 429) as full:
        result = run("bench", "serve", "--side", f"a={full.url}", "--rate", 50, "--prompt-file", prompts)
    assert result.exit_code == 1
    assert "times 429" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--side", "a=http://h"], "--concurrency"),
        (["--side", "a=http://h", "--rate", "1", "--concurrency", "1"], "--concurrency"),
        (["--side", "a=http://h", "--concurrency", "0"], "--concurrency"),
        (["--side", "a=http://h", "--rate", "-1"], "--rate"),
        (["--concurrency", "1"], "no server to measure"),
        (["--concurrency", "1", "--side", "a=http://h", "--draft-model", "d"], "--model"),
        (["--concurrency", "1", "--model", "m", "--off"], "--draft-model"),
        (["--concurrency", "1", "--side", "a=http://h", "--baseline", "b"], "--baseline"),
    ],
)
def test_bad_combinations_are_refused(run: Run, prompts: Path, arguments: list[str], complaint: str) -> None:
    result = run("bench", "serve", "--prompt-file", prompts, *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.slow
def test_it_starts_servers_itself(run: Run, pair: Pair, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        *("bench", "serve", "--model", pair.model, "--draft-model", pair.drafter, "--tree", "chain:3", "--off"),
        *("--concurrency", 2, "--requests", 4, "--repeats", 1, "--ignore-eos", "--max-new-tokens", 6),
        *("--prompt-file", prompts, "--output", out, "--serve-option=--max-running=2"),
    )
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text(encoding="utf-8"))
    plain, chain, off = content["lines"]
    assert [line["side"] for line in content["lines"]] == ["plain", "chain:3", "off"]
    assert (plain["accept_length"], off["accept_length"]) == (1.0, 1.0)
    assert chain["accept_length"] >= 1.0
    assert chain["same"] == off["same"] == 4
    assert set(content["idle_processor_share"]) == {"plain", "chain:3"}
