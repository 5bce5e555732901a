"""Shell completion: bash, with the script that `eyas --show-completion` prints there, asks what may follow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPLETE = """
eval "$SCRIPT"
complete -p eyas
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_eyas_completion eyas
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One with a program `eyas` in its path, and what that says is to be run in bash."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "eyas"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from eyas.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    found = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return {**found, "SCRIPT": bash("eyas --show-completion; true", found)}


def bash(text: str, environment: dict[str, str]) -> str:
    """What it writes."""
    command = ["bash", "--norc", "-c", text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("eyas gen", ["generate"]),
        ("eyas bench ''", ["accuracy", "checkpoints", "measure", "methods", "report", "serve", "trees"]),
        ("eyas generate smollm2 --temp", ["--temperature"]),
        ("eyas bench smollm2 --rep", ["--repeats", "--repetition-penalty"]),
        ("eyas generate smollm2 --dtype b", ["bfloat16"]),
        ("eyas train eagle3_1", ["eagle3_1"]),
        ("eyas sweep ea", ["eagle3"]),
        ("eyas train my_own", []),  # bash offers files where nothing is offered: -o default
        ("eyas generate smollm2 --prompt-file my", []),
    ],
)
def test_bash_completes(words: str, offered: list[str], environment: dict[str, str]) -> None:
    shown = bash(COMPLETE.format(words=words), environment).splitlines()
    assert shown[0].startswith("complete -o default -F _eyas_completion eyas")
    assert sorted(line for line in shown[1:] if line) == offered
