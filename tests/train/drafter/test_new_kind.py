"""A kind that only its own file describes is trained, too: registering it is all that recipes need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eyas.data.features import FeatureBatch
from eyas.drafters.kinds import KINDS
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.shape import DrafterShape, drafter_config, fresh_network, shape_of
from eyas.train.loss.config import LossConfig
from eyas.train.loss.objective import DraftObjective

from ... import tiny
from ...interop.test_new_kind import KIND, SumNetwork
from ...toy.pair import TOY_TARGET


def test_a_recipe_sets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being known anywhere else; unknown ones are refused by name."""
    monkeypatch.setitem(KINDS, "sum", KIND)
    target = tiny.target()
    shape = DrafterShape.model_validate({"kind": "sum", "options": {"scale": 0.5}})
    config = drafter_config(shape, target)
    assert getattr(config, "scale") == 0.5  # noqa: B009
    assert shape_of(config, KIND, target.num_layers).options == {"scale": 0.5}
    with pytest.raises(ValueError, match="options: a drafter of kind sum has no rank, only scale"):
        DrafterShape.model_validate({"kind": "sum", "options": {"rank": 8}})
    with pytest.raises(ValueError, match="options: a drafter of kind mlp has none: leave out rank"):
        DrafterShape.model_validate({"kind": "mlp", "options": {"rank": 8}})


def test_a_recipe_names_it_and_its_network_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "sum", KIND)
    target = tiny.target()
    where = {"target": str(TOY_TARGET), "chats": "chats", "output": "run"}
    recipe = {**where, "shape": {"kind": "sum"}, "loop": {"steps": 1}}
    config = DrafterTrainConfig.model_validate(recipe)
    assert config.loss == LossConfig()
    network = fresh_network(config.shape, target, torch.arange(tiny.VOCAB))
    assert type(network) is SumNetwork
    torch.manual_seed(0)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, 4:] = True
    states = torch.randn(1, 9, 1, tiny.HIDDEN)
    batch = FeatureBatch(torch.randint(tiny.VOCAB, (1, 9)), mask, states, states[:, :, 0])
    head = nn.Linear(tiny.HIDDEN, tiny.VOCAB, bias=False)
    objective = DraftObjective(network, head, tiny.VOCAB, lambda _: batch, config.loss, False)
    objective.score(batch).loss.backward()  # type: ignore[no-untyped-call]
    gradient = network.mix.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
