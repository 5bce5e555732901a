"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a decoder layer on the target's final state.

    x = eh_proj(cat(enorm(embedding), hnorm(state)))
    output = norm(block(x))

The target's head reads the output, which is also fed back in place of the target's state after its final norm. Modules
inside a target's checkpoint have the same form with the target's own kind of block (`drafters/in_target/`). The kind
here is a separate drafter with Llama's block; its config.json is eyas's own format and holds exactly the fields of
`MtpConfig`.

Shapes: B batch, S positions, H hidden (the target's).
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from eyas.drafters.config import FeatureConfig, GroupedConfig
from eyas.drafters.formats.decoder import read_decoder, read_grouped_heads
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import Kind
from eyas.drafters.network import (
    Attend,
    Attention,
    DecoderLayer,
    DraftNetwork,
    RMSNorm,
    Rotary,
    described,
    grouped_heads,
)
from eyas.targets.native.decoder import DecoderDescription, DecoderForm

_MODEL_TYPE, _ARCHITECTURE = "eyas_mtp", "EyasMtpDrafter"


class MtpModuleConfig(FeatureConfig):
    """The fields of all MTP modules, whatever their block."""

    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    zero_first: bool = False
    """Whether the embedding at position 0 is zeroed, as vLLM does for the modules of DeepSeek, GLM and MiMo."""


class MtpConfig(MtpModuleConfig, GroupedConfig):
    """A separate module with Llama's decoder layers."""


def read(fields: Fields) -> MtpConfig:
    """The configuration in config.json. Raises ConfigError, also for unknown keys."""
    read_decoder(fields)
    read_grouped_heads(fields)
    return fields.finish(MtpConfig)


def write(config: MtpConfig) -> dict[str, Any]:
    """The config.json that only eyas reads. Ownership isn't written: it follows from the tensors in the file."""
    left_out = {"target_hidden_size", "embedding", "head"}
    values = config.model_dump(mode="json", exclude=left_out, exclude_none=True)
    return {"model_type": _MODEL_TYPE, "architectures": [_ARCHITECTURE]} | values


class MtpModule(DraftNetwork):
    """The norms and the projection of a module; subclasses add the block."""

    config: MtpModuleConfig

    def __init__(self, config: MtpModuleConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps=eps)
        self.hnorm = RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.norm = RMSNorm(size, eps=eps)

    def block(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, S, H] entering the block -> the one leaving it."""
        raise NotImplementedError

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `DraftNetwork.step`; the state fed back is the one that the head reads."""
        embedded = self.embed(tokens)
        if self.config.zero_first:
            embedded = embedded * (positions > 0).unsqueeze(-1)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        normed = self.norm(self.block(x, positions, attend))
        return normed, normed


class MtpNetwork(MtpModule):
    """An MTP module with Llama's decoder layers."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, Attention(config, config.hidden_size)) for i in range(config.num_hidden_layers)
        )
        self.rotary = Rotary(config)

    def block(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rope = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, rope, attend)
        return x

    def description(self) -> DecoderDescription | None:
        if self.config.zero_first:
            return None
        form = DecoderForm(mix=self.eh_proj, mix_norms=(self.enorm, self.hnorm), returns_normed=True)
        return described(self, grouped_heads(self.config), self.norm, self.rotary, form)


KIND = Kind(
    "mtp",
    MtpConfig,
    MtpNetwork,
    read,
    write,
    architectures=frozenset({_ARCHITECTURE}),
    model_type=_MODEL_TYPE,
    paired_inputs=("eh_proj.weight",),
)
