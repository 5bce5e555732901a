"""What an engine may use."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine's load."""

    max_running: int = 1
    """Most sequences in slots."""
    max_cached_tokens: int | None = None
    """Most tokens the slot cache is allocated for (slots x columns, see `CacheRoom`); None = what memory allows."""
    max_waiting: int | None = None
    """Most requests that wait for a slot. A key with none waiting may add one more, up to twice as many in all."""
    prefill_chunk: int | None = None
    """Most prompt tokens a step reads, so that running sequences don't stall; None = whole prompts."""
    prefix_tokens: int = 0
    """Most tokens kept for requests that begin alike, beside the slots; 0 = nothing is kept."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_cached_tokens", "max_waiting", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.prefix_tokens < 0:
            raise UsageError(f"prefix_tokens must be at least 0, got {self.prefix_tokens}")
