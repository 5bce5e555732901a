"""DFlash (arXiv 2602.06036): a block drafter whose slots don't know what the slots before them chose.

Its files are those of z-lab and SpecForge, and speculators' where they are translated (`formats/speculators.py`).
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.block.decoding import BlockConfig, BlockDrafter, BlockNetwork
from eyas.drafters.formats.decoder import decoder_dict, read_decoder, read_grouped_heads
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.taps import read_layer_outputs
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.kind import DFLASH, Kind
from eyas.errors import ConfigError

NESTED = "dflash_config"
"""The section in which published files keep the block's settings; some of them stand at the top level instead."""

_FIXED: dict[str, Any] = {"attention_mode": "gqa", "causal": False, "use_swa": False, "use_aux_hidden_state": True}
"""Keys of the section with the only value that is the network here: with another one it would be another network."""
_TRAINING = ("num_anchors", "confidence_head_alpha")


class DFlashConfig(BlockConfig):
    """DFlash as published: the anchor predicts nothing."""


def read_block(fields: Fields, projector: str) -> None:
    """Read what configurations of block drafters share; `projector` is SpecForge's name for the kind.

    Raises ConfigError.
    """
    nested = dict(fields.take(NESTED, dict, default={}))
    for key, only in (_FIXED | {"projector_type": projector}).items():
        if nested.pop(key, only) != only:
            raise ConfigError(f"{fields.where}: {NESTED}.{key} is not {only!r}: that is another network")
    if fields.take("is_causal", bool, default=False):
        raise ConfigError(f"{fields.where}: is_causal is true, but slots of a block attend to each other both ways")
    for key in _TRAINING:
        nested.pop(key, None)
        fields.ignore(key, "about training")
    fields.values["taps"] = taps = read_layer_outputs(fields, nested)
    for key, value in nested.items():
        if fields.values.setdefault(key, value) != value:
            raise ConfigError(f"{fields.where}: {key} is {fields.values[key]} at the top level and {value} in {NESTED}")
    layers = fields.take("num_target_layers", int, default=fields.layers)
    if fields.names is not None and not {EMBEDDING, HEAD} & set(fields.names):
        fields.ignore("tie_word_embeddings", "the target's: the file has neither embedding nor head")
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
    read_block(fields, "dflash")
    return fields.finish(DFlashConfig)


def block_dict(config: BlockConfig, architecture: str) -> dict[str, Any]:
    """The config.json of a block drafter as z-lab's and SGLang's readers take it, and `taps`, which is eyas's own."""
    values = decoder_dict(config, architecture)
    values["model_type"] = "qwen3" if config.qk_norm else "llama"
    nested = {"mask_token_id": values.pop("mask_token_id")}
    del values["num_aux_hidden_states"]
    for key, usual in (("qk_norm", True), ("sample_from_anchor", False)):
        if values[key] is usual:
            del values[key]
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
    drafter=BlockDrafter,
)
