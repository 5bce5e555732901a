"""What is built to be installed holds everything that `eyas` needs, and nothing of its tests."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from eyas.targets.native.builds import BUILDS

ROOT = Path(__file__).parent.parent
PARTS = ("src", "tests", "docs", "benchmarks", "examples")
NEEDED = {
    "__main__.py", "py.typed", "bench/report/page.html.j2", "assets/smollm2/model.safetensors",
    "assets/smollm2/config.json", "assets/smollm2/README.md", "train/lm/chat_template.jinja", "targets/__init__.py",
    "recipes/eagle3.yaml", "recipes/smollm2/sizes.yaml", "recipes/sweeps/eagle3.yaml",
    "serve/playground/page.html", "serve/playground/style.css", "serve/playground/script/main.js",
}  # fmt: skip
STOCK_IGNORED = {
    "build", "develop-eggs", "dist", "downloads", "eggs", "lib", "lib64", "parts", "sdist", "var", "wheels", "target",
    "instance", "env", "venv", "ENV", "cover", "htmlcov", "site", "out", "bin", "obj", "tmp", "vendor",
}  # fmt: skip


def ours(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def names(folder: Path) -> set[str]:
    """Files below a folder, as archives name them."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if ours(path)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the beginnings of its files: which of them are taken doesn't depend on how large they are."""
    copy = tmp_path_factory.mktemp("project")
    for part in PARTS:
        for path in filter(ours, (ROOT / part).rglob("*")):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file:
                target.write_bytes(file.read(1000))
    builds = "src/eyas/targets/native/builds.py"  # which is run
    for name in ("pyproject.toml", "hatch_build.py", builds, "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


def test_the_source_has_what_is_looked_for() -> None:
    assert names(ROOT / "src" / "eyas") >= NEEDED


def test_no_folder_is_called_as_stock_gitignores_call_what_is_built() -> None:
    """Tools that honor such a file would drop it."""
    folders = {
        folder for name in names(ROOT / "src" / "eyas") if name.endswith(".py") for folder in name.split("/")[:-1]
    }
    assert not folders & STOCK_IGNORED


COMPILER = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
echo library > "$2"
"""


@pytest.mark.parametrize("native", [True, False])
def test_the_wheel_holds_the_package_its_kernels_and_nothing_else(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """A wheel that is made without a compiler, or for other machines, is pure Python."""
    (tmp_path / "cxx").write_text(COMPILER)
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64" if native else "riscv64")
    (path,) = WheelBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        inside = set(wheel.namelist())
    of_package = {name.removeprefix("eyas/") for name in inside if name.startswith("eyas/")}
    libraries = {name for name in of_package if name.startswith("targets/native/prebuilt/")}
    assert {name.split("/")[-1].rpartition("-")[0] for name in libraries} == (
        {build.name for build in BUILDS} if native else set()
    )
    assert path.endswith("-py3-none-linux_x86_64.whl" if native else "-py3-none-any.whl")
    assert of_package - libraries == names(ROOT / "src" / "eyas")
    described = {name for name in inside if name.split("/")[0].endswith(".dist-info")}
    assert len(of_package) + len(described) == len(inside)
    assert any(name.endswith("/licenses/LICENSE") for name in described)


def test_the_sdist_holds_what_the_wheel_is_made_from_and_its_tests(project: Path, tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(project)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as sdist:
        inside = {name.split("/", 1)[1] for name in sdist.getnames()}
    for part in PARTS:
        assert {name for name in inside if name.startswith(f"{part}/")} == {
            f"{part}/{name}" for name in names(ROOT / part)
        }
    assert inside >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
