"""Wrong command lines: refused with a message, without a traceback, and before anything heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from eyas.cli.common.options import States
from eyas.cli.drafter.export import Consumer
from eyas.data.store.layout import StateEncoding
from eyas.drafters.kinds import KINDS
from eyas.interop.export.consumers import CONSUMERS

from ..toy.pair import TOY_DRAFTER, TOY_TARGET
from ..verbs import GROUPS, VERBS
from . import wrong_lines
from .wrong_lines import LINES, make_files


def filled(line: str, folder: Path) -> str:
    """A line with its folder, target and drafter in place."""
    return line.replace("{f}", str(folder)).replace("{t}", str(TOY_TARGET)).replace("{d}", str(TOY_DRAFTER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines")
    make_files(path)
    return path


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """What became of each line; all of them run in one fresh process."""
    words = [filled(line, folder).split() for line, _ in LINES]
    done = subprocess.run(
        [sys.executable, wrong_lines.__file__], input=json.dumps(words), capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {line: outcome for (line, _), outcome in zip(LINES, found, strict=True)}


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_line_is_refused(line: str, message: str, outcomes: dict[str, Any], folder: Path) -> None:
    outcome = outcomes[line]
    assert outcome["code"] in (1, 2), outcome
    assert message.replace("{f}", str(folder)) in " ".join(outcome["stderr"].split()), outcome["stderr"]
    assert not outcome["unhandled"]
    assert "Traceback" not in outcome["stderr"]
    assert not re.search(r"unexpected \w+(Error|Exception)", outcome["stderr"])
    assert outcome["stdout"] == ""
    assert outcome["heavy"] == []


def test_there_are_a_hundred_over_every_verb() -> None:
    assert len({line for line, _ in LINES}) == len(LINES) >= 100
    first = {line.split()[0] for line, _ in LINES} | {" ".join(line.split()[:2]) for line, _ in LINES}
    verbs = {*VERBS, *(f"{group} {name}" for group, (_, names) in GROUPS.items() for name in names)}
    assert verbs - {"bench measure"} <= first  # `bench` alone is that verb


def test_a_process_of_its_own_refuses_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "generate", "./mien", "--prompt", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no ./mien")
    assert "Traceback" not in done.stderr


def test_names_known_without_imports_are_all_names() -> None:
    assert {*KINDS} >= {*KINDS.own} >= {"dflash", "eagle1", "eagle3", "mla", "mlp", "mtp", "peagle"}
    assert set(get_args(Consumer)) == set(CONSUMERS)
    assert set(get_args(get_args(States)[0])) == set(get_args(StateEncoding))
