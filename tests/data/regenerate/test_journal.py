"""The journal: whatever was written whole is there after any kill, and nothing else."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.regenerate.journal import Answer, AnswerTokens, Journal, Question, Unanswered
from eyas.errors import DataError, OutputError, UsageError
from eyas.text.chats import Message

SETTINGS = {"model": "m", "seed": 1}


def question(name: str, turn: int = 0, text: str = "q") -> Question:
    return Question(name, turn, (Message(role="user", content=text),))


def answer(to: Question, text: str = "é\n{}") -> Answer:
    tokens = AnswerTokens(kept=0, prompt=(1, 2), answer=(3,))
    message = Message(role="assistant", content=text)
    return Answer(
        id=to.id, turn=to.turn, asked=to.digest, message=message, finish_reason="stop", count=1, tokens=tokens
    )


def failure(to: Question, reason: str = "no") -> Unanswered:
    return Unanswered(id=to.id, turn=to.turn, asked=to.digest, reason=reason)


QUESTIONS = [question(f"c{i // 2}", i % 2) for i in range(6)]
ENTRIES = [failure(q) if i == 3 else answer(q, "x" * i) for i, q in enumerate(QUESTIONS)]


def fill(path: Path) -> bytes:
    with Journal(path, SETTINGS) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path.read_bytes()


@settings(max_examples=40)
@given(st.data())
def test_killed_after_any_byte_it_goes_on(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        whole = fill(path)
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        survivors = max(whole[:cut].count(b"\n") - 1, 0)
        with Journal(path, SETTINGS) as journal:
            found = [journal.find(q) for q in QUESTIONS]
            assert found == ENTRIES[:survivors] + [None] * (len(ENTRIES) - survivors)
            for entry in ENTRIES[survivors:]:
                journal.append(entry)
        assert path.read_bytes() == whole


def test_the_last_entry_about_a_question_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal"
    pending = question("c")
    with Journal(path, SETTINGS) as journal:
        assert journal.find(pending) is None
        journal.append(failure(pending))
        assert journal.find(pending) == failure(pending)
        assert journal.answered == 0
        journal.append(answer(pending))
    with Journal(path, dict(reversed(SETTINGS.items()))) as journal:
        assert journal.find(pending) == answer(pending)
        assert journal.answered == 1
        assert journal.find(question("c", 1)) is None
        assert journal.find(question("c", text="something else")) is None


def test_other_settings_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "journal")
    with pytest.raises(UsageError, match="seed was 1, is 2"):
        Journal(tmp_path / "journal", {**SETTINGS, "seed": 2})
    with pytest.raises(UsageError, match="top_k was None, is 3"):
        Journal(tmp_path / "journal", {**SETTINGS, "top_k": 3})


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SETTINGS), pytest.raises(UsageError, match="another process"):
        Journal(path, SETTINGS)
    Journal(path, SETTINGS).close()


@pytest.mark.parametrize("bad", [b"{}\n", b"\xff\n", b"\n", b'{"id": "a"}\n'])
@pytest.mark.parametrize("line", [1, 3])
def test_a_damaged_line_is_named_and_nothing_thrown_away(tmp_path: Path, bad: bytes, line: int) -> None:
    lines = fill(tmp_path / "journal").splitlines(keepends=True)
    lines[line - 1] = bad
    (tmp_path / "journal").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=f"journal:{line} is damaged"):
        Journal(tmp_path / "journal", SETTINGS)
    assert (tmp_path / "journal").read_bytes() == b"".join(lines)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SETTINGS) as journal:
        journal.append(answer(question("a")))
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
        try:
            with pytest.raises(OutputError, match=r"can't write the journal .*Nothing is lost"):
                journal.append(answer(question("b")))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        assert journal.find(question("b")) is None
        journal.append(answer(question("c")))
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 3


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't write the journal"):
        Journal(tmp_path / "file" / "journal", SETTINGS)
