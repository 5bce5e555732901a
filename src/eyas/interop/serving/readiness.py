"""Checks whether a drafter's files have the form that an engine reads, by comparing them with what export would write.

Engines use defaults for missing keys and skip unknown tensors without an error. So every key that matters is compared;
a missing key counts as the engine's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from eyas.drafters.checkpoint import Checkpoint
from eyas.drafters.files import CONFIG, read_json
from eyas.drafters.formats.opening import gguf_in
from eyas.drafters.formats.taps import IDS
from eyas.drafters.formats.tensor_names import FIRST_LAYER, MIDLAYER, SHAREABLE, VOCABULARY_MAP, is_computed
from eyas.drafters.kind import DFLASH, EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE, Family
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport
from eyas.interop.export.forms import Form
from eyas.interop.export.rules import BLOCK

_TOGGLES = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_USUAL = _TOGGLES | {"num_aux_hidden_states": 3, "max_position_embeddings": 2048}
_ABSENT: dict[str, dict[str, Any]] = {
    "vllm": _USUAL,
    "sglang": _USUAL | {"draft_vocab_size": "missing", "rope_theta": 10000.0},
    "speculators": {**_TOGGLES, "norm_before_residual": True},
}
"""Consumer -> its defaults for missing keys of EAGLE drafters; for all other keys, all have the same default."""
_ABSENT_IN_BLOCKS: dict[str, dict[str, Any]] = {
    "vllm": {"markov_rank": "missing", "enable_confidence_head": False, "confidence_head_with_markov": False},
    "sglang": {"markov_rank": "missing", "markov_head_type": "missing"},
    "speculators": {},
}
"""The same for block drafters; vLLM and SGLang look for these keys at the top level only."""
_ELSEWHERE = frozenset("taps eyas default_tree dtype torch_dtype eagle_config architectures model_type".split()) | {
    IDS, "rope_parameters", "rope_theta", "rope_scaling", "speculators_config", "speculators_version",
    "transformer_layer_config", "has_no_defaults_at_init", "tie_word_embeddings",
    "dflash_config", "target_layer_ids", "mask_token_id", "num_target_layers",
}  # fmt: skip
"""Keys that don't affect decoding, or that other checks compare by meaning."""
_ARCHITECTURES: dict[tuple[str, Family], frozenset[str]] = {
    ("vllm", EAGLE): frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    ("vllm", EAGLE3): frozenset(
        "LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM "
        "Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM".split()
    ),
    ("vllm", PEAGLE): frozenset({"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}),
    ("vllm", EAGLE3_MLA): frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}),
}
"""Further architecture names that a consumer accepts for a family, besides the one that export writes."""


def obstacles(consumer: str, drafter: DrafterToExport, checkpoint: Checkpoint) -> list[str]:
    """The reasons why a consumer wouldn't read these files as `drafter`, which is prepared for it; empty if it would.

    Raises CheckpointError or ConfigError for files that can't be read.
    """
    form = CONSUMERS[consumer].form
    path = checkpoint.raw.path
    if form is None:
        return [] if gguf_in(path) is not None else ["it is a directory of safetensors, not a GGUF file"]
    if gguf_in(path) is not None:
        return ["it is a GGUF file, not a directory with config.json"]
    written, config = form(drafter), read_json(path / CONFIG)
    found = _architecture(consumer, drafter, written, config)
    if drafter.kind.family in BLOCK:
        found += _config_keys(consumer, written.config, config, _ABSENT_IN_BLOCKS[consumer])
        found += _outputs(consumer, drafter, config)
    else:
        absent = _ABSENT[consumer] | (_TOGGLES if drafter.kind.family == PEAGLE else {})  # by its own defaults
        found += _config_keys(consumer, _TOGGLES | written.config, config, absent)
        found += _layers(consumer, drafter, config)
        if consumer == "sglang" and "rope_scaling" in written.config and not config.get("rope_scaling"):
            found.append("rope_scaling: missing, so RoPE is read as unscaled")
        if consumer == "sglang" and "bias" in config and "bias" not in written.config:
            found.append("bias: SGLang applies it to attention")
    return [*found, *_tensors(consumer, written, checkpoint), *_map(written, checkpoint)]


