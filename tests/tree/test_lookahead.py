"""Lookahead's trees: which nodes hang where, and that scratch nodes are kept apart from those that may be accepted."""

from __future__ import annotations

import pytest
import torch

from eyas.errors import UsageError
from eyas.tree import DraftTree, parse_tree
from eyas.tree.lookahead import Branches, LookaheadTree, lookahead_trees

CPU = torch.device("cpu")
WINDOW = [[11, 12], [20, 21, 22], [30, 31, 32]]


def paths(tree: DraftTree, row: int) -> dict[tuple[int, ...], bool]:
    """Tokens from the root to each node -> whether it is a scratch node."""
    assert tree.scratch is not None
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    kept = [(path, bool(tree.scratch[row, i])) for i, path in enumerate(found) if tree.valid[row, i]]
    assert len(dict(kept)) == len(kept)
    return dict(kept)


def test_a_column_sees_the_first_level_up_to_itself_and_its_own_column_above() -> None:
    tree = lookahead_trees([Branches(WINDOW, [])], CPU)
    assert paths(tree, 0) == dict.fromkeys(
        [
            (11,),
            (11, 12),
            (20,),
            (11, 21),
            (11, 12, 22),
            (20, 30),
            (11, 21, 31),
            (11, 12, 22, 32),
        ],
        True,
    )
    assert tree.depth[0].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]  # positions
    assert tree.max_depth == 0  # nothing to walk


def test_ngrams_that_begin_alike_share_nodes_and_none_with_the_window() -> None:
    tree = lookahead_trees([Branches(WINDOW, [(11, 12), (11, 13), (5, 12)]), None], CPU)
    kept = tree.acceptable[0].nonzero().flatten().tolist()
    assert [tree.tokens[0, i].item() for i in kept] == [11, 12, 13, 5, 12]
    assert [tree.parents[0, i].item() for i in kept] == [-1, 8, 8, -1, 11]
    assert tree.max_depth == 2
    assert not tree.valid[1].any()
    assert tree.counted == 13 == int(tree.valid.sum())


def test_compact_trees_keep_their_scratch_nodes() -> None:
    tree = lookahead_trees([Branches(WINDOW[:1], [(1, 2)]), Branches(WINDOW, [(3, 4)])], CPU)
    cut = tree.only([True, False]).compact()
    assert cut.size == 4
    assert cut.scratch is not None
    assert cut.scratch[0].tolist() == [True, True, False, False]
    assert cut.acceptable.tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(15, 5, 15), (5, 3, 4), (2, 8, 3), (1, 3, 1)])
def test_no_row_has_more_nodes_than_its_spec_says(window: int, ngram: int, guesses: int) -> None:
    spec = parse_tree(f"lookahead:{window},{ngram},{guesses}")
    assert spec == LookaheadTree(window, ngram, guesses)
    most = 0
    for levels in range(1, ngram):  # a window as it fills
        width = window + ngram - 1 - levels
        rows = [[0] * (width - 1), *[[0] * width] * (levels - 1)]
        ngrams = [tuple(range(i, i + ngram - 1)) for i in range(guesses)] if levels == ngram - 1 else []
        most = max(most, lookahead_trees([Branches(rows, ngrams)], CPU).size)
        assert lookahead_trees([Branches(rows, ngrams)], CPU).size <= spec.max_nodes
    if ngram <= window:
        assert most == spec.max_nodes


def test_nobody_else_grows_them() -> None:
    with pytest.raises(UsageError, match="made by `method=lookahead` only"):
        LookaheadTree(5, 3, 4).start(1, CPU)
