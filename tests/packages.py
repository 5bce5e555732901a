"""Other people's packages, installed in a folder of their own that a test puts on the path."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from eyas import plugins


def build_and_install(project: Path, site: Path) -> Path:
    """Install a project into the folder `site` as pip does: its wheel, unpacked."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(site.parent / "wheels"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def install(site: Path, package: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> Path:
    """Install a package with these entry points (group -> name -> value) and modules (name -> source)."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = (
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    return site


@contextmanager
def on_the_path(site: Path) -> Iterator[None]:
    """What is installed in `site` can be imported, and is found by its entry points."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        plugins.installed.cache_clear()
        try:
            yield
        finally:
            plugins.installed.cache_clear()
            for name in set(sys.modules) - before:
                found = getattr(sys.modules[name], "__file__", None)
                if found and Path(found).is_relative_to(site):
                    del sys.modules[name]
