"""What an EAGLE-3 drafter is made of, read from the field's config.json (EAGLE-3, and 3.1 as toggles on it).

Absent 3.1 fields mean plain EAGLE-3.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from eyas.drafters.config import GroupedConfig, TransformerConfig
from eyas.drafters.formats.fields import Fields, architectures
from eyas.drafters.formats.taps import IDS, LIMIT, read_taps
from eyas.drafters.published import decoder_dict, read_decoder, read_grouped_heads, read_ownership
from eyas.target.architecture import default_taps


class FusedTapsConfig(TransformerConfig):
    """A drafter that fuses several taps of the target with `fc`: EAGLE-3 with any kind of attention."""

    num_aux_hidden_states: int = Field(default=3, ge=1, le=LIMIT)
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return default_taps(layers)


QWEN3 = "Eagle3Qwen3ForCausalLM"
"""The architecture whose attention norms queries and keys."""


class Eagle3Config(FusedTapsConfig, GroupedConfig):
    """Sizes and toggles."""

    qk_norm: bool = False
    """Norm every head's queries and keys before they are rotated, as Qwen3's attention does."""


def read(fields: Fields) -> Eagle3Config:
    """Read a checkpoint's configuration; refuse a key that is neither known nor to be overlooked."""
    read_fused_taps(fields)
    read_grouped_heads(fields)
    fields.default("qk_norm", QWEN3 in architectures(fields.raw))
    return fields.finish(Eagle3Config)


def config_to_dict(config: Eagle3Config) -> dict[str, Any]:
    """The config.json form that vLLM, SGLang and eyas read."""
    values = decoder_dict(config, QWEN3 if config.qk_norm else "LlamaForCausalLMEagle3") | taps_dict(config)
    if config.qk_norm:
        values["model_type"] = "qwen3"
    else:
        del values["qk_norm"]
    return values


def read_fused_taps(fields: Fields) -> None:
    """What EAGLE-3 configurations share whatever their attention."""
    taps = fields.values["taps"] = read_taps(fields)
    read_decoder(fields)
    read_ownership(fields)
    fields.ignore("bias", "of EAGLE-1's fc; an fc.bias tensor would be reported as an extra tensor")
    fields.default("num_aux_hidden_states", len(taps) if taps else 3)


def taps_dict(config: FusedTapsConfig) -> dict[str, Any]:
    """The taps where both families of readers look for them, and where no reader can take them for something else."""
    if config.taps is None:
        return {}
    taps = list(config.taps)
    return {"taps": taps, IDS: taps, "eagle_config": {IDS: taps, "use_aux_hidden_state": True}}
