"""The model runner: trees of a fixed shape learn what their nodes are worth, if their nodes are chosen by that."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.tree.acceptance import LearnedValues
from eyas.types import Request, SamplingParams

from .. import tiny


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("tree", "learns"), [("shared:3,3,12,6", True), ("dynamic:3,3,6", False)])
def test_a_shape_that_goes_by_learned_values_learns_them(tree: str, learns: bool, temperature: float) -> None:
    speculation = Speculation(tiny.eagle3_drafter(), parse_tree(tree))
    engine = Engine(tiny.target(), None, speculation, batch_size=3)
    fresh = LearnedValues().table.values
    asked = [
        Request(tuple(prompt), SamplingParams(max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(9, 5, 7))
    ]
    plain = Engine(tiny.target()).generate(asked)
    assert [one.token_ids for one in engine.generate(asked)] == [one.token_ids for one in plain]
    learned = engine._core.runner.planner.values.table.values
    changed = [not np.allclose(learned[group], fresh[group]) for group in (0, 1)]  # of greedy rows, of sampled ones
    assert changed == [learns and temperature == 0.0, learns and temperature > 0.0]
