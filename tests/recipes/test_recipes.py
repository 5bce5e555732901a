"""Every shipped recipe parses, strictly, and makes the network that it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.assets import SMOLLM2
from eyas.config import read_yaml
from eyas.targets import Target
from eyas.targets.loading import load_embedding_and_head
from eyas.train.drafter.shape import fresh_network
from eyas.train.recipe import load_recipe
from eyas.tree import parse_tree

RECIPES = Path(__file__).parents[2] / "src/eyas/recipes"
SWEEPS = set((RECIPES / "sweeps").glob("*.yaml"))  # tests/sweep/test_recipes.py
PARTS = {RECIPES / "smollm2" / name for name in ("sizes.yaml", "blocks.yaml")}  # what others extend
FILES = sorted(set(RECIPES.rglob("*.yaml")) - SWEEPS - PARTS)
KINDS = (
    "dflash", "dflash2", "domino", "dspark", "eagle1", "eagle3", "eagle3_1", "jetspec", "lilicorr", "mla", "mlp",
    "medusa", "mtp", "peagle", "xpress",
)  # fmt: skip
WHERE = ("drafter.target=MODEL", "drafter.store=STORE", "drafter.output=RUN")


def named(path: Path) -> str:
    return str(path.relative_to(RECIPES).with_suffix(""))


def test_there_are_recipes() -> None:
    names = {named(path) for path in FILES}
    assert names >= {"smollm2", "pipeline", *KINDS, *(f"smollm2/{kind}" for kind in KINDS)}
    assert names >= {"eagle3_8b", "eagle3_32b", "eagle3_moe", "eagle3_mla"}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_recipe_parses(path: Path) -> None:
    """Recipes of a kind, for any target, leave open where target, store and run are; all others are whole."""
    anywhere = path.parent == RECIPES and path.stem in KINDS
    recipe = load_recipe(path, WHERE if anywhere else ())
    assert recipe.lm is None
    if anywhere:
        assert not {"target", "store", "output"} & read_yaml(path)["drafter"].keys()
    if recipe.drafter is not None and recipe.drafter.validation.tree is not None:
        parse_tree(recipe.drafter.validation.tree)


@pytest.mark.parametrize("path", sorted(PARTS), ids=named)
def test_a_part_is_extended(path: Path) -> None:
    assert any(path.name in str(read_yaml(other).get("extends")) for other in FILES)


@pytest.fixture(scope="module")
def smollm2() -> Target:
    return load_embedding_and_head(SMOLLM2, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", [*(f"smollm2/{kind}" for kind in KINDS), "smollm2", "pipeline"])
def test_a_recipe_for_smollm2_builds_its_network(name: str, smollm2: Target) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml").drafter
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
    recipe = load_recipe(RECIPES / f"{kind}.yaml", WHERE).drafter
    assert recipe is not None
    assert recipe.shape.kind == kind.replace("_", ".")
    assert recipe.shape.draft_vocab_size == recipe.batch_tokens == "auto"
    assert recipe.shape.intermediate_size is None
    assert recipe.loop.epochs is not None
    assert recipe.max_length == (2048 if kind == "eagle1" else "auto")
