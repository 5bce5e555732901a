"""What an EAGLE-3 drafter is made of, read from the field's config.json (EAGLE-3, and 3.1 as toggles on it).

Absent 3.1 fields mean plain EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import Field

from eyas.drafters.config import GroupedConfig, TransformerConfig
from eyas.drafters.published import decoder_dict, finish, ownership, read_decoder, read_grouped_heads, relevant
from eyas.errors import ConfigError
from eyas.target.architecture import default_taps


class FusedTapsConfig(TransformerConfig):
    """A drafter that fuses several taps of the target with `fc`: EAGLE-3 with any kind of attention."""

    num_aux_hidden_states: int = Field(default=3, ge=1)
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return default_taps(layers)


class Eagle3Config(FusedTapsConfig, GroupedConfig):
    """Sizes and toggles."""


def config_from_dict(
    raw: dict[str, Any], where: str, ignore: Collection[str] = (), names: Collection[str] | None = None
) -> Eagle3Config:
    """Read a checkpoint's config.json; refuse a key that is neither known nor named in `ignore`.

    `names` are the checkpoint's tensors; without them embedding and head are taken to be there.
    """
    values = relevant(raw, ignore)
    read_fused_taps(values, where)
    read_grouped_heads(values)
    return finish(Eagle3Config, values | ownership(names), where)


def config_to_dict(config: Eagle3Config) -> dict[str, Any]:
    """The config.json form that vLLM, SGLang and eyas read."""
    return decoder_dict(config, "LlamaForCausalLMEagle3") | taps_dict(config)


def read_fused_taps(values: dict[str, Any], where: str) -> None:
    """What EAGLE-3 configs share whatever their attention, in place."""
    values["taps"] = _pop_taps(values, where)
    read_decoder(values, where)
    values.pop("bias", None)  # an EAGLE-1 field; an fc.bias tensor would be reported as an extra tensor
    if values.get("num_aux_hidden_states") is None:
        values["num_aux_hidden_states"] = len(values["taps"]) if values["taps"] else 3


def taps_dict(config: FusedTapsConfig) -> dict[str, Any]:
    """The taps where both families of readers look for them."""
    if config.taps is None:
        return {}
    key = "eagle_aux_hidden_state_layer_ids"
    return {key: list(config.taps), "eagle_config": {key: list(config.taps), "use_aux_hidden_state": True}}


def _pop_taps(values: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """Tap boundaries from our key, or the field's, flat or nested; other nested keys come up to the top level."""
    nested = dict(values.pop("eagle_config", None) or {})
    if not nested.pop("use_aux_hidden_state", True):
        raise ConfigError(f"{where}: use_aux_hidden_state is false, but an EAGLE-3 drafter reads the target's taps")
    found = [
        tuple(ids)
        for ids in (
            values.pop("taps", None),
            values.pop("eagle_aux_hidden_state_layer_ids", None),
            nested.pop("eagle_aux_hidden_state_layer_ids", None),
            nested.pop("layer_ids", None),
        )
        if ids is not None
    ]
    for key, value in nested.items():  # some exporters nest toggles such as norm_before_fc
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{where}: {key} is {values[key]} at the top level and {value} in eagle_config")
    if len(set(found)) > 1:
        raise ConfigError(f"{where}: contradicting tap lists {found}: keep one")
    return found[0] if found else None
