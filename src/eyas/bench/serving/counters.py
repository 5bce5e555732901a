"""What a server itself counts of its speculation, on the pages where engines tell it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_COUNTER = re.compile(
    r"^(?:eyas|vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:{([^}]*)})? (\S+)",
    re.M,
)
_POSITION = re.compile(r'\bposition="(\d+)"')
_LENGTH = re.compile(r"^sglang:spec_accept_length(?:{[^}]*})? (\S+)", re.M)


@dataclass(frozen=True)
class Counted:
    """Counts since the server's start, or of a while; all 0 where it tells nothing."""

    drafts: float = 0.0
    """Drafts that were verified."""
    draft_tokens: float = 0.0
    accepted: float = 0.0
    """Draft tokens that were accepted."""
    by_position: tuple[float, ...] = ()
    """`[i]` = drafts accepted at depth i + 1."""
    length: float | None = None
    """A mean accept length that the server tells instead (SGLang): its latest, not that of a while."""

    def __add__(self, other: Counted) -> Counted:
        return self._with(other, 1.0)

    def __sub__(self, other: Counted) -> Counted:
        return self._with(other, -1.0)

    def _with(self, other: Counted, sign: float) -> Counted:
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return Counted(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(mine + sign * theirs for mine, theirs in positions),
            self.length if other.length is None or sign < 0 else other.length,
        )

    @property
    def rates(self) -> list[float]:
        """`[i]` = share of the drafts that were accepted at depth i + 1."""
        return [count / self.drafts for count in self.by_position] if self.drafts else []

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / drafts, or what the server calls it; None if it tells nothing."""
        return 1.0 + self.accepted / self.drafts if self.drafts else self.length


def read_metrics(page: str) -> Counted | None:
    """A Prometheus page: eyas's, vLLM's and llama.cpp's counters, summed over labels, or SGLang's gauge, or None."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in _COUNTER.findall(page):
        if name == "accepted_tokens_per_pos":
            found = _POSITION.search(labels)
            if found is not None:
                depth = int(found[1])
                positions[depth] = positions.get(depth, 0.0) + float(value)
        else:
            sums[name] = sums.get(name, 0.0) + float(value)
    lengths = [float(value) for value in _LENGTH.findall(page) if float(value) > 0]
    if not sums and not lengths:
        return None
    return Counted(
        sums.get("drafts", 0.0),
        sums.get("draft_tokens", 0.0),
        sums.get("accepted_tokens", 0.0),
        tuple(positions.get(depth, 0.0) for depth in range(max(positions, default=-1) + 1)),
        sum(lengths) / len(lengths) if lengths else None,
    )


def read_server_info(info: Any) -> Counted | None:
    """SGLang's `/get_server_info`, for servers without metrics; None if it tells no accept length."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    lengths = [state.get("avg_spec_accept_length") for state in states or () if isinstance(state, dict)]
    known = [float(length) for length in lengths if isinstance(length, int | float) and length > 0]
    return Counted(length=sum(known) / len(known)) if known else None
