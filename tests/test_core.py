"""The core, which keeps its promises, needs none of the labs, which may change or go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .pairs import save_drafter, save_target

LABS = (
    "eyas.doctor",
    "eyas.sweep",
    "eyas.cluster",
    "eyas.learn",
    "eyas.drafters.block",
    "eyas.drafters.kinds.dflash",
    "eyas.drafters.kinds.dflash2",
    "eyas.drafters.kinds.domino",
    "eyas.drafters.kinds.dspark",
    "eyas.drafters.kinds.lilicorr",
    "eyas.drafters.kinds.xpress",
    "eyas.drafters.kinds.peagle",
    "eyas.train.loss.block",
    "eyas.bench.accuracy.sandbox",
    "eyas.bench.accuracy.jail",
)
CORE = """
import sys

class Deleted:
    def find_spec(self, name, path=None, target=None):
        if any(name == lab or name.startswith(f"{lab}.") for lab in LABS):
            raise ModuleNotFoundError(name)

LABS = set(sys.argv[3].split(","))
import eyas.drafters.kinds as kinds
kinds.NAMES = tuple(name for name in kinds.NAMES if f"eyas.drafters.kinds.{name}" not in LABS)
sys.meta_path.insert(0, Deleted())
import eyas
import eyas.drafters.kinds.eagle1, eyas.drafters.kinds.eagle3
import eyas.interop.export.export, eyas.serve.run, eyas.serve.app, eyas.train.drafter.train, eyas.verify
from eyas.cli.app import app

engine = eyas.load(sys.argv[1], sys.argv[2], tree="chain:2", device="cpu")
(done,) = engine.generate([eyas.Request((3, 4, 5), eyas.SamplingParams(max_tokens=4))])
assert len(done.token_ids) == 4
print("decoded")
"""


def decoded(folder: Path, labs: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    model, drafter = save_target(folder / "model"), save_drafter(folder / "drafter")
    line = [sys.executable, "-c", CORE, str(model), str(drafter), ",".join(labs)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_core_runs_without_the_labs(tmp_path: Path) -> None:
    done = decoded(tmp_path, LABS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("decoded\n")


def test_what_it_needs_would_be_missed(tmp_path: Path) -> None:
    assert "ModuleNotFoundError" in decoded(tmp_path, ("eyas.drafters.kinds.eagle3",)).stderr


@pytest.mark.parametrize("lab", LABS)
def test_labs_are_there(lab: str) -> None:
    path = Path(__file__).parent.parent / "src" / Path(*lab.split("."))
    assert path.is_dir() or path.with_suffix(".py").is_file()
