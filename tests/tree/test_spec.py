"""Textual names of tree shapes: what is accepted and what is refused."""

from __future__ import annotations

import pytest
import torch

from eyas.errors import UsageError
from eyas.tree import is_auto, parse_tree
from eyas.tree.dynamic import DynamicTree
from eyas.tree.spec import PRESETS
from eyas.tree.static import StaticTree


def test_accepted_forms() -> None:
    chain = parse_tree("chain:5")
    assert isinstance(chain, StaticTree)
    assert (chain.depth, len(chain.nodes)) == (5, 5)
    assert parse_tree("dynamic:5,6,24") == DynamicTree(5, 6, 24)
    assert parse_tree("dynamic:5,6,24,0.02") == DynamicTree(5, 6, 24, 0.02)
    for name, paths in PRESETS.items():
        static = parse_tree(f"static:{name}")
        assert isinstance(static, StaticTree)
        assert set(static.nodes) == set(paths)


@pytest.mark.parametrize("name", ["chain:3", "static:slim", "static:eagle1", "dynamic:1,3,2", "dynamic:4,3,9",
    "dynamic:9,3,4", "dynamic:3,2,100", "shared:4,3,9", "shared:9,1,4", "shared:2,3,8,5"])  # fmt: skip
def test_a_round_takes_no_more_columns_than_it_says(name: str) -> None:
    """Those of the tree in the target's cache, and those of the guesses that the drafter runs in its own."""
    spec = parse_tree(name)
    growth = spec.start(1, torch.device("cpu"))
    width = 1
    guesses = 0
    while True:
        tokens = torch.arange(width * growth.fanout).view(1, width, growth.fanout)
        frontier = growth.expand(torch.zeros(tokens.shape), tokens)
        if frontier is None:
            break
        width = frontier.tokens.shape[1]
        guesses += width
    grown = 1 + max(growth.tree().size, guesses)
    assert spec.columns == grown if not name.startswith("shared") else spec.columns >= grown


@pytest.mark.parametrize(
    "text",
    [
        "", "chain", "chain:", "chain:x", "chain:2.5", "chain:2,3", "tree:3", "dynamic:5,6", "dynamic:5,6,24,0.1,9",
        "dynamic:5,6.5,24", "dynamic:a,b,c", "dynamic:5,6,nan", "dynamic:5,6,inf", "chain:nan", "chain:inf",
        "lookahead:5,3", "lookahead:5,3,4,0.1",
    ],
)  # fmt: skip
def test_other_forms_are_refused_with_the_accepted_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"chain:K, static:NAME, dynamic:DEPTH,TOPK,NODES"):
        parse_tree(text)


@pytest.mark.parametrize(
    "text",
    [
        "chain:0",
        "chain:-1",
        "lookahead:5,2,4",
        "lookahead:0,3,4",
        "dynamic:0,1,1",
        "dynamic:1,1,1,1.0",
        "dynamic:1,1,1,nan",
        "chain:100000",
        "chain:1025",
        "dynamic:257,1,1",
        "dynamic:1,257,1",
        "dynamic:4,4,100000",
        "shared:257,1,9",
        "shared:1,1,100000",
        "lookahead:129,3,4",
        "lookahead:5,17,4",
        "lookahead:5,3,129",
    ],
)
def test_impossible_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tree(text)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown static tree 'eagle9': known are eagle1, mc_sim_7b_63, slim"):
        parse_tree("static:eagle9")


def test_what_asks_for_a_controller() -> None:
    assert is_auto("auto")
    assert is_auto("auto:chain")
    assert not is_auto("chain:3")
    assert not is_auto(None)
    with pytest.raises(UsageError, match="unknown tree 'auto:tree': write auto or auto:chain"):
        is_auto("auto:tree")
