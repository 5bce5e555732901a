"""DFlash (arXiv 2602.06036): a block drafter whose slots don't know what the slots before them chose.

Its files are those of z-lab and SpecForge, and speculators' where they are translated (`formats/speculators.py`).
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.formats.decoder import decoder_dict, read_decoder, read_grouped_heads
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.taps import read_layer_outputs
from eyas.drafters.kind import DFLASH, Kind
from eyas.errors import ConfigError

NESTED = "dflash_config"
"""The section in which published files keep the block's settings; some of them stand at the top level instead."""


class DFlashConfig(BlockConfig):
    """DFlash as published: the anchor predicts nothing."""


def read_block(fields: Fields) -> None:
    """Read what configurations of block drafters share. Raises ConfigError."""
    nested = dict(fields.take(NESTED, dict, default={}))
    fields.values["taps"] = taps = read_layer_outputs(fields, nested)
    for key, value in nested.items():
        if fields.values.setdefault(key, value) != value:
            raise ConfigError(f"{fields.where}: {key} is {fields.values[key]} at the top level and {value} in {NESTED}")
    layers = fields.take("num_target_layers", int, default=fields.layers)
    read_decoder(fields)
    read_grouped_heads(fields)
    if taps is not None:
        fields.default("num_aux_hidden_states", len(taps))
    else:
        fields.default("num_aux_hidden_states", fields.values.get("num_hidden_layers"))
    if layers is not None and fields.layers not in (None, layers):
        raise ConfigError(f"{fields.where}: made for a target of {layers} layers, this one has {fields.layers}")


def read(fields: Fields) -> DFlashConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    read_block(fields)
    return fields.finish(DFlashConfig)


def block_dict(config: BlockConfig, architecture: str) -> dict[str, Any]:
    """The config.json of a block drafter as z-lab's and SGLang's readers take it, and `taps`, which is eyas's own."""
    values = decoder_dict(config, architecture)
    values["model_type"] = "qwen3" if config.qk_norm else "llama"
    nested = {"mask_token_id": values.pop("mask_token_id")}
    for key in ("num_aux_hidden_states", "qk_norm"):
        del values[key]
    if not values["sample_from_anchor"]:
        del values["sample_from_anchor"]
    if config.taps is not None:
        values["taps"] = list(config.taps)
        nested["target_layer_ids"] = [tap - 1 for tap in config.taps]
    return values | {NESTED: nested}


def write(config: DFlashConfig) -> dict[str, Any]:
    """The config.json that z-lab's code, SGLang, vLLM and eyas read."""
    return block_dict(config, "DFlashDraftModel")


KIND = Kind(
    "dflash",
    DFlashConfig,
    BlockNetwork,
    read,
    write,
    architectures=frozenset({"DFlashDraftModel", "DFlashSpeculator"}),
    family=DFLASH,
)
