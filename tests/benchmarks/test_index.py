"""The scripts of `benchmarks/`: each starts, and the index names all of them and all of their results."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INDEX = (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def module_of(path: Path) -> str:
    parts = path.relative_to(BENCHMARKS.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__main__")


# `inside` is run by the Python of another engine
SCRIPTS = {
    module_of(path): path
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8") and path.parent.name != "inside"
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_script_starts(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (module, f"{module}.__main__"):  # one that a test has imported is run anew
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_index_names_every_script() -> None:
    for module, path in SCRIPTS.items():
        file = f"{module.removeprefix('benchmarks.').replace('.', '/')}{'/' if path.name == '__main__.py' else '.py'}"
        assert f"| `{file}` |" in INDEX
        assert f"python -m {module} " in INDEX or file == "engines/"


def test_commands_of_the_index_are_scripts() -> None:
    commands = re.findall(r"python -m (\S+)", INDEX)
    assert commands
    assert set(commands) <= set(SCRIPTS)


def test_the_index_names_every_result_once() -> None:
    results = {path.name for path in (BENCHMARKS / "results").rglob("*.json")}
    named = re.findall(r"`(\w+\.json)`", INDEX)
    assert sorted(named) == sorted(results)


def test_the_index_names_every_folder_of_results() -> None:
    folders = [path.name for path in (BENCHMARKS / "results").iterdir()]
    assert sorted(re.findall(r"`results/([^/`]+)/`", INDEX)) == sorted(folders)


def test_pages_of_the_index_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", INDEX):
        assert (BENCHMARKS / link).exists(), link
