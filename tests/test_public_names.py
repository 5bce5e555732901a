"""The public names, exactly; and that neither they nor the help import PyTorch before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eyas

NAMES = {
    "Chunk": "eyas.types",
    "Completion": "eyas.types",
    "Conversation": "eyas.text.dialogue",
    "Engine": "eyas.engine.engine",
    "EyasError": "eyas.errors",
    "GrammarSpec": "eyas.types",
    "Request": "eyas.types",
    "SamplingParams": "eyas.types",
    "Stats": "eyas.types",
    "TokenLogprobs": "eyas.types",
    "load": "eyas.session",
}

LAZY = """
import sys
import eyas
from typer.testing import CliRunner
from eyas.cli.app import VERBS, app
for words in (["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
heavy = sorted({"torch", "transformers", "tokenizers", "numpy", "rich.table"} & set(sys.modules))
assert not heavy, heavy
assert eyas.EyasError.__module__ == "eyas.errors"
"""


def test_the_list_is_exact() -> None:
    assert sorted(eyas.__all__) == sorted([*NAMES, "__version__"]) == sorted(dir(eyas))


@pytest.mark.parametrize(("name", "home"), NAMES.items())
def test_a_name_comes_from_its_home(name: str, home: str) -> None:
    assert getattr(eyas, name).__module__ == home


def test_another_name_is_refused_like_any_module_s() -> None:
    with pytest.raises(AttributeError, match="module 'eyas' has no attribute 'Drafter'"):
        eyas.Drafter  # noqa: B018
    assert not hasattr(eyas, "_HOME")


def test_import_and_help_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
