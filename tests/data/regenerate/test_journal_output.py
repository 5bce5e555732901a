"""The finished files: the same bytes whatever happened on the way, and never half of them."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from eyas.data.chats.folder import read_report, splits, write_report
from eyas.data.regenerate import Answer, Question, Reply, RewriteRule, regenerate
from eyas.data.regenerate.journal import Take, unanswered
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import TEMPORARY
from eyas.text.chats import Message, exchange, read_chats, write_chats


class Echo:
    """Answers in reverse order, `at_once` at a time; dies after so many, and can't do some."""

    settings: dict[str, Any] = {"answered_by": "echo"}  # noqa: RUF012

    def __init__(self, at_once: int = 3, dies_after: int | None = None, fails: tuple[str, ...] = ()) -> None:
        self.at_once = at_once
        self.dies_after = dies_after
        self.fails = fails
        self.answered: list[str] = []

    def answers(self, take: Take) -> Any:
        while questions := take(self.at_once):
            for question in reversed(questions):
                if self.dies_after is not None and len(self.answered) >= self.dies_after:
                    raise KeyboardInterrupt
                self.answered.append(question.id)
                yield self._reply(question)

    def _reply(self, question: Question) -> Reply:
        if question.id in self.fails:
            return unanswered(question, "can't")
        message = Message(role="assistant", content=f"<{question.messages[-1].content}>")
        return Reply(
            Answer(
                id=question.id,
                turn=question.turn,
                asked=question.digest,
                message=message,
                finish_reason="stop",
                count=1,
            )
        )


def folder(path: Path) -> Path:
    path.mkdir()
    write_chats(path / "train.jsonl", [exchange(f"t{i}", f"q{i}", "old") for i in range(9)])
    write_chats(path / "validation.jsonl", [exchange(f"v{i}", f"q{i}", "old") for i in range(3)])
    write_report(path, {})
    return path


def contents(path: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    return {name: data for name, data in found.items() if name != "journal.jsonl"}


def test_a_folder_gives_a_folder(tmp_path: Path) -> None:
    regenerate(folder(tmp_path / "in"), tmp_path / "out", Echo())
    made = splits(tmp_path / "out")
    assert [chat.id for chat in made["train"]] == [f"t{i}" for i in range(9)]
    assert [chat.messages[-1].content for chat in made["validation"]] == [f"<q{i}>" for i in range(3)]
    report = read_report(tmp_path / "out")
    assert (report["chats"], report["settings"]) == (12, {"turns": "last", "answered_by": "echo"})


@pytest.mark.parametrize("deaths", [[0], [1, 1, 1], [5, 6], [11, 0]])
def test_the_same_bytes_whenever_it_was_interrupted(tmp_path: Path, deaths: list[int]) -> None:
    source = folder(tmp_path / "in")
    regenerate(source, tmp_path / "whole", Echo(at_once=1))
    answered: list[str] = []
    for number, after in enumerate(deaths):
        dying = Echo(at_once=number + 2, dies_after=after)
        with pytest.raises(KeyboardInterrupt):
            regenerate(source, tmp_path / "torn", dying)
        answered += dying.answered
        assert not (tmp_path / "torn" / "report.json").exists()
    last = Echo()
    regenerate(source, tmp_path / "torn", last)
    assert len(answered + last.answered) == len(set(answered + last.answered)) == 12  # none is done twice
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_only_what_failed_is_tried_again(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    output = tmp_path / "out"
    summary = regenerate(source, output, Echo(fails=("t3", "v1")))
    assert summary.unanswered == [("t3", "can't"), ("v1", "can't")]
    assert read_report(output)["unanswered"]["count"] == 2
    again = Echo()
    assert regenerate(source, output, again).chats == 12
    assert sorted(again.answered) == ["t3", "v1"]
    regenerate(source, tmp_path / "whole", Echo())
    assert contents(output) == contents(tmp_path / "whole")


def test_a_changed_chat_is_asked_again(tmp_path: Path) -> None:
    chats, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for text in ("old", "new"):
        write_chats(chats, [exchange("a", text, "x"), exchange("b", "same", text)])
        echo = Echo()
        regenerate(chats, output, echo)
        assert [chat.messages[-1].content for chat in read_chats(output)] == [f"<{text}>", "<same>"]
    assert echo.answered == ["a"]


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("steps", range(5))
def test_killed_while_finishing(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many steps: without a report nobody trusts the folder, and the next run mends it."""
    source = folder(tmp_path / "in")
    output = tmp_path / "out"
    regenerate(source, tmp_path / "whole", Echo())
    regenerate(source, output, Echo(fails=("t3", "v1")))
    old = contents(output)
    left = steps

    def dying(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "unlink"), (os, "replace")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        died = False
        try:
            regenerate(source, output, Echo())
        except Killed:
            died = True
    if steps == 0:
        assert died
        assert {name: data for name, data in contents(output).items() if TEMPORARY not in name} == old
    elif died:
        with pytest.raises(DataError, match=r"has no report\.json"):
            splits(output)
    rest = Echo()
    regenerate(source, output, rest)
    assert rest.answered == []
    assert contents(output) == contents(tmp_path / "whole")


def test_a_full_disk_at_the_end(tmp_path: Path) -> None:
    chats, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_chats(chats, [exchange(f"c{i}", "long " * 400, "old") for i in range(8)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))  # the journal fits, the chats don't
    try:
        with pytest.raises(OutputError, match="All answers are saved"):
            regenerate(chats, output, Shorten())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.journal"]
    rest = Shorten()
    assert regenerate(chats, output, rest).chats == 8
    assert rest.answered == []


class Shorten(Echo):
    """Says little."""

    def _reply(self, question: Question) -> Reply:
        reply = super()._reply(question)
        assert isinstance(reply.entry, Answer)
        short = Message(role="assistant", content="ok")
        return Reply(reply.entry.model_copy(update={"message": short}))


def test_input_and_output_must_go_together(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    write_chats(tmp_path / "in.jsonl", [exchange("a", "q", "x")])
    for chats, output, what in (
        (source, source, "is also the input"),
        (source, tmp_path / "out.jsonl", "must be a folder too"),
        (tmp_path / "in.jsonl", source, "must be a file too"),
    ):
        with pytest.raises(UsageError, match=what):
            regenerate(chats, output, Echo(), RewriteRule())
    with pytest.raises(DataError, match=r"there is no .*: give a chat folder"):
        regenerate(tmp_path / "nowhere", tmp_path / "out", Echo())
    (source / "report.json").unlink()
    with pytest.raises(DataError, match=r"no report\.json"):
        regenerate(source, tmp_path / "out", Echo())
