"""Rows of prompt files: four forms, and bad rows that say where and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import DataError
from eyas.text.chats import Message
from eyas.text.prompts import BadRow, PromptRow, parse_row, read_prompts

from ..pairs import write_rows


def parse(row: Any) -> PromptRow | BadRow:
    return parse_row(row if isinstance(row, str) else json.dumps(row), "f.jsonl:3", "3")


def test_the_four_forms() -> None:
    assert parse({"prompt": "a"}) == PromptRow("3", "f.jsonl:3", prompt="a")
    said = [{"role": "user", "content": "a"}]
    assert parse({"messages": said}) == PromptRow("3", "f.jsonl:3", messages=(Message(role="user", content="a"),))
    assert parse({"turns": ["a", "b"]}) == PromptRow("3", "f.jsonl:3", turns=("a", "b"))
    assert parse({"token_ids": [1, 0]}) == PromptRow("3", "f.jsonl:3", token_ids=(1, 0))


def test_a_raw_prompt_is_said_to_be_raw(tmp_path: Path) -> None:
    assert parse({"prompt": "a", "raw": True}) == PromptRow("3", "f.jsonl:3", prompt="a", raw=True)
    assert parse({"turns": ["a"], "raw": True}) == BadRow(
        "3", "f.jsonl:3: raw is about `prompt`: leave it out, or give a prompt"
    )
    file = write_rows(tmp_path / "f.jsonl", [{"prompt": "a"}, {"turns": ["a"]}, "{"])
    rows = read_prompts(file, raw=True)
    assert [getattr(row, "raw", None) for row in rows] == [True, False, None]


def test_names_and_other_keys() -> None:
    assert parse({"id": "x", "question_id": 4, "prompt": "a", "reference": ["b"]}).id == "x"
    assert parse({"question_id": 81, "turns": ["a"]}).id == "81"
    assert parse({"id": 0, "prompt": "a"}).id == "0"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "row: Invalid JSON"),
        ("[1]", "row: Input should be an object"),
        ({}, "exactly one of prompt, messages, turns, token_ids; found none"),
        ({"prompt": "a", "turns": ["b"]}, "found prompt and turns"),
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"prompt": 3}, "prompt: Input should be a valid string"),
        ({"turns": []}, "turns: Tuple should have at least 1 item"),
        ({"turns": ["a", ""]}, "turns.1: String should have at least 1 character"),
        ({"token_ids": [1, -2]}, "token_ids.1: Input should be greater than or equal to 0"),
        ({"token_ids": [1.5]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": []}, "token_ids"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: Input should be 'system', 'developer'"),
        ({"messages": [{"role": "user"}]}, "messages.0: Value error, content is missing"),
    ],
    ids=str,
)
def test_bad_rows(row: Any, words: str) -> None:
    bad = parse(row)
    assert isinstance(bad, BadRow)
    assert bad.error.startswith("f.jsonl:3: ")
    assert words in bad.error


def test_files(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "f.jsonl", ["", {"prompt": "a"}, "  ", {"prompt": ""}, {"prompt": "b"}])
    rows = read_prompts(file)
    assert [row.id for row in rows] == ["2", "4", "5"]
    assert isinstance(rows[1], BadRow)
    assert rows[1].error.startswith("f.jsonl:4: ")
    assert len(read_prompts(file, limit=2)) == 2
    file.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "b"}\n')
    broken, good = read_prompts(file)
    assert isinstance(broken, BadRow)
    assert isinstance(good, PromptRow)
    with pytest.raises(DataError, match="has no rows: write one JSON object a line"):
        read_prompts(write_rows(tmp_path / "none.jsonl", [""]))
    with pytest.raises(DataError, match=r"can't read the prompts .*gone\.jsonl"):
        read_prompts(tmp_path / "gone.jsonl")


def test_a_row_without_a_name_is_named_after_its_line() -> None:
    assert [parse({"prompt": "a", "id": name}).id for name in ("x", "", " ", None)] == ["x", "3", "3", "3"]


def test_byte_order_marks_are_no_part_of_rows(tmp_path: Path) -> None:
    """As editors write them, also where two such files were joined; numbers of lines stay."""
    file = tmp_path / "f.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n\xef\xbb\xbf{"prompt": "b"}\n')
    assert [(row.prompt, row.where) for row in read_prompts(file)] == [("a", "f.jsonl:1"), ("b", "f.jsonl:3")]
    file.write_text('{"prompt": "a"}', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16 text: save it as UTF-8"):
        read_prompts(file)
