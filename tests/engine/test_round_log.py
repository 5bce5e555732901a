"""The log of rounds: it says what each round did, keeps private texts to itself, and never costs an answer."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.engine import Engine, Speculation
from eyas.engine.round_log import VARIABLE
from eyas.errors import UsageError
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny


def completions(requests: list[Request]) -> list[Completion]:
    speculation = Speculation(tiny.eagle3_drafter(), parse_tree("dynamic:3,3,8"))
    return Engine(tiny.target("llama"), None, speculation, batch_size=2).generate(requests)


def requests() -> list[Request]:
    return [Request(tuple(prompt), SamplingParams(max_tokens=12)) for prompt in tiny.prompts(9, 5)]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_rounds_of_the_log_make_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(VARIABLE, str(file))
    done = completions(requests())
    rows = [row for line in lines(file) for row in line["rows"]]
    for index, completion in enumerate(done):
        mine = [row for row in rows if row["request"] == index]
        told = [token for row in mine for token in row["tokens"]]
        assert told[: len(completion.token_ids)] == list(completion.token_ids)
        for row in mine:
            path = row.get("draft", {}).get("path", [])
            assert len(path) == row["accepted"]
            assert [row["draft"]["tokens"][node] for node in path] == row["tokens"][: len(path)]
    assert any("draft" in row for row in rows)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_private_texts_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rounds.jsonl"
    monkeypatch.setenv(VARIABLE, str(file))
    completions([replace(request, private=True) for request in requests()])
    rows = [row for line in lines(file) for row in line["rows"]]
    assert rows
    assert not any({"tokens", "root", "draft"} & row.keys() for row in rows)


def test_answers_go_on_without_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [each.token_ids for each in completions(requests())]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "rounds.jsonl"))
    with pytest.raises(UsageError, match=r"EYAS_TRACE: can't write .*: No such file"):
        completions(requests())
    monkeypatch.setenv(VARIABLE, "/dev/full")
    monkeypatch.setattr(logging.getLogger("eyas"), "propagate", True)
    assert [each.token_ids for each in completions(requests())] == expected
    assert [record.getMessage() for record in caplog.records].count(
        "EYAS_TRACE: rounds are no longer written: No space left on device"
    ) == 1
