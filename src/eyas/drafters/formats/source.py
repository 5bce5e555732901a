"""A checkpoint as it lies on disk, in native keys; none of its weights is read yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas.drafters.headers import Headers


@dataclass
class Source:
    """What every format is brought into before a kind reads it."""

    path: Path
    format: str
    config: dict[str, Any]
    """In the keys of native config.json files."""
    where: str
    """Where the configuration was read, for messages."""
    headers: Headers
    """Names may still be those of the file."""
    load: Callable[[], dict[str, Tensor]]
    """Read all tensors."""
    load_some: Callable[[Sequence[str]], dict[str, Tensor]]
    """Read the tensors of these names."""
    used: list[str] | None = None
    """Keys of the file that were read; None = those of `config`."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Key or tensor -> why it changes nothing."""
    defaulted: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    training_only: tuple[str, ...] = ()
    """Tensors that are left out."""
