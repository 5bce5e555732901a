"""All drafter kinds, and which of them a checkpoint holds. A new kind is a file in `kinds/` and its name here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from eyas.drafters.config import DrafterConfig
from eyas.drafters.formats.fields import architectures
from eyas.drafters.formats.speculators import MODEL_TYPE_KEY
from eyas.drafters.kind import FileSigns, Kind
from eyas.drafters.kinds import eagle1, eagle3, mla, mlp
from eyas.errors import CheckpointError

KINDS: dict[str, Kind] = {kind.name: kind for kind in (eagle1.KIND, eagle3.KIND, mla.KIND, mlp.KIND)}

UNKNOWN = "unknown"
_ADVICE = {"p-eagle": "; a P-EAGLE drafter guesses all tokens in one pass: serve it with vLLM"}
"""What to do with a drafter of a kind that eyas knows by name only."""


def kind_of(config: Mapping[str, Any], tensors: Collection[str], where: str) -> Kind:
    """The kind of a checkpoint with this config.json and tensors of these names. Raises CheckpointError."""
    name = kind_name(config, tensors)
    made_by = config.get("architectures") or config.get("model_type") or "config.json names no architecture"
    if name not in KINDS:
        raise CheckpointError(
            f"{where} is no drafter that eyas loads: its kind is {name} ({made_by}); eyas loads {', '.join(KINDS)}"
            + _ADVICE.get(name, "")
        )
    unknown = set(architectures(config)).difference(*(kind.architectures for kind in KINDS.values()))
    if unknown:
        raise CheckpointError(
            f"{where} is of the unknown architecture {', '.join(sorted(unknown))}: it looks like {name}, but "
            "may compute something else; if it doesn't, take the name out of config.json"
        )
    return KINDS[name]


def kind_name(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """A name in `KINDS`, the name of a kind that eyas doesn't load, or `unknown`."""
    signs = FileSigns(config, tensors)
    for kind in KINDS.values():
        if kind.model_type is not None and config.get("model_type") == kind.model_type:
            return kind.name
    foreign = _foreign_kind(signs)
    if foreign is not None:
        return foreign
    return next((kind.name for kind in KINDS.values() if kind.recognises(signs)), UNKNOWN)


def _foreign_kind(signs: FileSigns) -> str | None:
    """The name of a kind that eyas doesn't load; None if nothing points to one."""
    algorithm = signs.config.get(MODEL_TYPE_KEY, "eagle3")
    if algorithm != "eagle3":
        return f"speculators {algorithm}"
    parallel = signs.config.get("parallel_drafting") or "mask_hidden" in signs.tensors
    return "p-eagle" if parallel or any("peagle" in name for name in signs.architectures) else None


def kind_for(config: DrafterConfig) -> Kind:
    """The kind that a config belongs to."""
    return next(kind for kind in KINDS.values() if kind.config is type(config))
