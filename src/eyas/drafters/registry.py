"""The drafter kinds, and which one a directory holds: told from its config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.drafters.config import DrafterConfig
from eyas.drafters.formats.fields import Fields, architectures
from eyas.drafters.formats.speculators import MODEL_TYPE_KEY
from eyas.drafters.kinds import eagle1, eagle3, mla, mlp
from eyas.drafters.kinds.eagle1 import Eagle1Config, Eagle1Network
from eyas.drafters.kinds.eagle3 import Eagle3Config, Eagle3Network
from eyas.drafters.kinds.mla import MlaConfig, MlaNetwork
from eyas.drafters.kinds.mlp import MlpConfig, MlpNetwork
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError

UNKNOWN = "unknown"
WAYS_OUT = {"p-eagle": "; a P-EAGLE drafter guesses all tokens in one pass: serve it with vLLM"}
"""What to do with a drafter of a kind that isn't loaded."""
FIRST, MIDLAYER = "layers.0.", "midlayer."


@dataclass(frozen=True)
class Kind:
    """One way to draft: its config, its network, and how its files are read and written."""

    name: str
    config: type[DrafterConfig]
    network: Callable[[Any], DraftNetwork]
    read: Callable[[Fields], DrafterConfig]
    """A configuration in native keys -> config"""
    write: Callable[[Any], dict[str, Any]]
    first_layer: str = FIRST
    """What the first layer's tensors are called in the files it writes."""
    full_map: bool = False
    """Write the vocabulary map also where it maps every token to itself, as this kind's readers expect."""


_ALL = (
    Kind("eagle1", Eagle1Config, Eagle1Network, eagle1.read, eagle1.config_to_dict),
    Kind("eagle3", Eagle3Config, Eagle3Network, eagle3.read, eagle3.config_to_dict, MIDLAYER, full_map=True),
    Kind("mla", MlaConfig, MlaNetwork, mla.read, mla.config_to_dict, full_map=True),
    Kind("mlp", MlpConfig, MlpNetwork, mlp.read, mlp.config_to_dict),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_name(config: Mapping[str, Any], names: Collection[str]) -> str:
    """A name in `KINDS`, that of a drafter eyas doesn't load, or `unknown`; names are those of the tensors."""
    own = {tensor_name(name) for name in names}
    made_for = [name.lower() for name in architectures(config)]
    if config.get("model_type") == mlp.MODEL_TYPE:
        return "mlp"
    if MODEL_TYPE_KEY in config and config[MODEL_TYPE_KEY] != "eagle3":
        return f"speculators {config[MODEL_TYPE_KEY]}"
    if config.get("parallel_drafting") or "mask_hidden" in own or any("peagle" in name for name in made_for):
        return "p-eagle"
    # what the tensors say is surest, then the architecture's name, then a key
    if "fc.weight" in own and any(name.endswith("hidden_norm.weight") for name in own):
        generation = 3
    elif any("eagle" in name for name in made_for):
        generation = 3 if any("eagle3" in name for name in made_for) else 1
    elif "draft_vocab_size" in config or MODEL_TYPE_KEY in config:
        generation = 3
    elif "fc.weight" in own and "norm.weight" not in own:
        generation = 1
    else:
        return UNKNOWN
    if generation == 1:
        return "eagle1"
    latent = "kv_lora_rank" in config or any("deepseek" in name for name in made_for)
    return "mla" if latent else "eagle3"


_ARCHITECTURES = frozenset(
    "EagleLlamaForCausalLM LlamaForCausalLMEagle LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM "
    "EAGLE3LlamaForCausalLM Eagle3Qwen3ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM "
    "Eagle3MiniMaxM2ForCausalLM Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM Eagle3DeepSeekV3ForCausalLM "
    "Eagle3Speculator Eagle3DraftModel EyasMlpDrafter Qwen2ForCausalLM MixtralForCausalLM".split()
)
"""Every architecture whose network is one of ours: the field's names for EAGLE-1 (often the target's), 3, and MLA."""


def kind_of(config: Mapping[str, Any], names: Collection[str], where: str) -> Kind:
    """The kind of a checkpoint; CheckpointError if eyas has none such."""
    name = kind_name(config, names)
    made_by = config.get("architectures") or config.get("model_type") or "config.json names no architecture"
    if name not in KINDS:
        raise CheckpointError(
            f"{where} is no drafter that eyas loads: its kind is {name} ({made_by}); eyas loads {', '.join(KINDS)}"
            + WAYS_OUT.get(name, "")
        )
    strange = set(architectures(config)) - _ARCHITECTURES
    if strange:
        raise CheckpointError(
            f"{where} is of the unknown architecture {', '.join(sorted(strange))}: it looks like {name}, but "
            "may compute something else; if it doesn't, take the name out of config.json"
        )
    return KINDS[name]


def kind_for(config: DrafterConfig) -> Kind:
    """The kind a config belongs to."""
    return next(kind for kind in _ALL if kind.config is type(config))


def tensor_name(name: str) -> str:
    """A checkpoint's tensor name in the `layers.{i}.*` layout."""
    name = name.removeprefix("model.")
    return FIRST + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def file_name(name: str, kind: Kind) -> str:
    """The way back."""
    return kind.first_layer + name.removeprefix(FIRST) if name.startswith(FIRST) else name
