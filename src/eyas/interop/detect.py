"""What kind of directory this is, told from its config.json and the names of its tensors."""

from __future__ import annotations

from typing import Any

from eyas.drafters.headers import Headers
from eyas.drafters.kinds import UNKNOWN, kind_name


def detect(config: dict[str, Any], headers: Headers) -> str:
    """A drafter kind (those eyas loads and those it knows by name), `target` or `unknown`."""
    kind = kind_name(config, headers.tensors)
    if kind == UNKNOWN and (config.get("model_type") or config.get("architectures")):
        return "target"
    return kind
