"""Recipes by name: those that come with the package, from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import eyas
from eyas.errors import ConfigError
from eyas.recipes import FOLDER, SWEEPS, find_recipe, read_recipe
from eyas.train.recipe import load_recipe

SETTINGS = ("drafter.target=MODEL", "drafter.store=STORE", "drafter.output=RUN")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["eagle1", "eagle3.yaml", "eagle3_8b", "mla", "mlp", "smollm2/eagle3", "pipeline"])
def test_a_name_is_a_file_of_the_package(name: str) -> None:
    path = find_recipe(name)
    assert path.is_file()
    assert path.is_relative_to(Path(str(eyas.__file__)).parent)
    assert path == FOLDER / f"{name.removesuffix('.yaml')}.yaml"


def test_a_recipe_is_loaded_by_name() -> None:
    assert load_recipe("eagle3", SETTINGS) == load_recipe(FOLDER / "eagle3.yaml", SETTINGS)
    assert find_recipe("eagle3", SWEEPS) == FOLDER / SWEEPS / "eagle3.yaml"


def test_a_file_comes_before_a_name() -> None:
    Path("eagle3").write_text("lm: {}\n", encoding="utf-8")
    assert read_recipe("eagle3") == {"lm": {}}


def test_a_recipe_may_extend_one_of_the_package() -> None:
    Path("mine.yaml").write_text("extends: eagle3\ndrafter:\n  target: MODEL\n", encoding="utf-8")
    assert read_recipe("mine.yaml") == read_recipe("eagle3") | {
        "drafter": read_recipe("eagle3")["drafter"] | {"target": "MODEL"}
    }


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no recipe of that name: did you mean eagle3\? .*eagle3_8b"):
        find_recipe("recipes/eagle33.yaml")
    with pytest.raises(ConfigError, match=r"no sweep of that name \(eyas comes with data, eagle3\)"):
        find_recipe("nothing", SWEEPS)
