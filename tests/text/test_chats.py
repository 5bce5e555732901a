"""Chats: rows read back as written, bad rows named, a split that depends on the id alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import DataError
from eyas.text.chats import chat_line, exchange, held_out, read_chats, write_chats


def test_round_trip(tmp_path: Path) -> None:
    chats = [exchange("a", "Question?", "Answer.\n"), exchange("b", "é\u2028x", "y")]
    write_chats(tmp_path / "c.jsonl", chats)
    assert list(read_chats(tmp_path / "c.jsonl")) == chats


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ('{"id": "x"}', "messages"),
        ('{"id": "", "messages": [{"role": "user", "content": "q"}]}', "id"),
        ('{"id": "x", "messages": [{"role": "robot", "content": "q"}]}', "role"),
        ('{"id": "x", "messages": [{"role": "user", "content": "q"}], "extra": 1}', "extra"),
        ("not json", "row"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str, word: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "ok", "messages": [{"role": "user", "content": "q"}]}\n\n' + row + "\n")
    with pytest.raises(DataError, match=rf"c\.jsonl:3: .*{word}"):
        list(read_chats(path))


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        list(read_chats(tmp_path / "nowhere.jsonl"))


def test_the_split_takes_its_share() -> None:
    ids = [f"chat-{i}" for i in range(4000)]
    chosen = [i for i in ids if held_out(i, 0.1)]
    assert 300 < len(chosen) < 500
    assert set(chosen) <= {i for i in ids if held_out(i, 0.2)}  # a larger share only adds
    assert not any(held_out(i, 0.0) for i in ids)


def test_a_byte_order_mark_is_no_part_of_the_first_chat(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(chat_line(exchange(name, "q", "a")) for name in "xy"), encoding="utf-8-sig")
    assert [chat.id for chat in read_chats(file)] == ["x", "y"]
