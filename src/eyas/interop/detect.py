"""What kind of directory this is, told from its config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from eyas.interop.headers import Headers

Kind = Literal["target", "eagle3", "eagle1", "p-eagle", "speculators", "unknown"]


def detect(config: dict[str, Any], headers: Headers) -> Kind:
    """The kind, by what only that kind has."""
    names = {name.removeprefix("model.") for name in headers.tensors}
    if "speculators_model_type" in config:
        return "speculators"
    if config.get("parallel_drafting") or "mask_hidden" in names:
        return "p-eagle"
    if _is_eagle3(config, names):
        return "eagle3"
    if "fc.weight" in names and "norm.weight" not in names:
        return "eagle1"
    if config.get("model_type") or config.get("architectures"):
        return "target"
    return "unknown"


def _is_eagle3(config: dict[str, Any], names: Collection[str]) -> bool:
    by_name = any("eagle3" in str(name).lower() for name in config.get("architectures") or ())
    by_key = "draft_vocab_size" in config
    by_tensors = "fc.weight" in names and any(name.endswith("hidden_norm.weight") for name in names)
    return by_name or by_key or by_tensors
