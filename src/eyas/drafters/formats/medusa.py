"""Published Medusa heads: FasterDecoding's tensor names to native ones, which are vLLM's, and sizes from tensors.

    FasterDecoding       vLLM, native
    {h}.{l}.linear.*     blocks.{h}.layers.{l}.*
    {h}.{L}.weight       lm_heads.{h}.weight          L = residual layers of a head
                         token_map -> d2t

FasterDecoding's configurations have no sizes, and some name fewer heads than the file has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyas.drafters.files import Headers, RawCheckpoint
from eyas.drafters.formats import tensor_names
from eyas.drafters.formats.fields import Fields
from eyas.errors import ConfigError

HEADS, LAYERS = "num_heads", "num_hidden_layers"
"""The native keys, which are vLLM's."""
_PUBLISHED = {HEADS: "medusa_num_heads", LAYERS: "medusa_num_layers"}
"""Native key -> FasterDecoding's key."""
_FIRST = f"{tensor_names.HEADS}0.weight"
_TOKEN_MAP = "token_map"
"""vLLM's tensor [Vd] with the target id of each draft token."""
_IRRELEVANT = {
    "base_model_name_or_path": "the target's name",
    "max_paths": "of engines that verify fixed paths",
    "topk": "of engines that verify fixed paths",
    "max_seq_len": "the target's",
}

_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_LAST = re.compile(r"(\d+)\.(\d+)\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)")


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether this is one of FasterDecoding's configurations, which don't always name a model type."""
    return _PUBLISHED[HEADS] in config


def native_medusa(raw: RawCheckpoint) -> RawCheckpoint:
    """The same checkpoint with native tensor names; one that isn't Medusa's is returned unchanged."""
    names = _native_names(list(raw.headers.tensors))
    if not names:
        return raw
    in_file = {native: name for name, native in names.items()}

    def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {names.get(name, name): tensor for name, tensor in tensors.items()}
        if _TOKEN_MAP in tensors:
            found["d2t"] = found["d2t"].to(torch.int64) - torch.arange(len(found["d2t"]))
        return found

    def some(wanted: Sequence[str]) -> dict[str, Tensor]:
        return renamed(raw.load_some([in_file.get(name, name) for name in wanted]))

    found = {names.get(name, name): info for name, info in raw.headers.tensors.items()}
    headers = Headers(found, raw.headers.files, raw.headers.pickles)
    return replace(raw, headers=headers, load=lambda: renamed(raw.load()), load_some=some)


def _native_names(tensors: Sequence[str]) -> dict[str, str]:
    """Name in the file -> native name, for the tensors whose names differ."""
    names = {}
    layers = [match for name in tensors if (match := _LAYER.fullmatch(name))]
    for match in layers:
        head, layer, part = match.groups()
        names[match.string] = f"blocks.{head}.layers.{layer}.{part}"
    depth = 1 + max((int(match[2]) for match in layers), default=-1)
    for name in tensors:
        match = _LAST.fullmatch(name)
        if match and layers and int(match[2]) == depth:  # any other is reported as an extra tensor
            names[name] = f"{tensor_names.HEADS}{match[1]}.weight"
    if _TOKEN_MAP in tensors and _FIRST in tensors:
        names[_TOKEN_MAP] = "d2t"
    return names


def read_sizes(fields: Fields) -> None:
    """Fill in the sizes of a Medusa configuration; tensors, if known, take precedence over config.json.

    Raises ConfigError for variants that compute something else.
    """
    for key, reason in _IRRELEVANT.items():
        fields.ignore(key, reason)
    if fields.take("original_lm_head", bool, default=False):
        raise ConfigError(f"{fields.where}: original_lm_head is true: eyas only reads heads with matrices of their own")
    if fields.take("logit_scale", float, default=1.0) != 1.0:
        raise ConfigError(f"{fields.where}: logit_scale is not 1: eyas only reads heads whose logits aren't scaled")
    for native, published in _PUBLISHED.items():
        count = fields.take(published, int)
        if count is not None:
            fields.values[native] = count
    draft = fields.take("truncated_vocab_size", int)
    if draft is not None:
        fields.values["draft_vocab_size"] = draft
    if fields.names:
        _from_tensors(fields, fields.names)
    fields.default("target_hidden_size", fields.values.get("hidden_size"))
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))


def _from_tensors(fields: Fields, tensors: Mapping[str, Any]) -> None:
    """Take counts and sizes from tensor names and shapes; add a doubt if config.json contradicts them."""
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    for key, group, what in ((HEADS, 1, "heads"), (LAYERS, 2, "layers a head")):
        found = len({match[group] for match in blocks})
        said = fields.values.get(key)
        if found and said not in (None, found):
            name = _PUBLISHED[key] if _PUBLISHED[key] in fields.raw else key
            fields.doubts.append(f"{name} says {said} {what}, the file has tensors of {found}: all {found} are read")
        if found:
            fields.values[key] = found
    fields.values["medusa_fc_bias"] = any(match.string.endswith(".bias") for match in blocks)
    head = tensors.get(_FIRST)
    layer = tensors.get("blocks.0.layers.0.weight")
    fields.values["head"] = "shared" if head is None else "own"
    if head is not None and len(head.shape) == 2:
        fields.default("draft_vocab_size", head.shape[0])
        if "d2t" not in tensors:
            fields.default("vocab_size", head.shape[0])
    if layer is not None:
        fields.default("hidden_size", layer.shape[-1])
