"""EAGLE-3 (arXiv 2503.01840): a decoder layer over several fused taps of the target; EAGLE-3.1 adds toggles.

Toggles that config.json leaves out are off, which is plain EAGLE-3. Code that doesn't depend on the kind of attention
is shared with `mla`.

Shapes: B batch, S positions, A taps, Ht target hidden, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafters.config import FusedTapsConfig, WindowedConfig
from eyas.drafters.formats.decoder import decoder_dict, read_fused_taps, read_grouped_heads, taps_dict
from eyas.drafters.formats.fields import Fields, architectures
from eyas.drafters.formats.tensor_names import MIDLAYER
from eyas.drafters.formats.windows import read_windows, windows_dict
from eyas.drafters.kind import EAGLE3, Kind
from eyas.drafters.network import (
    Attend,
    Attention,
    DecoderBlock,
    DecoderLayer,
    DraftNetwork,
    RMSNorm,
    Rope,
    Rotary,
    described,
    grouped_heads,
)
from eyas.drafters.window.layers import SlidingWindow
from eyas.targets.native.decoder import DecoderDescription, DecoderForm, Fusion, LayerParts

_QWEN3 = "Eagle3Qwen3ForCausalLM"
"""The architecture whose attention normalizes queries and keys."""


class Eagle3Config(FusedTapsConfig, WindowedConfig):
    """Sizes and toggles of EAGLE-3 with grouped-query attention."""

    qk_norm: bool = False
    """Normalize every head's queries and keys before they are rotated, as Qwen3's attention does."""


def read(fields: Fields) -> Eagle3Config:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    fields.ignore("parallel_drafting", "false: with true it would be P-EAGLE")
    read_grouped(fields, _QWEN3)
    return fields.finish(Eagle3Config)


def read_grouped(fields: Fields, *qwen3: str) -> None:
    """Read the keys that EAGLE-3 kinds with grouped-query attention share; architectures in `qwen3` have qk_norm."""
    windows = read_windows(fields)
    read_fused_taps(fields)
    fields.values |= windows
    read_grouped_heads(fields)
    fields.default("qk_norm", not set(qwen3).isdisjoint(architectures(fields.raw)))


def write(config: Eagle3Config) -> dict[str, Any]:
    """The config.json that vLLM, SGLang and eyas read."""
    return grouped_dict(config, "LlamaForCausalLMEagle3", _QWEN3)


def grouped_dict(config: Eagle3Config, llama: str, qwen3: str) -> dict[str, Any]:
    """The config.json that names the architecture `llama`, or `qwen3` if queries and keys are normalized."""
    values = decoder_dict(config, qwen3 if config.qk_norm else llama) | taps_dict(config) | windows_dict(config)
    if config.qk_norm:
        values["model_type"] = "qwen3"
    else:
        del values["qk_norm"]
    return values


class FirstLayer(DecoderBlock):
    """The first layer: attention reads embedding and state concatenated (width 2H), each after its own norm."""

    def __init__(self, config: FusedTapsConfig, attention: nn.Module) -> None:
        super().__init__(config, 0, attention)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """embedded, hidden [B, S, H] -> the residual stream [B, S, H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return self.mix(x, normed if self.norm_before_residual else hidden, rope, attend)

    def parts(self) -> LayerParts:
        return LayerParts(
            self.self_attn,
            self.mlp,
            self.hidden_norm,
            self.post_attention_layernorm,
            self.input_layernorm,
            self.norm_before_residual,
        )


class FusedTapsNetwork(DraftNetwork):
    """EAGLE-3 without its attention, which `attention(width)` creates."""

    config: FusedTapsConfig

    def __init__(self, config: FusedTapsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        taps = config.num_aux_hidden_states
        eps = config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in range(taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * config.target_hidden_size, eps=eps)
        self.fc = nn.Linear(taps * config.target_hidden_size, size, bias=False)
        first = FirstLayer(config, self.attention(2 * size))
        later = (DecoderLayer(config, i, self.attention(size)) for i in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList((first, *later))
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(config)

    def attention(self, width: int) -> nn.Module:
        """Create a layer's attention over inputs [B, S, width]: a module with a `kv_shape`."""
        raise NotImplementedError

    def fuse(self, taps: Tensor) -> Tensor:
        if self.config.fc_norm:
            taps = torch.stack([norm(taps[:, :, i]) for i, norm in enumerate(self.fc_norm)], dim=2)
        wide = taps.flatten(2)
        if self.config.norm_before_fc:
            wide = self.input_norm(wide)
        out: Tensor = self.fc(wide)
        return out

    @property
    def fusion(self) -> Fusion:
        """How `fuse` makes states of taps."""
        config = self.config
        return Fusion(
            self.fc,
            tuple(self.fc_norm) if config.fc_norm else (),
            self.input_norm if config.norm_before_fc else None,
        )

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `DraftNetwork.step`; with `norm_output` both returned states are the normed one, the same tensor."""
        rope = self.rotary(hidden, positions)
        first, *later = self.layers
        hidden = first(self.embed(tokens), hidden, rope, attend)
        for layer in later:
            hidden = layer(hidden, rope, attend)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed


class Eagle3Network(FusedTapsNetwork):
    """EAGLE-3 as published: grouped-query attention."""

    config: Eagle3Config

    @property
    def layer_windows(self) -> tuple[SlidingWindow | None, ...]:
        return self.config.layer_windows

    def attention(self, width: int) -> nn.Module:
        return Attention(self.config, width, qk_norm=self.config.qk_norm)

    def description(self) -> DecoderDescription:
        form = DecoderForm(returns_normed=self.config.norm_output, fuse=self.fusion)
        return described(self, grouped_heads(self.config), self.norm, self.rotary, form)


PAIRED_INPUTS = tuple(f"layers.0.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj"))

KIND = Kind(
    "eagle3",
    Eagle3Config,
    Eagle3Network,
    read,
    write,
    architectures=frozenset(
        "LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM EAGLE3LlamaForCausalLM Eagle3Qwen3ForCausalLM "
        "Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Speculator "
        "Eagle3DraftModel".split()
    ),
    family=EAGLE3,
    first_layer=MIDLAYER,
    full_map=True,
    paired_inputs=PAIRED_INPUTS,
)
