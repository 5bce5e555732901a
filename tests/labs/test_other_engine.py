"""Another engine's program: its line, from options and from what a verb adds."""

from __future__ import annotations

import sys

import pytest

from eyas.errors import UsageError
from eyas.labs.other_engine import EngineProgram


def test_vllms_line() -> None:
    program = EngineProgram("vllm", f"{sys.executable} serve", ("--enforce-eager",))
    address = ["--host", "127.0.0.1", "--port", "8123"]
    assert program.line("org/model", 8123)[1:] == ["serve", "org/model", *address, "--enforce-eager"]
    assert program.line("org/model", 8123, ["--dtype", "float16"])[1:] == [
        "serve", "org/model", *address, "--dtype", "float16", "--enforce-eager",
    ]  # fmt: skip
    assert EngineProgram("vllm", f"{sys.executable} -m x").line("m", 1)[3:5] == ["--model", "m"]


def test_a_program_that_is_not_there() -> None:
    for command in ("no-such-program serve", ""):
        with pytest.raises(UsageError, match=rf"`engine_command=`: there is no program '{command}' on this machine"):
            EngineProgram("vllm", command).line("m", 1)
    with pytest.raises(UsageError, match=r"vLLM isn't installed here: `engine_command=` says where it is"):
        EngineProgram("vllm").line("m", 1)
