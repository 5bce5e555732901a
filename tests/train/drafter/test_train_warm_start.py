"""Warm starts: same weights, a draft vocabulary re-mapped by target ids, every difference named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.errors import DrafterMismatchError
from eyas.train.drafter.train import warm_start

from ... import tiny

TAPS = (1, 2, 4)


def network(seed: int, ids: list[int] | None = None, **settings: Any) -> DraftNetwork:
    made = tiny.eagle3_module(seed, **settings)
    if ids is not None:
        set_vocabulary(made, torch.tensor(ids))
    return made


def test_the_same_shape_is_copied_whole() -> None:
    source = network(1)
    fresh = network(2)
    set_vocabulary(fresh, source.target_ids)
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


@pytest.mark.parametrize(
    "window",
    [{"draft_window": 16}, {"sliding_window": 8, "layer_types": ["sliding_attention"], "sliding_anchored": True}],
)
def test_a_window_is_no_difference(window: dict[str, Any]) -> None:
    """It changes what is seen, not what is learned with: a drafter gets one for longer contexts."""
    source = network(1)
    fresh = network(2, **window)
    set_vocabulary(fresh, source.target_ids)
    assert warm_start(fresh, TAPS, source, "old") == source.config.draft_vocab_size
    assert torch.equal(fresh.lm_head.weight, source.lm_head.weight)


def test_every_difference_is_listed() -> None:
    source = network(1, intermediate_size=32, norm_output=True)
    with pytest.raises(DrafterMismatchError, match="old") as error:
        warm_start(network(2), TAPS, source, "old")
    assert "intermediate_size: 32 there, 48 in the recipe" in str(error.value)
    assert "norm_output: True there, False in the recipe" in str(error.value)
    with pytest.raises(DrafterMismatchError, match="taps"):
        warm_start(network(2), (1, 2, 3), network(1, taps=[1, 2, 4]), "old")


def test_p_eagle_starts_as_the_eagle3_drafter_it_extends() -> None:
    """Its first guess is that of EAGLE-3: further layers add nothing yet."""
    source = tiny.network("eagle3", 1)
    fresh = tiny.network("peagle", 2, num_hidden_layers=3)
    set_vocabulary(fresh, source.target_ids)
    mask = fresh.state_dict()["mask_hidden"].clone()
    assert warm_start(fresh, TAPS, source, "old") == source.config.draft_vocab_size
    assert torch.equal(fresh.state_dict()["mask_hidden"], mask)
    tokens = torch.randint(tiny.VOCAB, (1, 5))
    taps = torch.randn(1, 5, 3, tiny.HIDDEN)

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    ours, theirs = (
        made.logits(made.step(tokens, made.fuse(taps), torch.arange(5)[None], attend)[1]) for made in (fresh, source)
    )
    assert torch.equal(ours, theirs)
    with pytest.raises(DrafterMismatchError, match="intermediate_size: 40 there, 48 in the recipe"):
        warm_start(fresh, TAPS, tiny.network("eagle3", 1, intermediate_size=40), "old")
    with pytest.raises(DrafterMismatchError, match="num_hidden_layers: 4 there, 3 in the recipe"):
        warm_start(fresh, TAPS, tiny.network("eagle3", 1, num_hidden_layers=4), "old")
    with pytest.raises(DrafterMismatchError, match="it is a PEagleNetwork, but the recipe makes a Eagle3Network"):
        warm_start(source, TAPS, fresh, "new")


def test_dspark_starts_from_dflash() -> None:
    source = tiny.network("dflash", 1)
    fresh = tiny.network("dspark", 2, sample_from_anchor=False)
    set_vocabulary(fresh, source.target_ids)
    heads = {name: tensor.clone() for name, tensor in fresh.state_dict().items() if name not in source.state_dict()}
    assert warm_start(fresh, TAPS, source, "old") == tiny.VOCAB
    found = fresh.state_dict()
    assert heads
    assert all(torch.equal(found[name], tensor) for name, tensor in (source.state_dict() | heads).items())
    with pytest.raises(DrafterMismatchError, match="sample_from_anchor: False there, True in the recipe"):
        warm_start(tiny.network("dspark", 2), TAPS, source, "old")
