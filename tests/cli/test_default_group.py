"""The list of verbs; `eyas bench` is a group and a verb."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.cli.common.aliases import DRAFTER_HELP, TARGET_HELP
from eyas.cli.common.verb import EXPERT

from ..verbs import DEFAULTED, GROUPS

Run = Callable[..., Result]


@pytest.mark.parametrize("group", [(), *((name,) for name in GROUPS)], ids=str)
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
        ("generate", "MODEL"),
        ("pipeline", "MODEL SOURCE..."),
        ("bench measure", "[MODEL]"),
    ],
)
def test_usage_names_the_arguments(run: Run, words: str, arguments: str) -> None:
    shown = run(*words.split(), "--help").stdout.splitlines()[0]
    assert shown == f"Usage: eyas {words} [OPTIONS] {arguments}"


def test_options_without_a_verb_go_to_the_first_one(run: Run) -> None:
    missing = run("bench", "--limit", 1)
    assert missing.exit_code == 2
    assert "Missing option '--prompt-file'" in missing.stderr


def test_the_help_of_a_group_lists_its_verbs(run: Run) -> None:
    for group, (_, verbs) in GROUPS.items():
        listed = run(group, "--help").stdout.partition("Commands:")[2]
        assert [line.split()[0] for line in listed.strip().splitlines()] == list(verbs)
        assert run(group).exit_code == 2  # without arguments


@pytest.mark.parametrize("words", ["generate", "serve", "bench measure", "bench methods", "export"])
def test_help_puts_what_experts_need_last_and_then_examples(run: Run, words: str) -> None:
    shown = run(*words.split(), "--help").stdout
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)
    expert = [option for option in options if option[2:].replace("-", "_") in EXPERT]
    assert expert
    assert options[-len(expert) - 1 :] in ([*expert, "--help"], ["--help", *expert])
    assert shown.index("\nExamples:\n  eyas ") > shown.index(f"  {options[-1]}")


def test_a_target_and_a_drafter_are_described_alike_everywhere(run: Run) -> None:
    for words in ("generate", "chat", "serve", "verify", "doctor", "plan", "pipeline", "bench measure", "bench trees"):
        shown = " ".join(run(*words.split(), "--help").stdout.split())
        assert f"The target: {TARGET_HELP}." in shown, words
        assert words in ("plan", "pipeline") or DRAFTER_HELP in shown, words
    required = run("generate", "--help").stdout.partition("Common:")[0]
    assert required.split()[-1] == "[required]"


@pytest.mark.parametrize(
    "words",
    [("owner/name",), ("smollm2",), ("x.gguf",), ("measure", "owner/name"), ("./folder", "--limit", 1)],
    ids=str,
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
