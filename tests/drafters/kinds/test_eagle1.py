"""The EAGLE-1 network against its definition, written again in plain formulas, and its published form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.formats.fields import Fields
from eyas.drafters.kinds.eagle1 import read

from ... import tiny
from ..cacheless import causal

S = 7
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "no bias": {"bias": False}, "two layers": {"num_hidden_layers": 2}, "qkv bias": {"qkv_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_its_definition(name: str) -> None:
    network = tiny.network("eagle1", **VARIANTS[name])
    p = dict(network.state_dict())
    layers = VARIANTS[name].get("num_hidden_layers", 1)
    tokens = torch.arange(3, 3 + S)
    state = torch.randn(S, tiny.HIDDEN)
    fed, normed = network.step(tokens[None], state[None], torch.arange(4, 4 + S)[None], causal)
    assert fed is normed  # the raw output is what the head reads

    def linear(at: str, x: Tensor) -> Tensor:
        return x @ p[f"{at}.weight"].T + p.get(f"{at}.bias", torch.zeros(()))

    def rms(at: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{at}.weight"]

    angle = torch.arange(4, 4 + S)[:, None] / 10000.0 ** (torch.arange(4) / 4)

    def turn(x: Tensor) -> Tensor:
        a, b = x[:, :4], x[:, 4:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

    hidden = linear("fc", torch.cat((p["embed_tokens.weight"][tokens], state), dim=-1))
    for i in range(layers):
        at = f"layers.{i}"
        assert (f"{at}.input_layernorm.weight" in p) == (i > 0)
        x = rms(f"{at}.input_layernorm", hidden) if i else hidden
        q, k, v = (linear(f"{at}.self_attn.{n}_proj", x) for n in "qkv")
        heads = []
        for head in range(4):
            own = slice(head * 8, head * 8 + 8)
            theirs = slice(head // 2 * 8, head // 2 * 8 + 8)
            scores = turn(q[:, own]) @ turn(k[:, theirs]).T / 8**0.5
            scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, theirs])
        hidden = hidden + linear(f"{at}.self_attn.o_proj", torch.cat(heads, dim=-1))
        x = rms(f"{at}.post_attention_layernorm", hidden)
        gate = linear(f"{at}.mlp.gate_proj", x)
        hidden = hidden + linear(f"{at}.mlp.down_proj", gate * gate.sigmoid() * linear(f"{at}.mlp.up_proj", x))
    torch.testing.assert_close(fed[0], hidden, rtol=1e-4, atol=1e-4)


def test_a_published_config() -> None:
    """The target's own keys, and `bias` where it is off."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_hidden_layers": 1, "vocab_size": 97, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bias": False,
    }  # fmt: skip
    config = read(Fields(raw, "config.json", {"embed_tokens.weight"}))
    assert (config.bias, config.embedding, config.head, config.draft_vocab_size) == (False, "own", "shared", 97)
    del raw["bias"]
    assert read(Fields(raw, "config.json")).bias
