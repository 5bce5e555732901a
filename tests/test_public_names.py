"""What `import eyas` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eyas

NAMES = {
    "Chunk": "eyas.types",
    "Completion": "eyas.types",
    "Conversation": "eyas.engine.conversation",
    "Engine": "eyas.engine.engine",
    "EyasError": "eyas.errors",
    "Request": "eyas.types",
    "SamplingParams": "eyas.types",
    "Stats": "eyas.types",
    "load": "eyas.engine.load",
}


def test_the_list_is_exact() -> None:
    assert sorted(eyas.__all__) == sorted([*NAMES, "__version__"]) == sorted(dir(eyas))


@pytest.mark.parametrize(("name", "home"), NAMES.items())
def test_a_name_comes_from_its_home(name: str, home: str) -> None:
    assert getattr(eyas, name).__module__ == home


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'eyas' has no attribute 'Tokenizer'"):
        eyas.Tokenizer  # noqa: B018


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import eyas; eyas.Stats",
        "from eyas.cli.app import app; app(['--help'], standalone_mode=False)",
        "from eyas.cli.app import app; app(['generate', '--help'], standalone_mode=False)",
        "from eyas.cli.app import app; app(['bench', '--help'], standalone_mode=False)",
    ],
)
def test_neither_importing_nor_help_loads_torch(code: str) -> None:
    heavy = "[name for name in ('torch', 'transformers', 'rich.table') if name in sys.modules]"
    assert run(f"import sys; {code}; print({heavy})") == "[]"
