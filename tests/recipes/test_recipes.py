"""Every shipped recipe parses, strictly, and makes the network that it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.assets import SMOLLM2
from eyas.config import read_yaml
from eyas.recipes import known_recipes
from eyas.targets import Target
from eyas.targets.loading import load_embedding_and_head
from eyas.train.drafter.shape import fresh_network
from eyas.train.recipe import load_recipe
from eyas.tree import parse_tree

SOURCE = Path(__file__).parents[2] / "src/eyas"
PARTS = ("smollm2/sizes", "smollm2/blocks")  # what others extend
RECIPES = {name: path for name, path in known_recipes().items() if path.is_relative_to(SOURCE) and name not in PARTS}
"""Name -> file, for eyas's own recipes, those of its labs among them."""
KINDS = (
    "dflash", "dflash2", "domino", "dspark", "eagle1", "eagle3", "eagle3_1", "jetspec", "lilicorr", "mla", "mlp",
    "medusa", "mtp", "peagle", "xpress",
)  # fmt: skip
WHERE = ("drafter.target=MODEL", "drafter.store=STORE", "drafter.output=RUN")


def test_there_are_recipes() -> None:
    names = RECIPES.keys()
    assert names >= {"smollm2", "pipeline", *KINDS, *(f"smollm2/{kind}" for kind in KINDS)}
    assert names >= {"eagle3_8b", "eagle3_32b", "eagle3_moe", "eagle3_mla"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses(name: str) -> None:
    """Recipes of a kind, for any target, leave open where target, store and run are; all others are whole."""
    path = RECIPES[name]
    anywhere = name in KINDS
    recipe = load_recipe(path, WHERE if anywhere else ())
    assert recipe.lm is None
    if anywhere:
        assert not {"target", "store", "output"} & read_yaml(path)["drafter"].keys()
    if recipe.drafter is not None and recipe.drafter.validation.tree is not None:
        parse_tree(recipe.drafter.validation.tree)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_extended(name: str) -> None:
    assert any(Path(name).name in str(read_yaml(other).get("extends")) for other in RECIPES.values())


@pytest.fixture(scope="module")
def smollm2() -> Target:
    return load_embedding_and_head(SMOLLM2, dtype="float32", device="cpu")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*(f"smollm2/{kind}" for kind in KINDS), "smollm2", "pipeline"])
def test_a_recipe_for_smollm2_builds_its_network(name: str, smollm2: Target) -> None:
    recipe = load_recipe(name).drafter
    assert recipe is not None
    assert recipe.shape.kind == Path(name).stem.replace("_", ".") or name in ("smollm2", "pipeline")
    network = fresh_network(recipe.shape, smollm2, torch.arange(recipe.shape.draft_vocabulary(smollm2.vocab_size)))
    assert any(p.requires_grad for p in network.parameters())
    states = torch.zeros(1, 2, network.config.tap_count, smollm2.hidden_size)
    assert network.fuse(states).shape == (1, 2, smollm2.hidden_size)
    assert recipe.loop.epochs is None
    assert recipe.max_length != "auto"


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_for_any_target_leaves_sizes_to_it(kind: str) -> None:
    recipe = load_recipe(kind, WHERE).drafter
    assert recipe is not None
    assert recipe.shape.kind == kind.replace("_", ".")
    assert recipe.shape.draft_vocab_size == recipe.batch_tokens == "auto"
    assert recipe.shape.intermediate_size is None
    assert recipe.loop.epochs is not None
    assert recipe.max_length == (2048 if kind == "eagle1" else "auto")
