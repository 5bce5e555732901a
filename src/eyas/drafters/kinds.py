"""The drafter kinds, and which one a directory holds: told from its config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from eyas.drafters import eagle3
from eyas.drafters.config import DrafterConfig
from eyas.drafters.eagle3 import config as eagle3_config
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError

UNKNOWN = "unknown"
_FIRST, _MIDLAYER = "layers.0.", "midlayer."


@dataclass(frozen=True)
class Kind:
    """One way to draft: its config, its network, and how its files are read and written."""

    name: str
    config: type[DrafterConfig]
    network: Callable[[Any], DraftNetwork]
    read: Callable[[dict[str, Any], str, Collection[str], Collection[str] | None], DrafterConfig]
    """(config.json, its path, keys to overlook, tensor names or None) -> config"""
    write: Callable[[Any], dict[str, Any]]
    first_layer: str = _FIRST
    """What the first layer's tensors are called in the files it writes."""
    full_map: bool = False
    """Write the vocabulary map also where it maps every token to itself."""


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "eagle3", eagle3.Eagle3Config, eagle3.Eagle3Network, eagle3_config.config_from_dict,
            eagle3_config.config_to_dict, _MIDLAYER, full_map=True,
        ),
    )
}  # fmt: skip


def kind_name(config: dict[str, Any], names: Collection[str]) -> str:
    """A name in `KINDS`, the name of a drafter eyas doesn't load, or `unknown`; names are those of the tensors."""
    own = {tensor_name(name) for name in names}
    if "speculators_model_type" in config:
        return "speculators"
    if config.get("parallel_drafting") or "mask_hidden" in own:
        return "p-eagle"
    if _is_eagle3(config, own):
        return "eagle3"
    if "fc.weight" in own and "norm.weight" not in own:
        return "eagle1"
    return UNKNOWN


def kind_of(config: dict[str, Any], names: Collection[str], where: str) -> Kind:
    """The kind of a checkpoint; CheckpointError if eyas has none such."""
    name = kind_name(config, names)
    if name not in KINDS:
        made_by = config.get("architectures") or config.get("model_type") or "nothing that config.json names"
        raise CheckpointError(
            f"{where} is no drafter that eyas loads: it looks like {name} ({made_by}); eyas loads {', '.join(KINDS)}"
        )
    return KINDS[name]


def kind_for(config: DrafterConfig) -> Kind:
    """The kind a config belongs to."""
    return next(kind for kind in KINDS.values() if kind.config is type(config))


def tensor_name(name: str) -> str:
    """A checkpoint's tensor name in the `layers.{i}.*` layout."""
    name = name.removeprefix("model.")
    return _FIRST + name.removeprefix(_MIDLAYER) if name.startswith(_MIDLAYER) else name


def file_name(name: str, kind: Kind) -> str:
    """The way back."""
    return kind.first_layer + name.removeprefix(_FIRST) if name.startswith(_FIRST) else name


def _is_eagle3(config: dict[str, Any], names: Collection[str]) -> bool:
    by_name = any("eagle3" in str(name).lower() for name in config.get("architectures") or ())
    by_key = "draft_vocab_size" in config
    by_tensors = "fc.weight" in names and any(name.endswith("hidden_norm.weight") for name in names)
    return by_name or by_key or by_tensors
