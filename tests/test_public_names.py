"""The public names, exactly; and that neither they nor the help import PyTorch before it is needed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import eyas

NAMES = [
    "Chunk",
    "Completion",
    "Conversation",
    "Engine",
    "EyasError",
    "Request",
    "SamplingParams",
    "Stats",
    "__version__",
    "load",
]

LAZY = """
import sys
import eyas
from typer.testing import CliRunner
from eyas.cli.app import VERBS, app
for words in (["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
heavy = sorted({"torch", "transformers", "tokenizers", "numpy"} & set(sys.modules))
assert not heavy, heavy
assert eyas.EyasError.__module__ == "eyas.errors"
"""


def test_the_names_are_these() -> None:
    assert sorted(eyas.__all__) == NAMES
    assert dir(eyas) == eyas.__all__
    for name in NAMES:
        value = getattr(eyas, name)
        assert name == "__version__" or inspect.isclass(value) or inspect.isfunction(value)


def test_another_name_is_refused_like_any_module_s() -> None:
    with pytest.raises(AttributeError, match="module 'eyas' has no attribute 'Drafter'"):
        eyas.Drafter  # noqa: B018
    assert not hasattr(eyas, "_HOME")


def test_import_and_help_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
