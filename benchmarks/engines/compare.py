"""Comparison of an engine's answers and counts with ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.counts import Counts
from benchmarks.engines.reference import Reference
from eyas.bench.offline.certificate import first_difference

TIE = 1e-3
"""Logit gap below which two float32 kernels may rank two tokens differently."""
COARSE_TIE = 0.5
"""The same for an engine that multiplies packed weights by 8-bit activations: a loose bound, nine times the largest
gap seen in the four prompts it was tried on."""
DRAFT_TIE = 1e-4
"""The same for the drafter's logits of two draft tokens."""
TOLERANCE = 0.01
"""Allowed difference of every count, relative to ours."""


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one prompt."""

    tokens: tuple[int, ...]
    """Including the EOS token, if it was emitted."""
    counts: Counts


@dataclass(frozen=True)
class Parting:
    """Where an engine's answer first differs from ours."""

    prompt: int
    position: int
    """Index of the first different token."""
    gap: float | None
    """Our token's logit minus theirs; None if one of the answers ends here."""
    within: float = TIE
    """Gap below which rounding excuses the difference."""

    @property
    def tie(self) -> bool:
        """Whether rounding excuses the difference."""
        return self.gap is not None and abs(self.gap) < self.within


@dataclass(frozen=True)
class Result:
    """One run of an engine over all prompts."""

    engine: str
    version: str
    form: str
    """The exported form: its consumer's name."""
    way: str
    """How the engine was run: in process, over HTTP, or given the folder alone."""
    chain: int
    date: str
    prompts: int
    tokens: int
    """Number of tokens in our answers."""
    equal: int
    """Number of answers equal to ours, token for token."""
    same_counts: int
    """Number of equal answers whose counts also equal ours."""
    ours: Counts
    theirs: Counts
    """Both cover the equal answers except `draft_ties`; counts of different texts can't be compared."""
    partings: tuple[Parting, ...] = field(default=())
    misfit: str = ""
    """Why this form isn't for this engine, which must show in the run's counts."""
    kind: str = "eagle3"
    """The drafter's kind."""
    draft_ties: int = 0
    """Number of equal answers with different counts in which the drafter's two best tokens once nearly tied."""
    own: int | None = None
    """For an engine with coarser rounding (`COARSE_TIE`): number of answers equal to its own plain decoding."""

    @property
    def lossless(self) -> bool:
        """Whether every answer equals ours or first differs at a tie."""
        return self.equal + len(self.partings) == self.prompts and all(parting.tie for parting in self.partings)

    @property
    def passed(self) -> bool:
        """Whether answers and counts are as expected. A misfit must have right answers and wrong counts; for an engine
        with coarser rounding, only the answers must be right."""
        if self.own is not None:
            return self.lossless
        near = self.equal > 0 and self.ours.difference(self.theirs) <= TOLERANCE
        return self.lossless and near == (not self.misfit)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that results files have."""
        return {
            **{name: value for name, value in vars(self).items() if name not in ("ours", "theirs", "partings")},
            "ours": vars(self.ours) | {"accept_length": round(self.ours.accept_length, 4)},
            "theirs": vars(self.theirs) | {"accept_length": round(self.theirs.accept_length, 4)},
            "largest_difference": round(self.ours.difference(self.theirs), 5),
            "partings": [
                {"prompt": each.prompt, "place": each.position, "gap": each.gap, "tie": each.tie, "within": each.within}
                for each in self.partings
            ],
            "passed": self.passed,
        }

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Result:
        """The result that `as_dict` wrote."""
        known = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        for side in ("ours", "theirs"):
            counts = row[side]
            known[side] = Counts(counts["drafts"], counts["drafted"], tuple(counts["accepted"]))
        partings = tuple(
            Parting(each["prompt"], each["place"], each["gap"], each.get("within", TIE)) for each in row["partings"]
        )
        return cls(**known | {"partings": partings})


def compare(
    run: dict[str, Any],
    answers: Sequence[Answer],
    reference: Sequence[Reference],
    chain: int,
    count: Callable[[Reference], Counts],
    gap: Callable[[Reference, int, int], float],
) -> Result:
    """Compare an engine's answers with ours, prompt by prompt.

    `run`: the fields of a Result about the run itself; `count`: our counts by the engine's rules; `gap`: `Gaps.gap`.
    """
    ours = Counts.none(chain)
    theirs = Counts.none(chain)
    equal = 0
    same = 0
    ties = 0
    partings = list[Parting]()
    for number, (answer, expected) in enumerate(zip(answers, reference, strict=True)):
        position = first_difference(expected.answer, answer.tokens)
        if position is None:
            equal += 1
            counted = count(expected)
            if counted != answer.counts and expected.leads[chain] < DRAFT_TIE:
                ties += 1
                continue
            ours, theirs = ours + counted, theirs + answer.counts
            same += counted == answer.counts
            continue
        inside = position < min(len(expected.answer), len(answer.tokens))
        lead = gap(expected, position, answer.tokens[position]) if inside else None
        partings.append(Parting(number, position, lead))
    return Result(
        **run,
        chain=chain,
        prompts=len(reference),
        tokens=sum(len(each.answer) for each in reference),
        equal=equal,
        same_counts=same,
        draft_ties=ties,
        ours=ours,
        theirs=theirs,
        partings=tuple(partings),
    )
