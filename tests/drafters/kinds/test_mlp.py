"""The MLP head against its definition; dropout in training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.drafters.kinds.mlp import MlpConfig, MlpNetwork

from ... import tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "deep": {"depth": 4}, "no gate": {"gate": False}, "norm": {"norm": True},
    "no tokens": {"embedding": "none"},
}  # fmt: skip


def attend(*_: object) -> torch.Tensor:
    raise AssertionError("an mlp head has no attention")


@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_its_definition(name: str) -> None:
    network = tiny.network("mlp", **VARIANTS[name])
    p = dict(network.state_dict())
    tokens = torch.arange(5)
    state = torch.randn(5, tiny.HIDDEN)
    fed, normed = network.step(tokens[None], state[None], torch.zeros(1, 5), attend)
    x = state if name == "no tokens" else torch.cat((p["embed_tokens.weight"][tokens], state), dim=-1)
    for i in range(VARIANTS[name].get("depth", 2)):
        x = x @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"]
        x = x * x.sigmoid()
    if name != "no gate":
        share = 1 / (1 + (-p["gate"]).exp())
        x = share * x + (1 - share) * state
    torch.testing.assert_close(fed[0], x)
    if name == "norm":
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p["norm.weight"]
    torch.testing.assert_close(normed[0], x)
    assert network.kv_shapes == []


def test_dropout_is_for_training() -> None:
    network = MlpNetwork(
        MlpConfig(hidden_size=32, target_hidden_size=32, vocab_size=9, draft_vocab_size=9, dropout=0.5)
    )
    given = (torch.arange(5)[None], torch.randn(1, 5, 32), torch.zeros(1, 5), attend)
    assert not torch.equal(network.step(*given)[0], network.step(*given)[0])
    network.eval()
    assert torch.equal(network.step(*given)[0], network.step(*given)[0])
