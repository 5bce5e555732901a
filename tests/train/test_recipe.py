"""Every shipped recipe parses, strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.config import load_config
from eyas.errors import ConfigError
from eyas.targets import Target
from eyas.targets.loading import load_embedding_and_head
from eyas.train.drafter.shape import fresh_network
from eyas.train.recipe import Recipe
from eyas.tree import parse_tree

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


KINDS = ("eagle1", "eagle3", "eagle3_1", "mla", "mlp")


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"demo_target", "demo_drafter", *KINDS}


@pytest.fixture(scope="module")
def demo() -> Target:
    return load_embedding_and_head("demo", dtype="float32", device="cpu")


@pytest.mark.parametrize("name", [*KINDS, "demo_drafter"])
def test_recipe_builds_its_network(name: str, demo: Target) -> None:
    recipe = load_config(Recipe, next(path for path in RECIPES if path.stem == name)).drafter
    assert recipe is not None
    assert recipe.shape.kind == name.replace("_", ".") or name == "demo_drafter"
    network = fresh_network(recipe.shape, demo, torch.arange(recipe.shape.draft_vocab_size or demo.vocab_size))
    assert any(p.requires_grad for p in network.parameters())
    states = torch.zeros(1, 2, network.config.tap_count, demo.hidden_size)
    assert network.fuse(states).shape == (1, 2, demo.hidden_size)
    if recipe.validation.tree is not None:
        parse_tree(recipe.validation.tree)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipe_parses(path: Path) -> None:
    load_config(Recipe, path)


def test_overrides_reach_and_typos_do_not() -> None:
    path = next(p for p in RECIPES if p.name == "demo_drafter.yaml")
    recipe = load_config(Recipe, path, ["drafter.loop.steps=7"])
    assert recipe.drafter is not None
    assert recipe.drafter.loop.steps == 7
    with pytest.raises(ConfigError, match=r"drafter\.loop\.step:"):
        load_config(Recipe, path, ["drafter.loop.step=7"])


def test_a_recipe_has_one_section(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="one section"):
        load_config(Recipe, tmp_path / "r.yaml")
