"""The Python versions that the project promises: its settings agree, and nothing needs a newer one.

mypy refuses functions of the standard library that the oldest lacks, ruff its syntax; here is what neither sees.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from .source import FILES, ids, parsed

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROMISED = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)


def test_settings_agree_on_the_oldest_python() -> None:
    oldest = PROMISED[0]
    assert f'requires-python = ">={oldest}"' in PROJECT
    assert f'target-version = "py{oldest.replace(".", "")}"' in PROJECT  # ruff's
    assert f'python_version = "{oldest}"' in PROJECT  # mypy's
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("job", ["test", "wheel"])
def test_continuous_integration_runs_every_promised_python(job: str) -> None:
    """`test`: all tests, which run every verb; `wheel`: every command of the README, as installed."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"][job]["strategy"]["matrix"]["python"] == PROMISED
    assert f"make {job}" in [step.get("run") for step in workflow["jobs"][job]["steps"]]


def test_class_variables_have_types() -> None:
    """Before Python 3.11, get_type_hints raises an error for a bare `ClassVar` or `Final`."""
    bare = [
        f"{ids(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in ("ClassVar", "Final")
    ]
    assert not bare, bare
