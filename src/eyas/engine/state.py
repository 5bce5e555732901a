"""What an engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineState:
    """An engine between two steps."""

    running: int
    """Sequences that decode."""
    prefilling: int
    """Sequences in a slot whose prompt isn't read yet."""
    waiting: int
    cached_tokens: int
    """Tokens of sequences in slots."""
    allocated_tokens: int
    """Slots x columns of the cache: its memory."""
    cache_limit: int | None
    prefix_tokens: int
    """Tokens kept for requests that begin alike."""
    prefix_limit: int
    preempted_total: int
    prompt_tokens_total: int
    """Prompt tokens of admitted requests, reused ones included."""
    prefix_hit_tokens_total: int
    """Prompt tokens that were not read again."""
    generated_tokens_total: int
    rounds_total: int
    finished_total: dict[str, int]
    """By finish reason."""
