"""Chats answered by workers: the same file as by one answerer, whoever dies."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate import Answer, Reply, RewriteRule, regenerate
from eyas.data.regenerate.journal import Take, unanswered
from eyas.data.regenerate.workers import AnswererWorker, CrewAnswerer
from eyas.labs.cluster import worker
from eyas.labs.cluster.crew import Crew
from eyas.text.chats import Chat, Message, write_chats

from ...labs.cluster.fake import FakeExecutor


class Echo:
    """Answers three questions at a time, the last first, with a text made of the question's seed."""

    settings = {"answered_by": "echo"}  # noqa: RUF012  # read only

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        while questions := take(3):
            for question in reversed(questions):
                if question.id == "c5":
                    yield unanswered(question, "too long")
                    continue
                message = Message(role="assistant", content=f"{question.seed(7)} {len(question.messages)}")
                yield Reply(
                    Answer(
                        id=question.id,
                        turn=question.turn,
                        asked=question.digest,
                        message=message,
                        finish_reason="stop",
                        count=2,
                    )
                )


def echo_worker() -> AnswererWorker:
    return AnswererWorker(Echo())


def chat(number: int) -> Chat:
    turns = [(role, f"{role} {number}.{turn}") for turn in range(1 + number % 3) for role in ("user", "assistant")]
    return Chat(id=f"c{number}", messages=tuple(Message(role=role, content=text) for role, text in turns))


@pytest.mark.parametrize("deaths", [0, 8])
def test_the_same_file_whoever_dies(deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "EXCHANGE_SECONDS", 0.0)
    source = tmp_path / "in.jsonl"
    rule = RewriteRule("all")
    write_chats(source, [chat(i) for i in range(14)])
    one = regenerate(source, tmp_path / "one.jsonl", Echo(), rule)
    executor = FakeExecutor(seed=2, deaths=deaths)
    settled: list[Any] = []
    with Crew(executor, echo_worker, workers=None, ahead=4) as crew:
        many = regenerate(
            source, tmp_path / "many.jsonl", CrewAnswerer(crew), rule, lambda t: settled.append(t.settled)
        )
    assert executor.deaths <= deaths // 2
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert many == one
    assert many.unanswered == [("c5", "too long")]
    assert settled[-1] == 14


def test_a_journal_is_resumed_by_workers_and_without(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_chats(source, [chat(i) for i in range(9)])
    regenerate(source, tmp_path / "one.jsonl", Echo())
    lines = (tmp_path / "one.jsonl.journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "many.jsonl.journal").write_bytes(b"".join(lines[:4]))
    with Crew(FakeExecutor(), echo_worker, workers=2, ahead=4) as crew:
        regenerate(source, tmp_path / "many.jsonl", CrewAnswerer(crew))
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "many.jsonl.journal").read_bytes().startswith(b"".join(lines[:4]))