def _architecture(consumer: str, drafter: DrafterToExport, written: Form, config: Mapping[str, Any]) -> list[str]:
    if consumer == "speculators":  # recognised by another key
        return []
    known = frozenset(written.config["architectures"])
    if drafter.kind.family is not None and not drafter.get("qk_norm"):  # only one architecture has these norms
        known |= _ARCHITECTURES.get((consumer, drafter.kind.family), frozenset())
    have = config.get("architectures") or []
    return [] if set(have) & known else [f"architectures: {have}, not {' or '.join(sorted(known))}"]


def _config_keys(
    consumer: str, written: Mapping[str, Any], config: Mapping[str, Any], absent: Mapping[str, Any]
) -> list[str]:
    nested = config.get("eagle_config") or {}
    found = []
    for key, wanted in written.items():
        if key in _ELSEWHERE - absent.keys():
            continue
        have = config.get(key)
        if consumer == "vllm" and key == "norm_before_fc":
            have = nested.get(key, have)
        if have is None and not (consumer == "sglang" and key in config):  # null has a meaning in SGLang
            have = absent.get(key, wanted)
        if have != wanted:
            found.append(f"{key}: read as {have}, but the drafter has {wanted}")
    return found


def _layers(consumer: str, drafter: DrafterToExport, config: Mapping[str, Any]) -> list[str]:
    """Compare the boundaries that the consumer would read with the drafter's."""
    if drafter.config.taps is None:
        return []
    nested = config.get("eagle_config") or {}
    default = drafter.config.default_taps(drafter.layers) if drafter.layers is not None else None
    if consumer == "sglang":
        ids = nested.get(IDS)
        read = default if ids is None else tuple(k + 1 for k in ids)
    elif config.get(IDS):
        read = tuple(config[IDS])
    elif consumer == "vllm" and (nested.get(IDS) or nested.get("layer_ids")):
        return [f"{IDS}: only nested, which vLLM's versions read differently"]
    else:
        read = default
    wanted = drafter.config.taps
    return [] if read == wanted else [f"{IDS}: read as {_boundaries(read)}, but the drafter has {_boundaries(wanted)}"]


def _outputs(consumer: str, drafter: DrafterToExport, config: Mapping[str, Any]) -> list[str]:
    """Compare the layer outputs and the mask token that the consumer would read with those of a block drafter."""
    if consumer == "speculators":  # they have keys of their own there
        return []
    nested = drafter.kind.family == DFLASH
    section = (config.get("dflash_config") or {}) if nested else config
    wanted = {"target_layer_ids": [tap - 1 for tap in drafter.config.taps or ()]}
    wanted["mask_token_id"] = drafter.get("mask_token_id")
    where = "dflash_config." if nested else ""
    return [
        f"{key}: {where}{key} is read as {section.get(key)}, but the drafter has {value}"
        for key, value in wanted.items()
        if section.get(key) != value
    ]


def _boundaries(taps: tuple[int, ...] | None) -> str:
    return "unknown boundaries" if taps is None else f"boundaries {list(taps)}"


def _tensors(consumer: str, written: Form, checkpoint: Checkpoint) -> list[str]:
    """Compare names: a missing tensor would be left random, and one with an unknown name would be skipped."""
    alike: Callable[[str], str] = str
    if consumer in ("vllm", "speculators"):
        alike = _without_midlayer
    names = {alike(name) for name in checkpoint.raw.headers.tensors if not is_computed(name)}
    names -= {alike(name) for name in checkpoint.raw.training_only}
    wanted = {alike(name) for name in written.tensors}
    missing, more = sorted(wanted - names), sorted(names - wanted - SHAREABLE - VOCABULARY_MAP)
    sides = ((missing, "missing"), (more, "unknown to it"))
    return [f"tensors: {_some(names)} {what}" for names, what in sides if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _without_midlayer(name: str) -> str:
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _map(written: Form, checkpoint: Checkpoint) -> list[str]:
    """Compare the vocabulary map, which all consumers read as offsets."""
    wanted, have = written.tensors.get("d2t"), checkpoint.raw.headers.tensors.get("d2t")
    if wanted is None or have is None:
        return []
    read = checkpoint.raw.load_some(["d2t"])["d2t"]
    return [] if torch.equal(read, wanted.to(read.dtype)) else ["d2t: holds target ids, but is read as offsets"]
