"""A streamed answer: bytes with the times they came, parsed after the load is over so that parsing doesn't slow it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedAnswer:
    """The outcome of one request. Seconds are wall time since it was sent."""

    item: int
    """The number of the request in its load."""
    started: float
    """When it was sent, in seconds since the load began."""
    seconds: float
    first_seconds: float | None = None
    """Until the first text; None if there was no text."""
    tokens: int = 0
    """Output tokens as the server's `usage` counts them."""
    prompt_tokens: int = 0
    text: str = ""
    passes: float = 0.0
    """Target passes behind the answer; 0 if the server doesn't report them."""
    accepted: float = 0.0
    """Draft tokens accepted in those passes."""
    error: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per token after the first (TPOT); None for fewer than two tokens."""
        if self.first_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


@dataclass(frozen=True)
class RawStream:
    """The bytes of a streamed answer, with the times they came."""

    item: int
    started: float
    pieces: Sequence[tuple[float, bytes]]
    """(seconds since the request was sent, bytes)."""
    seconds: float
    error: str | None = None

    def read(self) -> TimedAnswer:
        """Parse the server-sent events into an answer, whose `error` says what is wrong with them."""
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
                return self._broken(f"an event isn't valid JSON: {event[:80]!r}")
            if not isinstance(data, dict) or "error" in data:
                return self._broken(f"an error in the stream: {event[:200]}")
            usage, timings = data.get("usage") or usage, data.get("timings") or timings
            for choice in data.get("choices") or ():
                text = _text(choice)
                if text:
                    first = seconds if first is None else first
                    texts.append(text)
        if "completion_tokens" not in usage:
            return self._broken("no `usage` came, so tokens can't be counted: the server ignores stream_options")
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
    """The time and the data of every event; the time is when its last byte came."""
    found, rest = [], b""
    for seconds, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                found.append((seconds, line[5:].strip().decode("utf-8", "replace")))
    return found


def _text(choice: dict[str, Any]) -> str:
    """The text, reasoning or tool calls that a choice of an event adds: any of it ends the wait for the first token."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(text or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""))


def _speculation(tokens: int, usage: dict[str, Any], timings: dict[str, Any]) -> tuple[float, float]:
    """Target passes and accepted draft tokens, by eyas's `usage` or llama.cpp's `timings`; (0, 0) if neither is there.

    With llama.cpp every token that wasn't drafted took a pass.
    """
    statistics = usage.get("eyas")
    if isinstance(statistics, dict):
        passes = float(statistics.get("target_passes") or 0)
        return passes, passes * (float(statistics.get("accept_length") or 1.0) - 1.0)
    if "draft_n_accepted" in timings:
        accepted = float(timings["draft_n_accepted"])
        return tokens - accepted, accepted
    return 0.0, 0.0
