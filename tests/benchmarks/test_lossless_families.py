"""The losslessness campaign, with few prompts; and that it finds what differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("llguidance")

from benchmarks import lossless_families
from benchmarks.lossless_families import DRAFTERS, ORACLE, PLAIN, Bench, random_requests, random_setting

from .. import tiny


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *options: str) -> tuple[object, dict[str, Any]]:
    """The exit status and the report."""
    monkeypatch.setattr(sys, "argv", ["lossless_families", *options, "--output", str(output)])
    status = lossless_families.main()
    return status, json.loads(output.read_text(encoding="utf-8"))


def test_twenty_answers_in_a_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, report = run(
        monkeypatch, tmp_path / "r.json", "--limit", "10", "--families", "llama,gpt2", "--dtypes", "float32,bfloat16"
    )
    assert not status
    assert [(cell["family"], cell["precision"]) for cell in report["cells"]] == [
        (family, precision) for precision in ("float32", "bfloat16") for family in ("llama", "gpt2")
    ]
    for cell in report["cells"]:
        assert cell["answers"] == 10
        assert cell["tokens"] > 50
        assert cell["accept_length"] > 1
        assert cell["equal"] == 10 or not cell["promised"]
        assert (cell["generated"] > 0) == (cell["precision"] == "float32")
        assert cell["not_generated"] == 0


def test_what_a_file_has_is_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--limit", "2", "--dtypes", "float32", "--families", "llama")
    _, first = run(monkeypatch, tmp_path / "r.json", *options)
    _, both = run(monkeypatch, tmp_path / "r.json", *options[:-1], "llama,lfm2")
    assert both["cells"][0] == first["cells"][0]
    assert [cell["family"] for cell in both["cells"]] == ["llama", "lfm2"]
    _, other = run(monkeypatch, tmp_path / "r.json", *options, "--seed", "1")
    assert len(other["cells"]) == 1
    monkeypatch.setattr(Bench, "load", None)
    assert run(monkeypatch, tmp_path / "r.json", *options, "--seed", "1")[1]["cells"] == other["cells"]


def test_what_generate_says_otherwise_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny, "continuation", lambda *_, **__: [2] * 16)
    status, report = run(monkeypatch, tmp_path / "r.json", "--limit", "2", "--dtypes", "float32", "--families", "llama")
    assert status
    assert report["cells"][0]["not_generated"] == report["cells"][0]["generated"] > 0


def test_a_difference_is_found_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = Bench.together

    def wrong(self: Bench, *arguments: Any) -> Any:
        done = together(self, *arguments)
        done[0].token_ids[3] = 2
        return done

    monkeypatch.setattr(Bench, "together", wrong)
    status, report = run(
        monkeypatch, tmp_path / "r.json", "--limit", "3", "--families", "llama", "--dtypes", "float32", "--seed", "1"
    )
    assert status
    (cell,) = report["cells"]
    assert cell["broken"]
    assert cell["equal"] < 3
    assert cell["near_ties"] == 0
    assert cell["first"]["at"]["position"] == 3
    assert cell["first"]["at"]["other"] == 2
    assert cell["first"]["request"]["prompt"]
    assert "token 3," in " ".join(capsys.readouterr().out.split())


def test_a_seed_gives_the_same_cases_and_all_sorts_are_drawn() -> None:
    one, other = ([random_setting(rng) for _ in range(300)] for rng in (Random(5), Random(5)))
    assert one == other
    assert {setting.drafter for setting in one} == {PLAIN, ORACLE, *DRAFTERS}
    assert {setting.tree.partition(":")[0] for setting in one} == {"chain", "static", "dynamic", "shared", "auto"}
    assert {setting.batch_size for setting in one} == set(range(1, 17))
    requests = random_requests(Random(5), 300, tiny.VOCAB)
    assert requests == random_requests(Random(5), 300, tiny.VOCAB)
    assert min(len(request.prompt) for request in requests) == 1
    assert any(request.grammar is not None for request in requests)


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lossless_families", "--families", "llama,unheard"])
    with pytest.raises(SystemExit) as ended:
        lossless_families.main()
    assert ended.value.code == 2
    assert "unknown: unheard; known: llama, " in capsys.readouterr().err
