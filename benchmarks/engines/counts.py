"""An engine's counts of its drafts, and our counts under that engine's rules.

All engines take an answer's first token from prefill. Rules that differ by design are followed exactly, so that no
tolerance has to cover for them:

- vLLM always drafts chains of K, and counts accepted tokens before it cuts the answer at its limit or EOS token. So do
  we.
- With room for r more tokens, llama.cpp drafts min(K, r - 1), so none for the last token. It counts neither the EOS
  token nor the tokens after it as accepted, unless the EOS token was the last of the draft.
- llama.cpp's example program does the same, but also drafts for the first token, and chains of K again once there is
  room for at most one token: it stops only after it has exceeded the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.bench.serving.servers import SpeculationCounts, read_metrics
from eyas.types import Stats


@dataclass(frozen=True)
class Counts:
    """Counts of one answer or several."""

    drafts: int
    """Number of verified drafts."""
    drafted: int
    """Number of their tokens."""
    accepted: tuple[int, ...]
    """`[i]`: number of drafts with token i accepted; K entries."""

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, 1)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, -1)

    def _with(self, other: Counts, sign: int) -> Counts:
        accepted = tuple(a + sign * b for a, b in zip(self.accepted, other.accepted, strict=True))
        return Counts(self.drafts + sign * other.drafts, self.drafted + sign * other.drafted, accepted)

    @classmethod
    def none(cls, chain: int) -> Counts:
        """Zero counts of chains of `chain` tokens."""
        return cls(0, 0, (0,) * chain)

    @classmethod
    def of(cls, stats: Stats, chain: int) -> Counts:
        """The counts in an engine's statistics of chains of `chain` tokens."""
        reached = [sum(stats.accepted_histogram[i + 1 :]) for i in range(chain)]
        return cls(sum(stats.offered_by_depth[:1]), stats.drafted_depth, tuple(reached))

    @classmethod
    def of_page(cls, page: str, chain: int) -> Counts:
        """The counts on an engine's Prometheus page. ValueError if they don't fit chains of `chain` tokens."""
        counted = read_metrics(page) or SpeculationCounts()
        if len(counted.by_position) > chain or sum(counted.by_position) != counted.accepted:
            raise ValueError(f"these aren't counters of chains of {chain} tokens: {counted}")
        accepted = (*counted.by_position, *[0.0] * (chain - len(counted.by_position)))
        return cls(int(counted.drafts), int(counted.draft_tokens), tuple(map(int, accepted)))

    @property
    def accept_length(self) -> float:
        """Tokens per verified draft, including the bonus token; 0 if nothing was drafted."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 0.0

    def difference(self, theirs: Counts) -> float:
        """The largest relative difference of a count from ours; infinite if ours is 0 and theirs isn't."""
        pairs = zip(self.figures, theirs.figures, strict=True)
        return max(abs(a - b) / a if a else float("inf") if b else 0.0 for a, b in pairs)

    @property
    def figures(self) -> tuple[int, ...]:
        """All counts in one tuple."""
        return (self.drafts, self.drafted, *self.accepted)


class Round(NamedTuple):
    """One of our rounds with a chain of K."""

    accepted: int
    """Number of accepted draft tokens, before the answer is cut."""
    room: int
    """Number of tokens that the answer still had room for when the round began."""
    end: int | None = None
    """Index of the EOS token among the accepted draft tokens."""


def full_chains(rounds: Sequence[Round], chain: int) -> Counts:
    """Our rounds as vLLM counts them, and as we do."""
    stats = Stats()
    for each in rounds:
        stats.record(each.accepted, chain, 0)
    return Counts.of(stats, chain)


def fitting_chains(rounds: Sequence[Round], chain: int) -> Counts:
    """Our rounds as llama.cpp's server counts them (`get_n_draft_max`, `common_sampler_sample_and_accept_n`)."""
    stats = Stats()
    for each in rounds:
        offered = min(chain, each.room - 1)
        if offered:
            stats.record(_until_end(each.accepted, offered, each.end), offered, 0)
    return Counts.of(stats, chain)


def overshooting_chains(accepted: Callable[[int], int], chain: int, limit: int, end: int | None) -> Counts:
    """Chains as llama.cpp's `speculative-simple` grows them.

    `accepted(n)`: draft tokens accepted of a chain of K after n tokens of the answer; `end`: index of its EOS token.
    """
    stats = Stats()
    position = 0
    while position <= limit and (end is None or position <= end):
        offered = min(chain, limit - position - 1) if limit - position > 1 else chain
        kept = _until_end(accepted(position), offered, None if end is None else end - position)
        stats.record(kept, offered, position)
        position += kept + 1
    return Counts.of(stats, chain)


def _until_end(accepted: int, offered: int, end: int | None) -> int:
    """Accepted tokens of `offered` by llama.cpp's rule; `end`: index of the EOS token, which may be the bonus token."""
    kept = min(accepted, offered)
    return end if end is not None and end < min(kept, offered - 1) else kept
