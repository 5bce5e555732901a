"""kill -9 at any moment, through the command line: the result is that of an uninterrupted run, byte for byte."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.text.chats import exchange, write_chats

from ...forks import Fork
from ...pairs import save_drafter, save_target
from .fake_endpoint import Said, echo, endpoint

CHATS = 24


def command(source: Path, output: Path, *answerer: str) -> list[str]:
    options = ["--chats", str(source), "--output", str(output), "--max-new-tokens", "24"]
    return ["data", "regenerate", *options, *answerer]


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def run(arguments: list[str]) -> None:
    """In this process, which has everything imported."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def kill(arguments: list[str], journal: Path, after: int, delay: float = 0.0) -> None:
    """Start it, and kill it once so many more chats are answered."""
    wanted = lines(journal) + after
    with Fork(["-m", "eyas", *arguments]) as process:
        while lines(journal) < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)


def write(path: Path) -> Path:
    write_chats(path, [exchange(f"c{i}", f"Natalia sold 48/{i} clips", "old") for i in range(CHATS)])
    return path


def answered(journal: Path) -> list[bytes]:
    return [line for line in journal.read_bytes().splitlines() if b'"kind":"answer"' in line]


def test_killed_while_asking_an_endpoint(tmp_path: Path) -> None:
    chance = random.Random(3)

    def script(body: dict[str, Any], before: int) -> Said:
        time.sleep(chance.random() * 0.02)
        return echo(body, before)

    source = write(tmp_path / "in.jsonl")
    with endpoint(script) as server:
        ways = ("--endpoint", server.url, "--model", "m", "--concurrency", "3")
        run(command(source, tmp_path / "whole.jsonl", *ways))
        torn = command(source, tmp_path / "torn.jsonl", *ways)
        journal = tmp_path / "torn.jsonl.journal"
        for after in (3, 6):
            kill(torn, journal, after)
        assert not (tmp_path / "torn.jsonl").exists()
        run(torn)
    assert (tmp_path / "torn.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(answered(journal)) == CHATS


def engine_case(tmp_path: Path) -> tuple[list[str], list[str], Path]:
    source = write(tmp_path / "in.jsonl")
    ways = ["--model", str(save_target(tmp_path / "model")), "--batch-size", "3", "--temperature", "0.7"]
    drafted = [*ways, "--draft-model", str(save_drafter(tmp_path / "drafter")), "--tree", "chain:2"]
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    return command(source, whole, *ways), command(source, torn, *drafted), torn


def check(tmp_path: Path, torn: Path) -> None:
    assert torn.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(answered(torn.with_name("torn.jsonl.journal"))) == CHATS


def test_killed_while_decoding(tmp_path: Path) -> None:
    """The torn run drafts, the whole one doesn't: that changes nothing either."""
    whole, torn, output = engine_case(tmp_path)
    run(whole)
    kill(torn, output.with_name("torn.jsonl.journal"), 5)
    run(torn)
    check(tmp_path, output)


@pytest.mark.slow
def test_killed_ten_times_at_random(tmp_path: Path) -> None:
    whole, torn, output = engine_case(tmp_path)
    run(whole)
    chance = random.Random()
    journal = output.with_name("torn.jsonl.journal")
    for _ in range(10):
        kill(torn, journal, chance.randint(0, 3), chance.random() * 0.3)
    run(torn)
    check(tmp_path, output)
