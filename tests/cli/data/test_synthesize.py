"""`eyas data synthesize`: what it writes and says, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from eyas.text.chats import read_chats

from ...pairs import Pair

Run = Callable[..., Result]
STOPS = [
    word for token in range(3, 300, 6) for word in ("--stop-token-id", token)
]  # random weights seldom end by themselves
EASY = ("--max-new-tokens", 48, "--min-words", 1, "--near-duplicates", "off", *STOPS)


def test_chats_are_written_and_the_next_command_is_named(run: Run, pair: Pair, tmp_path: Path) -> None:
    topics = tmp_path / "topics.txt"
    topics.write_text("owls\n\nfalcons\n")
    asked = ("data", "synthesize", "--model", pair.model, "--chats", 3, "--topics", topics, *EASY)
    made = run(*asked, "--output", tmp_path / "made.jsonl")
    assert made.exit_code == 0, made.output
    assert "3 chats written 100% of 3 that were tried" in " ".join(made.stdout.split())
    assert f"eyas data regenerate --model {pair.model} --chats {tmp_path / 'made.jsonl'}" in " ".join(
        made.stderr.split()
    )
    assert [len(chat.messages) for chat in read_chats(tmp_path / "made.jsonl")] == [1, 1, 1]
    drafted = run(*asked, "--draft-model", pair.drafter, "--output", tmp_path / "drafted.jsonl", "--json")
    assert (tmp_path / "drafted.jsonl").read_bytes() == (tmp_path / "made.jsonl").read_bytes()
    summary = json.loads(drafted.stdout)
    assert summary["chats"] == 3
    assert summary["yield"] == pytest.approx(3 / summary["tried"], abs=1e-4)
    assert set(summary["topics"]) <= {"owls", "falcons"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--near-duplicates", "2"), "a similarity above 0 and at most 1, or off"),
        (("--near-duplicates", "no"), "a similarity above 0 and at most 1, or off"),
        (("--stop-token-id", 99_999), "outside the target's vocabulary"),
        (("--min-words", 9, "--max-words", 5), "there are none"),
    ],
)
def test_what_is_refused(run: Run, pair: Pair, tmp_path: Path, options: tuple[object, ...], words: str) -> None:
    output = tmp_path / "made.jsonl"
    refused = run("data", "synthesize", "--model", pair.model, "--chats", 1, "--output", output, *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert not list(tmp_path.iterdir())


def test_topics_that_are_no_text(run: Run, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "topics").write_bytes(b"\xff\xfe\x00")
    asked = ("data", "synthesize", "--model", pair.model, "--chats", 1, "--topics", tmp_path / "topics")
    refused = run(*asked, "--output", tmp_path / "made.jsonl")
    assert refused.exit_code == 1
    assert "isn't UTF-8 text" in refused.stderr
