"""The pick among candidates, and the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.bench.score import WORDS, Candidate, Criterion, rank, tied, uncertainty

WHY: dict[Criterion, str] = {
    "accept_length": (
        "Accept length decides: it is counted, not timed, so it has no timing noise, and candidates that cost the same "
        "per round rank by it as they would by speed on a quiet machine."
    ),
    "speedup": "Speedup decides: tokens/s over those of plain decoding in the same interleaved run.",
    "tokens_per_second": "Tokens/s decide, all candidates interleaved in one run.",
}


@dataclass(frozen=True)
class Choice:
    """Candidates in order; the first is the pick."""

    ranked: tuple[Candidate, ...]
    by: Criterion
    ties: tuple[str, ...]
    """Names that these prompts can't tell from the pick."""
    reason: str

    @property
    def best(self) -> Candidate:
        """The pick."""
        return self.ranked[0]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "by": self.by,
            "pick": self.best.name,
            "reason": self.reason,
            "ties": list(self.ties),
            "ranked": [candidate.as_dict() for candidate in self.ranked],
        }


def choose(candidates: Sequence[Candidate], by: Criterion) -> Choice:
    """The best mean over tasks; at least one candidate, all on the same tasks."""
    ranked = rank(candidates, by)
    best, rest = ranked[0], ranked[1:]
    ties = tuple(other.name for other in rest if tied(best, other, by))
    return Choice(tuple(ranked), by, ties, _reason(best, rest, ties, by))


def _reason(best: Candidate, rest: Sequence[Candidate], ties: Sequence[str], by: Criterion) -> str:
    scope = "over tasks" if len(best.tasks) > 1 else f"on {next(iter(best.tasks))}"
    digits = 1 if by == "tokens_per_second" else 3
    parts = [f"{best.name} has the best mean {WORDS[by]} {scope}, {best.mean(by):.{digits}f}."]
    if rest:
        second = rest[0]
        gap, error = best.mean(by) - second.mean(by), uncertainty(best, second, by)
        sure = "one prompt a file: no telling how sure that is"
        if error is not None:
            sure = f"standard error over prompts {error:.{digits}f}"
        lower = f"{gap:.{digits}f} lower" if gap else "no lower, but later in order"
        parts.append(f"Next is {second.name}, {lower} ({sure}).")
    else:
        parts.append("There was nothing else to choose from.")
    if ties:
        verb = "is" if len(ties) == 1 else "are"
        parts.append(
            f"{', '.join(ties)} {verb} within two standard errors: these prompts can't tell them from the pick, "
            "more prompts might."
        )
    if by != "speedup" and (fastest := rank([best, *rest], "speedup")[0]) is not best:
        parts.append(
            f"{fastest.name} has the best measured speedup, {fastest.mean('speedup'):.2f}x "
            f"against {best.mean('speedup'):.2f}x."
        )
    return " ".join([*parts, WHY[by]])
