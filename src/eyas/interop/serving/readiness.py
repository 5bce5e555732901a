"""Does a drafter lie there in the form an engine reads? Told by comparing its files with what export would write.

Engines take defaults for keys that are missing and skip tensors they don't know, without an error, so every key that
matters is compared, absent ones by the default that the engine takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from eyas.drafters.checkpoint import Checkpoint, computed
from eyas.drafters.files import read_json
from eyas.drafters.formats.opening import CONFIG, gguf_in
from eyas.drafters.formats.taps import IDS
from eyas.drafters.registry import FIRST, MIDLAYER
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport
from eyas.interop.export.forms import Form

_LENT = frozenset({"embed_tokens.weight", "lm_head.weight"})
_MAP = frozenset({"d2t", "t2d"})
_TOGGLES = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_USUAL = _TOGGLES | {"num_aux_hidden_states": 3, "max_position_embeddings": 2048}
_ABSENT: dict[str, dict[str, Any]] = {
    "vllm": _USUAL,
    "sglang": _USUAL | {"draft_vocab_size": "missing", "rope_theta": 10000.0},
    "speculators": {**_TOGGLES, "norm_before_residual": True},
}
"""What a consumer takes where a key is missing; other keys are sizes, for which everyone takes the same."""
_ELSEWHERE = frozenset("taps eyas default_tree dtype torch_dtype eagle_config architectures model_type".split()) | {
    IDS, "rope_parameters", "rope_theta", "rope_scaling", "speculators_config", "speculators_version",
    "transformer_layer_config", "has_no_defaults_at_init", "tie_word_embeddings",
}  # fmt: skip
"""Keys that change nothing there, or are compared by what they mean."""
_ARCHITECTURES: dict[tuple[str, str], frozenset[str]] = {
    ("vllm", "eagle1"): frozenset({"LlamaForCausalLM", "EagleLlamaForCausalLM"}),
    ("vllm", "eagle3"): frozenset(
        "LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM "
        "Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM".split()
    ),
    ("vllm", "mla"): frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}),
}
"""Further names of the same network; elsewhere only the one that export writes is known."""


def obstacles(consumer: str, drafter: DrafterToExport, checkpoint: Checkpoint) -> list[str]:
    """Why a consumer doesn't read these files as `drafter`, which is prepared for it; empty if it does.

    Raises CheckpointError, ConfigError.
    """
    form = CONSUMERS[consumer].form
    path = checkpoint.raw.path
    if form is None:
        return [] if gguf_in(path) is not None else ["it is a directory of safetensors, not a GGUF file"]
    if gguf_in(path) is not None:
        return ["it is a GGUF file, not a directory with config.json"]
    written, raw = form(drafter), read_json(path / CONFIG)
    found = [*_architecture(consumer, drafter, written, raw), *_keys(consumer, written, raw)]
    found += [*_layers(consumer, drafter, raw), *_tensors(consumer, written, checkpoint), *_map(written, checkpoint)]
    if consumer == "sglang" and "bias" in raw and "bias" not in written.config:
        found.append("bias: SGLang takes it for one of the attention")
    return found


def _architecture(consumer: str, drafter: DrafterToExport, written: Form, raw: Mapping[str, Any]) -> list[str]:
    if consumer == "speculators":  # told by its own key
        return []
    known = _ARCHITECTURES.get((consumer, drafter.kind.name), frozenset()) | set(written.config["architectures"])
    if drafter.get("qk_norm"):
        known = frozenset(written.config["architectures"])
    have = raw.get("architectures") or []
    return [] if set(have) & known else [f"architectures: {have}, not {' or '.join(sorted(known))}"]


def _keys(consumer: str, written: Form, raw: Mapping[str, Any]) -> list[str]:
    absent, nested = _ABSENT[consumer], raw.get("eagle_config") or {}
    found = []
    for key, wanted in written.config.items():
        if key in _ELSEWHERE - absent.keys():
            continue
        have = raw.get(key)
        if consumer == "vllm" and key == "norm_before_fc":
            have = nested.get(key, have)
        if have is None and not (consumer == "sglang" and key in raw):  # there null means something
            have = absent.get(key, wanted)
        if have != wanted:
            found.append(f"{key}: read as {have}, the drafter has {wanted}")
    if consumer == "sglang" and "rope_scaling" in written.config and not raw.get("rope_scaling"):
        found.append("rope_scaling: missing, so RoPE is read as unscaled")
    return found


def _layers(consumer: str, drafter: DrafterToExport, raw: Mapping[str, Any]) -> list[str]:
    """Layer numbers, read as the consumer reads them."""
    if drafter.config.taps is None:
        return []
    nested = raw.get("eagle_config") or {}
    default = drafter.config.default_taps(drafter.layers) if drafter.layers is not None else None
    if consumer == "sglang":
        ids = nested.get(IDS)
        read = default if ids is None else tuple(k + 1 for k in ids)
    elif raw.get(IDS):
        read = tuple(raw[IDS])
    elif consumer == "vllm" and (nested.get(IDS) or nested.get("layer_ids")):
        return [f"{IDS}: nested only, which its versions read differently"]
    else:
        read = default
    wanted = drafter.config.taps
    return [] if read == wanted else [f"{IDS}: read as boundaries {_list(read)}, the drafter's are {_list(wanted)}"]


def _list(taps: tuple[int, ...] | None) -> str:
    return "that nobody knows" if taps is None else str(list(taps))


def _tensors(consumer: str, written: Form, checkpoint: Checkpoint) -> list[str]:
    """Names: a tensor that is missing would stay random, one with another name is skipped."""
    alike: Callable[[str], str] = str
    if consumer in ("vllm", "speculators"):
        alike = _in_layers
    names = {alike(name) for name in checkpoint.raw.headers.tensors if not computed(name)}
    names -= {alike(name) for name in checkpoint.raw.training_only}
    wanted = {alike(name) for name in written.tensors}
    missing, more = sorted(wanted - names), sorted(names - wanted - _LENT - _MAP)
    sides = ((missing, "missing"), (more, "unknown to it"))
    return [f"tensors: {_some(names)} {what}" for names, what in sides if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _in_layers(name: str) -> str:
    return FIRST + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _map(written: Form, checkpoint: Checkpoint) -> list[str]:
    """All consumers read offsets."""
    wanted, have = written.tensors.get("d2t"), checkpoint.raw.headers.tensors.get("d2t")
    if wanted is None or have is None:
        return []
    read = checkpoint.raw.load_some(["d2t"])["d2t"]
    return [] if torch.equal(read, wanted.to(read.dtype)) else ["d2t: target ids, where offsets are read"]
