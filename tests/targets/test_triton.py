"""Runs the tests of passes in Triton in a process of their own: the interpreter must be on when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas.errors import UsageError
from eyas.targets import load_target, triton
from tests.toy.pair import TOY_TARGET

TESTS = Path(__file__).parent / "triton"


def test_where_kernels_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="run on a GPU, not on cpu, or leave out `kernels=`"):
        load_target(TOY_TARGET, device="cpu", kernels="triton")
    for other in ({"compiled": True}, {"attention": "sdpa"}):
        with pytest.raises(UsageError, match="leave out `compiled=` and `attention=`"):
            load_target(TOY_TARGET, device="cpu", kernels="triton", **other)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown kernels 'cuda'"):
        load_target(TOY_TARGET, device="cpu", kernels="cuda")
    monkeypatch.setattr(triton, "find_spec", lambda _: None)
    assert triton.why_unusable(torch.device("cuda")) == "triton isn't installed: pip install 'eyas[gpu]'"
    monkeypatch.setattr(triton, "find_spec", lambda _: "found")
    assert triton.why_unusable(torch.device("cuda")) is None


def _run(marks: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks, str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout, done.stdout[-1000:]


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    _run("not slow")


@pytest.mark.slow
def test_more_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    _run("slow")
