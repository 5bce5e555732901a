"""The list of verbs; `eyas bench` is a group and a verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.cli.app import DEFAULTED, GROUPS

Run = Callable[..., Result]


@pytest.mark.parametrize("group", [(), *((name,) for name in GROUPS if name not in DEFAULTED)], ids=str)
def test_no_summary_of_the_list_is_cut(run: Run, group: tuple[str, ...]) -> None:
    listed = run(*group, "--help").stdout.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("train", "RECIPE [KEY=VALUE]..."),
        ("sweep", "FILE [KEY=VALUE]..."),
        ("data prepare", "SOURCE..."),
        ("bench report", "RUN"),
        ("generate", "[MODEL]"),
    ],
)
def test_usage_names_the_arguments(run: Run, words: str, arguments: str) -> None:
    shown = run(*words.split(), "--help").stdout.splitlines()[0]
    assert shown.replace("{", "").replace("}", "") == f"Usage: eyas {words} [OPTIONS] {arguments}"


def test_options_without_a_verb_go_to_the_first_one(run: Run) -> None:
    assert run("bench", "--help").stdout == run("bench", "measure", "--help").stdout
    for words in ("--draft-model", "eyas bench checkpoints", "eyas bench trees"):
        assert words in " ".join(run("bench", "--help").stdout.split())
    missing = run("bench")
    assert missing.exit_code == 2
    assert "Missing option '--prompt-file'" in missing.stderr


@pytest.mark.parametrize(
    "words", [("owner/name",), ("smollm2",), ("measure", "owner/name"), ("./folder", "--limit", 1)], ids=str
)
def test_a_model_without_a_verb_goes_to_the_first_one(run: Run, words: tuple[Any, ...]) -> None:
    missing = run("bench", *words)
    assert missing.exit_code == 2
    assert "Missing option '--prompt-file'" in missing.stderr


def test_every_other_verb_is_named_in_the_default_one() -> None:
    for group in DEFAULTED:
        first, *others = GROUPS[group][1].items()
        for name, _ in others:
            assert f"eyas {group} {name}" in (first[1].__doc__ or "")


@pytest.mark.parametrize("words", [("bench", "chekpoints"), ("bench", "chekpoints", "--model", "x")])
def test_a_mistyped_verb_is_reported_as_one(run: Run, words: tuple[Any, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "No such command 'chekpoints'" in result.stderr


def test_a_folder_without_a_slash_is_a_model_unless_it_is_called_like_a_verb(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "trees"):
        (tmp_path / name).mkdir()
    assert "Missing option '--prompt-file'" in run("bench", "model").stderr
    assert run("bench", "trees", "--help").stdout.startswith("Usage: eyas bench trees")
    assert "No such command 'modle'" in run("bench", "modle").stderr
