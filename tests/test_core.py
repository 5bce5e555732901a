"""The core, which keeps its promises, needs none of the labs, which may change or go."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pairs import save_drafter, save_target
from .source import FILES, SOURCE, ids

CORE = """
import sys

class Deleted:
    def find_spec(self, name, path=None, target=None):
        if any(name == lab or name.startswith(f"{lab}.") for lab in LABS):
            raise ModuleNotFoundError(name)

LABS = set(sys.argv[3].split(","))
sys.meta_path.insert(0, Deleted())
import eyas
import eyas.drafters.kinds.eagle1, eyas.drafters.kinds.eagle3
import eyas.interop.export.export, eyas.serve.run, eyas.serve.app, eyas.train.drafter.train, eyas.verify
from eyas.cli.app import VERBS, app, command_of

assert [*VERBS.own] <= [*VERBS]
for name in VERBS.own:
    VERBS[name]
    if "eyas.labs" not in LABS:  # else there would be features that can't be imported
        command_of(name, VERBS[name])
engine = eyas.load(sys.argv[1], sys.argv[2], tree="chain:2", device="cpu")
(done,) = engine.generate([eyas.Request((3, 4, 5), eyas.SamplingParams(max_tokens=4))])
assert len(done.token_ids) == 4
print("decoded", len(VERBS) - len(VERBS.own), eyas.__file__)
"""


def decoded(folder: Path, source: Path, labs: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    model = save_target(folder / "model")
    drafter = save_drafter(folder / "drafter")
    line = [sys.executable, "-c", CORE, str(model), str(drafter), ",".join(labs)]
    path = {
        "PYTHONPATH": str(source),
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "EYAS_NATIVE": "0",
    }  # no compiling
    return subprocess.run(line, capture_output=True, text=True, check=False, env=path)


@pytest.fixture
def without_labs(tmp_path: Path) -> Path:
    """The package as it would be if somebody deleted the folder `labs`."""
    package = tmp_path / "without" / "eyas"
    package.mkdir(parents=True)
    for path in SOURCE.iterdir():
        if path.name not in ("labs", "__pycache__"):
            (package / path.name).symlink_to(path)
    return package.parent


def test_the_core_runs_without_the_labs(tmp_path: Path, without_labs: Path) -> None:
    done = decoded(tmp_path, without_labs)
    assert done.returncode == 0, done.stderr
    assert f"decoded 0 {without_labs}" in done.stdout


@pytest.mark.slow
def test_it_imports_none_that_are_there(tmp_path: Path) -> None:
    done = decoded(tmp_path, SOURCE.parent, ("eyas.labs",))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^decoded [1-9]", done.stdout)


@pytest.mark.slow
def test_what_it_needs_would_be_missed(tmp_path: Path) -> None:
    assert "ModuleNotFoundError" in decoded(tmp_path, SOURCE.parent, ("eyas.drafters.kinds.eagle3",)).stderr


def test_nobody_names_the_labs() -> None:
    """Neither in an import nor as text that could be imported: they come in by their entry points."""
    named = [
        f"{ids(path)} names {lab}"
        for path in FILES
        if not path.is_relative_to(SOURCE / "labs")
        for lab in re.findall(r"eyas\.labs\.\w+", path.read_text(encoding="utf-8"))
    ]
    assert not named, named
