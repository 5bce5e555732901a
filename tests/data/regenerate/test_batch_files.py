"""OpenAI Batch files: split, read back in any order, and what failed is left to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate import BatchAnswerer, CompletionSettings, RewriteRule, regenerate, write_requests
from eyas.data.regenerate.endpoint import write_batch
from eyas.data.regenerate.rewrite import Rewrite
from eyas.errors import DataError, UsageError
from eyas.text.chats import Chat, Message, exchange, read_chats, write_chats
from eyas.types import SamplingParams

from .fake_endpoint import completion, echo

ASK = CompletionSettings(model="big", sampling=SamplingParams(max_tokens=9))
LAST = RewriteRule()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def result(request: dict[str, Any], status: int = 200) -> dict[str, Any]:
    body = echo(request["body"]).body if status == 200 else {"error": {"message": "too long"}}
    return {
        "id": "r", "custom_id": request["custom_id"], "error": None,
        "response": {"status_code": status, "request_id": "x", "body": body},
    }  # fmt: skip


def write_results(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_there_and_back_in_any_order(tmp_path: Path) -> None:
    chats, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_chats(chats, [exchange(f"c{i}", f"q{i}", "old") for i in range(8)])
    (written,) = write_requests(chats, output, tmp_path / "ask.jsonl", ASK, LAST)
    requests = read(written.path)
    assert (written.requests, len(requests)) == (8, 8)
    assert {request["url"] for request in requests} == {"/v1/chat/completions"}
    assert requests[3]["custom_id"] == "c3#0"
    assert requests[3]["body"]["messages"] == [{"role": "user", "content": "q3"}]
    rows: list[Any] = [result(request) for request in requests if request["custom_id"] not in ("c1#0", "c2#0", "c5#0")]
    rows += [result(requests[1], 400), {"custom_id": "c2#0", "response": None, "error": {"code": "batch_expired"}}]
    rows += [result(requests[0]), {**result(requests[0]), "custom_id": "nobody#0"}, "garbage", "[]"]
    random.Random(2).shuffle(rows)
    first = BatchAnswerer([write_results(tmp_path / "1.jsonl", rows)], ASK)
    summary = regenerate(chats, output, first)
    assert [chat.id for chat in read_chats(output)] == ["c0", "c3", "c4", "c6", "c7"]
    assert dict(summary.unanswered).keys() == {"c1", "c2"}
    assert "too long" in dict(summary.unanswered)["c1"]
    assert "batch_expired" in dict(summary.unanswered)["c2"]
    assert (summary.unasked, first.unreadable) == (1, 2)

    (again,) = write_requests(chats, output, tmp_path / "again.jsonl", ASK, LAST)
    assert [request["custom_id"] for request in read(again.path)] == ["c1#0", "c2#0", "c5#0"]
    results = write_results(tmp_path / "2.jsonl", [result(request) for request in read(again.path)])
    # a good result counts, in whichever file and wherever it stands
    both = BatchAnswerer([tmp_path / "1.jsonl", results], ASK)
    assert regenerate(chats, output, both).chats == 8
    assert [chat.messages[-1].content for chat in read_chats(output)] == [
        echo(request["body"]).body["choices"][0]["message"]["content"] for request in requests
    ]
    assert write_requests(chats, output, tmp_path / "none.jsonl", ASK, LAST) == []
    assert not (tmp_path / "none.jsonl").exists()


def test_all_turns_take_a_batch_each(tmp_path: Path) -> None:
    chats, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    talk = tuple(Message(role=role, content=role) for role in ("user", "assistant", "user", "assistant"))  # type: ignore[arg-type]
    write_chats(chats, [Chat(id=name, messages=talk) for name in "ab"])
    for number in range(2):
        (written,) = write_requests(chats, output, tmp_path / f"{number}.jsonl", ASK, RewriteRule("all"))
        assert [row["custom_id"] for row in read(written.path)] == [f"a#{number}", f"b#{number}"]
        results = write_results(tmp_path / "r.jsonl", [result(row) for row in read(written.path)])
        summary = regenerate(chats, output, BatchAnswerer([results], ASK), RewriteRule("all"))
        assert (summary.chats, summary.unasked) == ((0, 2) if number == 0 else (2, 0))
    assert all(str(chat.messages[3].content).startswith("<user>") for chat in read_chats(output))


def questions(count: int) -> list[Any]:
    return [Rewrite(exchange(f"c{i}", "é" * 50, "old"), LAST).question() for i in range(count)]


def test_files_are_split_by_requests_and_by_bytes(tmp_path: Path) -> None:
    by_count = write_batch(tmp_path / "a.jsonl", questions(7), ASK, most_requests=3)
    assert [(part.path.name, part.requests) for part in by_count] == [
        ("a.jsonl", 3), ("a-2.jsonl", 3), ("a-3.jsonl", 1)
    ]  # fmt: skip
    assert [len(read(part.path)) for part in by_count] == [3, 3, 1]
    sizes = [len(line) for part in by_count for line in part.path.read_bytes().splitlines(keepends=True)]
    size = max(sizes)
    by_bytes = write_batch(tmp_path / "b.jsonl", questions(5), ASK, most_bytes=2 * size)
    assert [part.requests for part in by_bytes] == [2, 2, 1]
    assert all(part.path.stat().st_size <= 2 * size for part in by_bytes)
    with pytest.raises(DataError, match="c0: its request has"):
        write_batch(tmp_path / "c.jsonl", questions(1), ASK, most_bytes=sizes[0] - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(part.path.name for part in (*by_count, *by_bytes))


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a-2.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="may have been uploaded"):
        write_batch(tmp_path / "a.jsonl", questions(2), ASK, most_requests=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a-2.jsonl"]


def test_garbage_inside_a_good_line_is_left_to_do(tmp_path: Path) -> None:
    chats = tmp_path / "in.jsonl"
    write_chats(chats, [exchange(f"c{i}", "q", "old") for i in range(3)])
    bodies: list[Any] = [None, {"choices": []}, completion({"content": "yes"})]
    rows = [{"custom_id": f"c{i}#0", "response": {"status_code": 200, "body": body}} for i, body in enumerate(bodies)]
    summary = regenerate(
        chats, tmp_path / "out.jsonl", BatchAnswerer([write_results(tmp_path / "r.jsonl", list(rows))], ASK)
    )
    assert (summary.chats, len(summary.unanswered)) == (1, 2)
    with pytest.raises(DataError, match="can't read the results"):
        BatchAnswerer([tmp_path / "nowhere.jsonl"], ASK)
