"""Acceptance by order, for benchmarks: as many tokens as asked, as far as drafts go, and never unmarked."""

from __future__ import annotations

import pytest
import torch

from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.tree import DraftTree, NodeLogits, parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import SyntheticWalk

from .. import tiny
from .emulation import admit_all
from .test_typical import tree_of


def test_the_first_path_is_followed_as_far_as_asked() -> None:
    logits = torch.zeros(1, 6, 4)
    logits[..., 3] = 1.0  # the target would accept none of these nodes
    tree = tree_of([1, 2, 0, 1, 2], [-1, -1, 0, 2, 3], 4)  # 1 -> 0 -> 1 -> 2, and 2 beside the first
    sampler = admit_all([SamplingParams()], 4)
    for length, path in ((1.0, [0]), (2.0, [0, 1]), (3.0, [0, 1, 3]), (9.0, [0, 1, 3, 4, 5])):
        walk = SyntheticWalk(length)(NodeLogits.of(logits), tree, sampler, range(1))
        assert walk.path.tolist()[0][: len(path)] == path
        assert walk.accepted.tolist() == [len(path) - 1]
        assert walk.tokens.tolist()[0][len(path) - 1] == 3
    empty = DraftTree.empty(1, torch.device("cpu"))
    assert SyntheticWalk(3.0)(NodeLogits.of(logits[:, :1]), empty, sampler, range(1)).accepted.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain:4", "dynamic:4,3,8"])
def test_rounds_emit_that_many_tokens_on_average(tree: str, temperature: float) -> None:
    speculation = Speculation(tiny.drafter("eagle3"), parse_tree(tree))
    engine = Engine(tiny.target(), None, speculation, rule=SyntheticWalk(2.4), batch_size=4)
    params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True)
    asked = [Request((5, 6, seed), params) for seed in range(8)]
    done = engine.generate(asked)
    passes = sum(one.stats.target_passes for one in done)
    assert sum(len(one.token_ids) for one in done) / passes == pytest.approx(2.4, abs=0.1)
    assert all(one.lossy for one in done)
    again = Engine(tiny.target(), None, speculation, rule=SyntheticWalk(2.4), batch_size=4).generate(asked)
    assert [one.token_ids for one in again] == [one.token_ids for one in done]


def test_less_than_a_token_a_pass_is_refused() -> None:
    for length in (0.9, float("nan")):
        with pytest.raises(UsageError, match="at least one token"):
            SyntheticWalk(length)
