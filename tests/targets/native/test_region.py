"""The threads of a native pass: the same results whoever computes a piece, and nobody waits for one who never comes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from eyas.machine import processor_flags
from eyas.targets.native import library

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not {"avx2", "fma"} <= processor_flags(), reason="needs a compiler, and AVX2"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of region.cpp, compiled."""
    made = tmp_path_factory.mktemp("region") / "region"
    kernels = Path(library.__file__).parent / "kernels"
    source = Path(__file__).parent / "region.cpp"
    flags = ["-O2", "-march=native", "-std=c++17", "-pthread", f"-I{kernels}"]
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(made)], check=True, timeout=300)
    return made


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("disturbance", "passes"),
    [("calm", 2000), ("yielding", 400), ("slow", 60), ("asleep", 400), ("none", 400)],
)
def test_results_are_those_of_one_thread(program: Path, disturbance: str, passes: int) -> None:
    """With helpers in time, that yield, hold pieces long, are started and never begin, or can't be started."""
    done = subprocess.run(
        [str(program), disturbance, str(passes)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "same\n")


def test_helpers_are_there_while_they_get_more_done(program: Path) -> None:
    """On an idle machine always, on a busy one in short trials; they are back within a second."""
    done = subprocess.run([str(program), "choice"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_helpers_come_back_in_a_long_pass(program: Path) -> None:
    """One that begins without them, as they hindered those before it."""
    done = subprocess.run([str(program), "long"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
