"""Shapes of every kind, filled from every target, make networks that serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.errors import ConfigError, RequestError
from eyas.train.drafter.shape import DrafterShape, drafter_config, fresh_network, shape_of
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams

from ... import tiny

ALL = torch.arange(tiny.VOCAB)
PRESETS = ("eagle1", "eagle3", "eagle3.1", "mla", "mlp", "medusa")


@pytest.mark.parametrize(("kind", "name"), tiny.sample(PRESETS, [*tiny.ARCHITECTURES]))
def test_every_kind_for_every_target(name: str, kind: str) -> None:
    """A shape takes sizes from the target's config, and nothing else: always each kind for some, and each target."""
    target = tiny.target(name)
    torch.manual_seed(0)
    network = fresh_network(DrafterShape.model_validate({"kind": kind}), target, ALL).eval()
    drafter = drafter_of(network, network.config.taps or ())
    prompt = tuple(tiny.prompts(9)[0])
    done = Engine(target, None, Speculation(drafter, parse_tree("chain:2"))).generate(
        [Request(prompt, SamplingParams(max_tokens=4))]
    )
    assert done[0].token_ids == tiny.continuation(target.model, prompt, 4)


@pytest.mark.parametrize("kind", PRESETS)
def test_it_saves_and_loads(kind: str, tmp_path: Path) -> None:
    target = tiny.target("gemma3")
    network = fresh_network(DrafterShape.model_validate({"kind": kind}), target, ALL)
    save_network(network, tmp_path)
    loaded = load_network(tmp_path, target)
    assert type(loaded) is type(network)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), network.state_dict().values(), strict=True)
    )


def test_what_starts_from_the_target_and_what_trains() -> None:
    target = tiny.target()
    ids = ALL[::3]
    made = fresh_network(DrafterShape(draft_vocab_size=len(ids)), target, ids)
    assert torch.equal(made.embed_tokens.weight, target.model.get_input_embeddings().weight)
    assert torch.equal(made.lm_head.weight, target.model.get_output_embeddings().weight[ids])
    assert (made.embed_tokens.weight.requires_grad, made.lm_head.weight.requires_grad) == (False, True)
    frozen = fresh_network(DrafterShape(train_embedding=True, train_head=False), target, ALL)
    assert (frozen.embed_tokens.weight.requires_grad, frozen.lm_head.weight.requires_grad) == (True, False)
    light = fresh_network(DrafterShape(kind="mlp"), target, ALL)
    assert sorted(light.state_dict()) == ["d2t", "gate", "layers.0.bias", "layers.0.weight", "layers.1.bias",
                                          "layers.1.weight", "t2d"]  # fmt: skip


def test_presets_and_taps() -> None:
    target = tiny.target()
    preset = drafter_config(DrafterShape(kind="eagle3.1"), target).model_dump()
    assert (preset["fc_norm"], preset["norm_output"]) == (True, True)
    assert not drafter_config(DrafterShape(kind="eagle3.1", fc_norm=False), target).model_dump()["fc_norm"]
    assert drafter_config(DrafterShape(kind="eagle1"), target).taps == (tiny.LAYERS + 1,)
    early = drafter_config(DrafterShape(kind="mlp", taps=(3,)), target).model_dump()
    assert (early["taps"], early["norm"]) == ((3,), True)
    assert not drafter_config(DrafterShape(kind="mlp"), target).model_dump()["norm"]
    with pytest.raises(RequestError, match="between 0 and 5"):
        drafter_config(DrafterShape(taps=(1, 2, 9)), target)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"kind": "mlp", "layers": 2}, "kind mlp has no layers"),
        ({"kind": "eagle1", "fc_norm": True, "taps": (2,)}, "kind eagle1 has no fc_norm, taps"),
        ({"kind": "eagle3", "depth": 2}, "has no depth"),
        ({"kind": "mla", "head_dim": 8}, "has no head_dim"),
        ({"kind": "eagle3", "embedding": "none"}, "needs a token embedding"),
        ({"kind": "eagle1", "train_head": True}, "train_head needs a head of the drafter's own"),
        ({"kind": "mlp", "train_embedding": True}, "train_embedding needs an embedding of the drafter's own"),
        ({"kind": "oak"}, "kind"),
    ],
)
def test_options_that_would_be_ignored(shape: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DrafterShape.model_validate(shape)


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_a_narrow_drafter_can_share_nothing(part: str) -> None:
    narrow = {"hidden_size": 16, "train_embedding": part != "embedding", part: "shared"}
    with pytest.raises(ConfigError, match=f"target's {part} doesn't fit: set {part} to own"):
        fresh_network(DrafterShape.model_validate(narrow), tiny.target(), ALL)
    with pytest.raises(ConfigError, match="97 draft tokens for a draft vocabulary of 5"):
        fresh_network(DrafterShape(draft_vocab_size=5), tiny.target(), ALL)


@pytest.mark.parametrize("kind", [*PRESETS, "dflash", "dspark", "peagle"])
def test_a_drafter_s_shape_gives_its_config_back(kind: str) -> None:
    target = tiny.target("llama")
    shape = DrafterShape.model_validate({"kind": kind, "default_tree": "chain:3"})
    config = drafter_config(shape, target)
    found = shape_of(config, shape.definition, target.num_layers)
    assert drafter_config(found, target) == config
