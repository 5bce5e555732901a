"""Which drafter kind a checkpoint or a config belongs to. The kinds themselves are in `kinds/` and in plug-ins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from eyas.drafters.config import DrafterConfig
from eyas.drafters.formats.fields import architectures
from eyas.drafters.formats.medusa import is_medusa
from eyas.drafters.formats.speculators import ALGORITHMS, MODEL_TYPE_KEY
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD, VOCABULARY_MAP, native_name
from eyas.drafters.kind import EAGLE, EAGLE3, EAGLE3_MLA, PEAGLE, Family, Kind
from eyas.drafters.kinds import KINDS
from eyas.errors import CheckpointError

UNKNOWN = "unknown"


def kind_of(config: Mapping[str, Any], tensors: Collection[str], where: str) -> Kind:
    """The kind of a checkpoint with this config.json and tensors of these names. Raises CheckpointError."""
    name = kind_name(config, tensors)
    made_by = config.get("architectures") or config.get("model_type") or "config.json names no architecture"
    if name not in KINDS:
        raise CheckpointError(
            f"{where} is no drafter that eyas loads: its kind is {name} ({made_by}); eyas loads {', '.join(KINDS)}"
        )
    known = set[str]().union(*(each.architectures for each in KINDS.core()), KINDS[name].architectures)
    unknown = set(architectures(config)) - known
    if unknown:
        unknown = unknown.difference(*(each.architectures for each in KINDS.plugged()))
    if unknown:
        raise CheckpointError(
            f"{where} has the unknown architecture {', '.join(sorted(unknown))}: it looks like {name}, but "
            "may compute something else; if it doesn't, remove that name from config.json"
        )
    return KINDS[name]


def kind_name(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """A name in `KINDS`, the name of a kind that eyas doesn't load, or `unknown`.

    Plug-ins are only asked, and imported, where the core's kinds leave something unexplained.
    """
    names = {native_name(name) for name in tensors}
    core = [*KINDS.core()]
    found = _core_name(core, config, names)
    known = set[str]().union(*(kind.architectures for kind in core))
    if found == UNKNOWN or not known.issuperset(architectures(config)) or _has_more(found, names):
        claimed = (kind.name for kind in KINDS.plugged() if _claims(kind, config, names))
        return next(claimed, found)
    return found


_PLAIN_BLOCK = {"fc", "hidden_norm", "layers", "norm"} | {
    name.split(".")[0] for name in (EMBEDDING, HEAD, *VOCABULARY_MAP)
}
"""The first parts of the tensor names of a block drafter without corrections."""


def _has_more(name: str, names: Collection[str]) -> bool:
    """Whether a checkpoint that looks like a plain block drafter has tensors that such a drafter doesn't have."""
    plain = name in KINDS and KINDS[name].config.is_block and not KINDS[name].marks
    return plain and not _PLAIN_BLOCK.issuperset(name.split(".")[0] for name in names)


def _claims(kind: Kind, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a plug-in's kind is the one of a checkpoint, by its model type, its tensors or its architectures."""
    by_type = kind.model_type is not None and config.get("model_type") == kind.model_type
    by_tensors = bool(kind.marks) and any(name.startswith(kind.marks) for name in names)
    return by_type or by_tensors or not kind.architectures.isdisjoint(architectures(config))


def _core_name(kinds: Collection[Kind], config: Mapping[str, Any], names: Collection[str]) -> str:
    """What `kind_name` returns if there are no kinds but the core's."""
    for kind in kinds:
        by_name = not kind.architectures.isdisjoint(architectures(config))
        if kind.model_type is not None and (config.get("model_type") == kind.model_type or by_name):
            return kind.name
    if is_medusa(config):
        return "medusa"
    algorithm = config.get(MODEL_TYPE_KEY)
    if algorithm is not None:
        return algorithm if isinstance(algorithm, str) and algorithm in ALGORITHMS else f"speculators {algorithm}"
    made_for = [name.lower() for name in architectures(config)]
    family = _family(config, names, made_for)
    # block drafters have EAGLE-3's fc and hidden_norm, but outside their layers
    if "hidden_norm.weight" in names and family != PEAGLE:
        return _block_kind(kinds, config, names)
    found = (kind.name for kind in kinds if kind.model_type is None and kind.family == family)
    return UNKNOWN if family is None else next(found, UNKNOWN)


def _family(config: Mapping[str, Any], names: Collection[str], made_for: Collection[str]) -> Family | None:
    """The published network indicated by config keys, native tensor names and architectures (lower case)."""
    parallel = config.get("parallel_drafting") or config.get(MODEL_TYPE_KEY) == "peagle"
    if parallel or "mask_hidden" in names or any("peagle" in name for name in made_for):
        return PEAGLE
    # tensors are the surest sign, then the architecture's name, then a key
    if "fc.weight" in names and any(name.endswith("hidden_norm.weight") for name in names):
        third = True
    elif any("eagle" in name for name in made_for):
        third = any("eagle3" in name for name in made_for)
    elif "draft_vocab_size" in config:
        third = True
    elif "fc.weight" in names and "norm.weight" not in names:
        third = False
    else:
        return None
    latent = "kv_lora_rank" in config or any("deepseek" in name for name in made_for)
    return (EAGLE3_MLA if latent else EAGLE3) if third else EAGLE


def _block_kind(kinds: Collection[Kind], config: Mapping[str, Any], names: Collection[str]) -> str:
    """The kind of a block drafter: by tensors that only it has, else by its architecture."""
    blocks = [kind for kind in kinds if kind.config.is_block]
    by_tensors = (kind.name for kind in blocks if any(name.startswith(kind.marks) for name in names) and kind.marks)
    by_name = (kind.name for kind in blocks if kind.architectures & {*architectures(config)} and kind.marks)
    plain = (kind.name for kind in blocks if not kind.marks)
    return next(chain(by_tensors, by_name, plain), UNKNOWN)


def kind_for(config: DrafterConfig) -> Kind:
    """The kind that the config of a drafter checkpoint belongs to."""
    found = kind_if_any(config)
    assert found is not None
    return found


def kind_if_any(config: DrafterConfig) -> Kind | None:
    """The kind that a config belongs to; None for a module inside a target."""
    return next((kind for kind in chain(KINDS.core(), KINDS.plugged()) if kind.config is type(config)), None)
