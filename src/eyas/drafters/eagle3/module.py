"""The EAGLE-3 network (arXiv 2503.01840) with the 3.1 toggles, shared by decoding and training.

Who attends to what is the caller's business: `attend` gets rotated queries and keys and returns the mixed values, so
decoding plugs in its slot cache and training its training-time test. Parameter names are those of the
`layers.{i}.*` checkpoint layout.

Shapes: B batch, S positions, A taps, Ht target hidden, H draft hidden, V / Vd full / draft vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.drafters.eagle3.config import Eagle3Config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, heads, S, D], k [B, kv_heads, S, D], v [B, kv_heads, S, D]) -> [B, heads, S, D]"""


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` under the name checkpoints use."""


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output."""

    def __init__(self, config: Eagle3Config, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, q_size, bias=bias)
        self.k_proj = nn.Linear(width, kv_size, bias=bias)
        self.v_proj = nn.Linear(width, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [B, S, width] -> [B, S, H]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(layer, rotate(q, rope), rotate(k, rope), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer. The first one reads the token embedding beside the state (width 2H); later ones the state."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 2 * size if index == 0 else size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps=eps)
        if index == 0:
            self.hidden_norm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embedded, hidden [B, S, H] -> the next residual stream [B, S, H]."""
        if self.index == 0:
            normed = self.hidden_norm(hidden)
            x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
            residual = normed if self.norm_before_residual else hidden
        else:
            x, residual = self.input_layernorm(hidden), hidden
        residual = residual + self.self_attn(x, rope, self.index, attend)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Module(nn.Module):
    """All parameters of a drafter, embedding and head included."""

    d2t: Tensor  # [Vd] int64: target id - draft id
    t2d: Tensor  # [V] bool: the target ids the draft vocabulary covers

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        size, taps = config.hidden_size, config.num_aux_hidden_states
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(taps)
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * config.target_hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(taps * config.target_hidden_size, size, bias=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    @property
    def target_ids(self) -> Tensor:
        """[Vd] target token id of every draft id."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def fuse(self, taps: Tensor) -> Tensor:
        """Target taps [B, S, A, Ht] -> drafter states [B, S, H]; never applied to fed-back states."""
        if self.config.fc_norm:
            taps = torch.stack([norm(taps[:, :, i]) for i, norm in enumerate(self.fc_norm)], dim=2)
        wide = taps.flatten(2)
        if self.config.norm_before_fc:
            wide = self.input_norm(wide)
        out: Tensor = self.fc(wide)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]."""
        out: Tensor = self.embed_tokens(tokens)
        return out

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over pairs (token i+1, state i) at RoPE positions i.

        tokens, positions [B, S]; hidden [B, S, H]. Returns the state to feed back and the normed state that
        `logits` takes, both [B, S, H]; with `norm_output` they are the same tensor.
        """
        embedded = self.embed(tokens)
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(embedded, hidden, rope, attend)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed

    def logits(self, normed: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, Vd]."""
        out: Tensor = self.lm_head(normed)
        return out


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE (half-split layout) to x [B, heads, S, D] with cos, sin [B, S, D]."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of q [B, heads, S, D] over k, v [B, kv_heads, K, D]; bool mask, as [B, 1, S, K]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
