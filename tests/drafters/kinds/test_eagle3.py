"""The EAGLE-3 network against its definition, written again in plain formulas; every toggle does what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eyas.drafters.kinds.eagle3 import Eagle3Network
from eyas.targets.attention import grouped_attention

from ... import tiny
from ..cacheless import causal

S, TAPS = 9, 3

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "two layers": {"num_hidden_layers": 2},
    "three layers, all toggles": {
        "num_hidden_layers": 3, "fc_norm": True, "norm_output": True, "norm_before_residual": True,
        "norm_before_fc": True,
    },
    "wider target": {"target_hidden_size": 48},
    "one tap": {"num_aux_hidden_states": 1},
    "five taps": {"num_aux_hidden_states": 5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "other head size": {"head_dim": 16},
    "no grouping": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu"},
    "theta": {"rope_theta": 100.0},
    "eps": {"rms_norm_eps": 0.5},
}  # fmt: skip


def inputs(module: Eagle3Network, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B, S], taps [B, S, A, Ht], positions [B, S])"""
    draw = torch.Generator().manual_seed(5)
    config = module.config
    tokens = torch.randint(config.vocab_size, (batch, S), generator=draw)
    taps = 3 * torch.randn(batch, S, config.num_aux_hidden_states, config.target_hidden_size, generator=draw)
    return tokens, taps, torch.arange(4, 4 + S).expand(batch, S)


def run(module: Eagle3Network) -> tuple[Tensor, Tensor, Tensor]:
    tokens, taps, positions = inputs(module)
    fed, normed = module.step(tokens, module.fuse(taps), positions, causal)
    return fed, normed, module.logits(normed)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def by_the_definition(module: Eagle3Network) -> tuple[Tensor, Tensor, Tensor]:
    """(fed, normed, logits) for one sequence, position by position, head by head."""
    p = dict(module.state_dict())
    c = module.config
    tokens, taps, positions = (t[0] for t in inputs(module))
    eps = c.rms_norm_eps

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", torch.zeros(()))

    states = list(taps.unbind(1))
    if c.fc_norm:
        states = [rms(s, p[f"fc_norm.{i}.weight"], eps) for i, s in enumerate(states)]
    wide = torch.cat(states, dim=-1)
    if c.norm_before_fc:
        wide = rms(wide, p["input_norm.weight"], eps)
    hidden = linear("fc", wide)
    embedded = p["embed_tokens.weight"][tokens]
    half = c.head_dim // 2
    angle = positions[:, None] / c.rope_parameters["rope_theta"] ** (torch.arange(half) / half)

    def turn(x: Tensor) -> Tensor:
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

    for i in range(c.num_hidden_layers):
        at = f"layers.{i}"
        if i == 0:
            state = rms(hidden, p[f"{at}.hidden_norm.weight"], eps)
            x = torch.cat((rms(embedded, p[f"{at}.input_layernorm.weight"], eps), state), dim=-1)
            residual = state if c.norm_before_residual else hidden
        else:
            x = rms(hidden, p[f"{at}.input_layernorm.weight"], eps)
            residual = hidden
        q, k, v = (linear(f"{at}.self_attn.{n}_proj", x) for n in "qkv")
        heads = []
        for head in range(c.num_attention_heads):
            own = slice(head * c.head_dim, (head + 1) * c.head_dim)
            group = head // (c.num_attention_heads // c.num_key_value_heads)
            theirs = slice(group * c.head_dim, (group + 1) * c.head_dim)
            scores = turn(q[:, own]) @ turn(k[:, theirs]).T / c.head_dim**0.5
            scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, theirs])
        hidden = residual + linear(f"{at}.self_attn.o_proj", torch.cat(heads, dim=-1))
        x = rms(hidden, p[f"{at}.post_attention_layernorm.weight"], eps)
        gate = linear(f"{at}.mlp.gate_proj", x)
        gate = torch.nn.functional.gelu(gate) if c.hidden_act == "gelu" else gate * gate.sigmoid()
        hidden = hidden + linear(f"{at}.mlp.down_proj", gate * linear(f"{at}.mlp.up_proj", x))
    normed = rms(hidden, p["norm.weight"], eps)
    return normed if c.norm_output else hidden, normed, linear("lm_head", normed)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_its_definition(name: str) -> None:
    module = tiny.eagle3_module(**VARIANTS[name])
    for got, expected in zip(run(module), by_the_definition(module), strict=True):
        torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "theta", "eps"])
def test_each_setting_changes_the_output(name: str) -> None:
    """With the same weights, so that the definition above can't be vacuous."""
    plain = tiny.eagle3_module()
    other = Eagle3Network(plain.config.model_copy(update=_update(name))).eval().requires_grad_(False)
    other.load_state_dict({**other.state_dict(), **plain.state_dict()})
    fed = run(plain)[0]
    other_fed = run(other)[0]
    assert not torch.allclose(fed, other_fed, rtol=1e-2, atol=1e-2)


def _update(name: str) -> dict[str, Any]:
    settings = VARIANTS[name]
    if "rope_theta" in settings:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": settings["rope_theta"]}}
    return settings


def test_norm_output_feeds_back_what_the_head_reads() -> None:
    fed, normed, _ = run(tiny.eagle3_module(norm_output=True))
    assert fed is normed
    fed, normed, _ = run(tiny.eagle3_module())
    assert not torch.allclose(fed, normed)


def test_positions_are_relative() -> None:
    """RoPE: only differences count, also beyond max_position_embeddings."""
    module = tiny.eagle3_module(max_position_embeddings=8)
    tokens, taps, positions = inputs(module)
    near = module.step(tokens, module.fuse(taps), positions, causal)[1]
    far = module.step(tokens, module.fuse(taps), positions + 1000, causal)[1]
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
    apart = module.step(tokens, module.fuse(taps), positions * 2, causal)[1]
    assert not torch.allclose(near, apart, atol=1e-2)


def test_rows_of_a_batch_are_independent() -> None:
    module = tiny.eagle3_module(num_hidden_layers=2)
    tokens, taps, positions = inputs(module, batch=3)
    together = module.step(tokens, module.fuse(taps), positions, causal)[1]
    for row in range(3):
        pick = slice(row, row + 1)
        alone = module.step(tokens[pick], module.fuse(taps[pick]), positions[pick], causal)[1]
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-4)


def test_target_ids_follow_the_map() -> None:
    module = tiny.eagle3_module()
    ids = module.target_ids
    assert ids.unique().numel() == 60
    assert torch.equal(module.t2d.nonzero().flatten(), ids)
    assert not torch.equal(ids, torch.arange(60))


def test_a_later_layer_with_normed_heads_is_qwen3_s() -> None:
    """Written by others: transformers' own decoder layer with the same weights."""
    network = tiny.eagle3_module(num_hidden_layers=2, qk_norm=True, rms_norm_eps=1e-5)
    ours = network.layers[1]
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = Qwen3DecoderLayer(config, 0).eval()
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(1, 6, 32)
    positions = torch.arange(6)[None]
    rope = network.rotary(hidden, positions)
    mask = torch.ones(1, 1, 6, 6).tril().bool()

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_attention(q, k, v, mask)

    with torch.inference_mode():
        expected = theirs(hidden, attention_mask=(~mask) * -1e9, position_embeddings=rope)
        torch.testing.assert_close(ours(hidden, rope, attend), expected, rtol=1e-4, atol=1e-4)
        plain = tiny.eagle3_module(num_hidden_layers=2)
        assert not hasattr(plain.layers[1].self_attn.q_norm, "weight")
