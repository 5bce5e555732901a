"""Warm starts: same weights, a draft vocabulary re-mapped by target ids, every difference named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.drafters.network import DraftNetwork
from eyas.errors import DrafterMismatchError
from eyas.train.drafter.train import warm_start

from ... import tiny

TAPS = (1, 2, 4)


def network(seed: int, ids: list[int] | None = None, **settings: Any) -> DraftNetwork:
    made = tiny.eagle3_module(seed, **settings)
    if ids is not None:
        made.set_vocabulary(torch.tensor(ids))
    return made


def test_the_same_shape_is_copied_whole() -> None:
    source, fresh = network(1), network(2)
    fresh.set_vocabulary(source.target_ids)
    assert warm_start(fresh, TAPS, source, "old") == source.config.draft_vocab_size
    for name, tensor in source.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_another_vocabulary_is_mapped_by_target_ids() -> None:
    source = network(1, [2, 5, 9, 40], draft_vocab_size=4)
    fresh = network(2, [0, 5, 7, 9, 41], draft_vocab_size=5)
    rows = {2: None, **{i: row.clone() for i, row in zip([0, 5, 7, 9, 41], fresh.lm_head.weight, strict=True)}}
    assert warm_start(fresh, TAPS, source, "old") == 2
    assert fresh.target_ids.tolist() == [0, 5, 7, 9, 41]
    assert torch.equal(fresh.lm_head.weight[1], source.lm_head.weight[1])
    assert torch.equal(fresh.lm_head.weight[3], source.lm_head.weight[2])
    for draft_id, token in ((0, 0), (2, 7), (4, 41)):
        assert torch.equal(fresh.lm_head.weight[draft_id], rows[token])
    assert torch.equal(fresh.layers[0].mlp.up_proj.weight, source.layers[0].mlp.up_proj.weight)


def test_every_difference_is_listed() -> None:
    source = network(1, intermediate_size=32, norm_output=True)
    with pytest.raises(DrafterMismatchError, match="old") as error:
        warm_start(network(2), TAPS, source, "old")
    assert "intermediate_size: 32 there, 48 in the recipe" in str(error.value)
    assert "norm_output: True there, False in the recipe" in str(error.value)
    with pytest.raises(DrafterMismatchError, match="taps"):
        warm_start(network(2), (1, 2, 3), network(1, taps=[1, 2, 4]), "old")
