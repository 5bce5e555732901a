"""One streamed answer: bytes with the time they came, read after the load is over so that reading costs it nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedAnswer:
    """What became of one request. Seconds are wall time since it was sent."""

    item: int
    """Which request of the load."""
    started: float
    """Seconds since the load began."""
    seconds: float
    first_seconds: float | None = None
    """When the first text came; None if none did."""
    tokens: int = 0
    """Output tokens as the server's `usage` counts them."""
    prompt_tokens: int = 0
    text: str = ""
    passes: float = 0.0
    """Target passes behind the answer, where the server tells (0 = it doesn't)."""
    accepted: float = 0.0
    """Draft tokens that were accepted in them."""
    error: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Time a token after the first (TPOT)."""
        if self.first_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


@dataclass(frozen=True)
class RawStream:
    """The raw stream."""

    item: int
    started: float
    pieces: Sequence[tuple[float, bytes]]
    """(seconds since the request was sent, bytes)."""
    seconds: float
    error: str | None = None

    def read(self) -> TimedAnswer:
        """Parse the events."""
        if self.error is not None:
            return TimedAnswer(self.item, self.started, self.seconds, error=self.error)
        texts: list[str] = []
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        first = None
        for seconds, event in _events(self.pieces):
            if event == "[DONE]":
                continue
            try:
                data = json.loads(event)
            except ValueError:
                return self._broken(f"an event is no JSON: {event[:80]!r}")
            if not isinstance(data, dict) or "error" in data:
                return self._broken(f"an error in the stream: {event[:200]}")
            usage, timings = data.get("usage") or usage, data.get("timings") or timings
            for choice in data.get("choices") or ():
                text = _text(choice)
                if text:
                    first = seconds if first is None else first
                    texts.append(text)
        if "completion_tokens" not in usage:
            return self._broken("no `usage` came, so tokens can't be counted: the server doesn't honour stream_options")
        tokens = int(usage["completion_tokens"])
        return TimedAnswer(
            self.item,
            self.started,
            self.seconds,
            first,
            tokens,
            int(usage.get("prompt_tokens") or 0),
            "".join(texts),
            *_speculation(tokens, usage, timings),
        )

    def _broken(self, error: str) -> TimedAnswer:
        return TimedAnswer(self.item, self.started, self.seconds, error=error)


def _events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """The data of every event, with the time its last byte came."""
    found, rest = [], b""
    for seconds, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                found.append((seconds, line[5:].strip().decode("utf-8", "replace")))
    return found


def _text(choice: dict[str, Any]) -> str:
    """What a choice of an event adds, of whichever kind: any of it is the first token."""
    delta = choice.get("delta") or {}
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(said or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""))


def _speculation(tokens: int, usage: dict[str, Any], timings: dict[str, Any]) -> tuple[float, float]:
    """Target passes and accepted draft tokens, as eyas tells them; for llama.cpp what was generated without being a
    draft token took a pass each."""
    told = usage.get("eyas")
    if isinstance(told, dict):
        passes = float(told.get("target_passes") or 0)
        return passes, passes * (float(told.get("accept_length") or 1.0) - 1.0)
    if "draft_n_accepted" in timings:
        accepted = float(timings["draft_n_accepted"])
        return tokens - accepted, accepted
    return 0.0, 0.0
