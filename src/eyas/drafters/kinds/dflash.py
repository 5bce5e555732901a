"""DFlash (arXiv 2602.06036): a block drafter whose slots don't know which tokens the slots before them chose.

It reads files of z-lab and SpecForge, and speculators' files once translated (`formats/speculators.py`). JetSpec's
files add `dflash_config.causal_head` (the authors') or `dflash_config.causal` (vLLM, AutoModel).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from eyas.drafters.block.decoding import BlockProposer
from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.formats.decoder import decoder_dict, read_decoder, read_grouped_heads
from eyas.drafters.formats.fields import NESTED, Fields
from eyas.drafters.formats.taps import read_layer_outputs
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.formats.windows import read_block_windows, windows_dict
from eyas.drafters.kind import DFLASH, Kind
from eyas.errors import ConfigError

_FIXED: dict[str, Any] = {"attention_mode": "gqa", "use_aux_hidden_state": True}
"""Keys of the section and their only supported values: any other value means another network."""
_TRAINING = ("num_anchors", "confidence_head_alpha")


class DFlashConfig(BlockConfig):
    """DFlash, or JetSpec if it is causal."""


def read_block(config: type[BlockConfig], projector: str, fields: Fields) -> Any:
    """Read the configuration of a block drafter; `projector` is SpecForge's name for its kind.

    Raises ConfigError, also for keys of unknown meaning.
    """
    nested = dict(fields.take(NESTED, dict, default={}))
    for key, only in (_FIXED | {"projector_type": projector}).items():
        if nested.pop(key, only) != only:
            raise ConfigError(f"{fields.where}: {NESTED}.{key} is not {only!r}: that is another network")
    windows = read_block_windows(fields, nested, NESTED)
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
    fields.values |= windows
    read_grouped_heads(fields)
    fields.default("num_aux_hidden_states", fields.values.get("num_hidden_layers") if taps is None else len(taps))
    if layers is not None and fields.layers not in (None, layers):
        raise ConfigError(f"{fields.where}: made for a target of {layers} layers, but this one has {fields.layers}")
    return fields.finish(config)


def write_block(architecture: str, nest: Collection[str], config: BlockConfig) -> dict[str, Any]:
    """The config.json of a block drafter as z-lab's and SGLang's readers take it, plus eyas's own `taps`.

    The nested section holds the mask token, the taps, and the settings that `nest` names.
    """
    values = decoder_dict(config, architecture)
    values["model_type"] = "qwen3" if config.qk_norm else "llama"
    del values["sliding_causal"]
    values |= windows_dict(config)
    nested = {key: values.pop(key) for key in ("mask_token_id", *nest)}
    del values["num_aux_hidden_states"]
    for key, usual in (("qk_norm", True), ("sample_from_anchor", False)):
        if values[key] is usual:
            del values[key]
    if values.pop("causal"):
        nested |= {"causal": True, "causal_head": True}
    if config.taps is not None:
        values["taps"] = list(config.taps)
        nested["target_layer_ids"] = [tap - 1 for tap in config.taps]
    return values | {NESTED: nested}


BLOCK_LOSS = {"unroll": 7, "decay": 0.7788, "anchors": 512}
"""DFlash's loss (arXiv 2602.06036), from which those of the other block drafters differ in few settings: guesses of a
block, the factor e^(-1/4) by which each one counts less than the one before, and blocks of a row."""


def block_kind(
    name: str, config: type[BlockConfig], network: type[BlockNetwork], architectures: Collection[str], **more: Any
) -> Kind:
    """A kind of block drafters; unless `more` says otherwise, its files name their settings as its config does.

    The first architecture is the one that is written.
    """
    read = partial(read_block, config, name)
    write = partial(write_block, next(iter(architectures)), ())
    given = {"read": read, "write": write, "proposer": BlockProposer, "loss": BLOCK_LOSS, **more}
    return Kind(name, config, network, architectures=frozenset(architectures), **given)


KIND = block_kind("dflash", DFlashConfig, BlockNetwork, ("DFlashDraftModel", "DFlashSpeculator"), family=DFLASH)
