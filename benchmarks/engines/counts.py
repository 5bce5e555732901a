"""What an engine counted of its drafts, and what ours counted under that engine's rules.

Everybody takes an answer's first token from the prompt's pass. Rules that differ by design are followed exactly, so
that no tolerance has to cover for them:

- vLLM drafts chains of K to the end and counts what was accepted before the answer is cut at its limit or its end mark.
  So do we.
- llama.cpp drafts min(K, r - 1) tokens where there is room for r more, so none for the last one; and an end mark is no
  accepted draft token to it, nor is what follows, unless it was the last token of the draft.
- llama.cpp's example program does so too, but drafts for the first token, and chains of K again once there is room for
  one token or none: it stops only when it has written more than it was to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.bench.serving.servers import SpeculationCounts, read_metrics
from eyas.types import Stats


@dataclass(frozen=True)
class Counts:
    """Of one answer or of many."""

    drafts: int
    """Drafts that were verified."""
    drafted: int
    """Their tokens."""
    accepted: tuple[int, ...]
    """`[i]` = drafts of which token i was accepted; K of them."""

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, -1)

    def _with(self, other: Counts, sign: int) -> Counts:
        accepted = tuple(a + sign * b for a, b in zip(self.accepted, other.accepted, strict=True))
        return Counts(self.drafts + sign * other.drafts, self.drafted + sign * other.drafted, accepted)

    @classmethod
    def none(cls, chain: int) -> Counts:
        """Zero counts of chains of `chain`."""
        return cls(0, 0, (0,) * chain)

    @classmethod
    def of(cls, stats: Stats, chain: int) -> Counts:
        """The counts in an engine's statistics of chains of `chain`."""
        reached = [sum(stats.accepted_histogram[i + 1 :]) for i in range(chain)]
        return cls(sum(stats.offered_by_depth[:1]), stats.drafted_depth, tuple(reached))

    @classmethod
    def of_page(cls, page: str, chain: int) -> Counts:
        """The counts on an engine's Prometheus page. ValueError if they aren't of chains of `chain`."""
        counted = read_metrics(page) or SpeculationCounts()
        if len(counted.by_position) > chain or sum(counted.by_position) != counted.accepted:
            raise ValueError(f"these aren't counters of chains of {chain}: {counted}")
        accepted = (*counted.by_position, *[0.0] * (chain - len(counted.by_position)))
        return cls(int(counted.drafts), int(counted.draft_tokens), tuple(map(int, accepted)))

    @property
    def accept_length(self) -> float:
        """Tokens a verified draft, the bonus token counted; 0 where nothing was drafted."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 0.0

    def difference(self, theirs: Counts) -> float:
        """The largest relative difference of any of the counts to ours; infinite where ours is 0 and theirs isn't."""
        pairs = zip(self.figures, theirs.figures, strict=True)
        return max(abs(a - b) / a if a else float("inf") if b else 0.0 for a, b in pairs)

    @property
    def figures(self) -> tuple[int, ...]:
        """All of them in a row."""
        return (self.drafts, self.drafted, *self.accepted)


class Round(NamedTuple):
    """One of our rounds with a chain of K."""

    accepted: int
    """Draft tokens, before cutting."""
    room: int
    """How many more tokens the answer could take when it began."""
    end: int | None = None
    """Which of the accepted draft tokens was the end mark, from 0."""


def full_chains(rounds: Sequence[Round], chain: int) -> Counts:
    """Our rounds as vLLM counts, and as we do."""
    stats = Stats()
    for each in rounds:
        stats.record(each.accepted, chain, 0)
    return Counts.of(stats, chain)


def fitting_chains(rounds: Sequence[Round], chain: int) -> Counts:
    """Our rounds as llama.cpp's server counts (`get_n_draft_max`, `common_sampler_sample_and_accept_n`)."""
    stats = Stats()
    for each in rounds:
        offered = min(chain, each.room - 1)
        if offered:
            stats.record(_until_end(each.accepted, offered, each.end), offered, 0)
    return Counts.of(stats, chain)


def overshooting_chains(accepted: Callable[[int], int], chain: int, limit: int, end: int | None) -> Counts:
    """Chains as llama.cpp's `speculative-simple` grows them.

    `accepted(n)`: draft tokens accepted of a chain of K after n tokens of the answer; `end`: where its end mark is.
    """
    stats, position = Stats(), 0
    while position <= limit and (end is None or position <= end):
        offered = min(chain, limit - position - 1) if limit - position > 1 else chain
        kept = _until_end(accepted(position), offered, None if end is None else end - position)
        stats.record(kept, offered, position)
        position += kept + 1
    return Counts.of(stats, chain)


def _until_end(accepted: int, offered: int, end: int | None) -> int:
    """Of `offered` tokens; `end`: which of what is written is the end mark, the bonus token perhaps."""
    kept = min(accepted, offered)
    return end if end is not None and end < min(kept, offered - 1) else kept
