"""`eyas cache`: what is kept is listed and cleared, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of 3,000 bytes, of which 1,000 were last used ten days ago; beside it lies somebody else's file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "other").write_bytes(b"other")
    made = tmp_path / "eyas"
    for name in ("panels/new.panels", "panels/old.panels", "gguf/model-1/config.json"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(bytes(1000))
    past = time.time() - 10 * 86400
    os.utime(made / "panels/old.panels", (past, past))
    return made


def listed(run: Run, *arguments: object) -> dict[str, tuple[int, int]]:
    found = json.loads(run("cache", "--json", *arguments).stdout)
    return {part["name"]: (part["entries"], part["bytes"]) for part in found["parts"]}


def test_parts_are_listed(run: Run, folder: Path) -> None:
    assert listed(run) == {"panels": (2, 2000), "gguf": (1, 1000)}
    assert listed(run, "gguf") == {"gguf": (1, 1000)}
    shown = run("cache").stdout
    assert f"{folder}: 0.0 MB" in shown
    assert "weights as laid out for this processor" in shown


def test_without_a_cache_nothing_is_listed_or_made(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert listed(run, "--clear") == {}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--unused-days", 5], {"panels": (1, 1000), "gguf": (1, 1000)}),
        (["gguf", "--unused-days", 5], {"gguf": (1, 1000)}),
        (["panels"], {"panels": (0, 0)}),
        ([], {"panels": (0, 0), "gguf": (0, 0)}),
    ],
)
def test_only_what_was_asked_for_is_removed(
    run: Run, folder: Path, arguments: list[object], left: dict[str, tuple[int, int]]
) -> None:
    assert listed(run, "--clear", *arguments) == left
    assert (folder / "panels/old.panels").exists() == (arguments[:1] == ["gguf"])
    assert (folder.parent / "other").read_bytes() == b"other"


def test_what_cannot_be_meant_is_refused(run: Run, folder: Path) -> None:
    wrong = run("cache", "--clear", "penels")
    assert wrong.exit_code == 2
    assert "the cache has no part penels: it has gguf, machine, native, panels, verdicts" in wrong.stderr
    assert "add --clear" in run("cache", "--unused-days", 3).stderr
    assert len(list(folder.rglob("*.*"))) == 3
