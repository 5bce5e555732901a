"""What the controller is given about a round, and the state that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.engine.round import VerifiedDraft
from eyas.tree import TreeSpec
from eyas.tree.draft_tree import Source

_FADE = 1.0 - 1.0 / 100.0
"""The factor by which running averages decay each round."""
ANSWER = 100
"""The tokens assumed to be left of an answer, and those over which the reading of prompts is spread at first. With 50
and 200, the first six answers of a recorded pair take 4% longer, and 3% less."""


class RoundRecord(NamedTuple):
    """The measurements of one decoding round, as the engine reports them; R rows."""

    texts: Sequence[int]
    """[R] a number for the answer in each row, the same in all of its rounds."""
    lengths: Sequence[int]
    """[R] committed tokens of each row before the round."""
    spec: TreeSpec | None
    """The tree that `plan` chose; None = a plain round."""
    draft: VerifiedDraft | None
    """The draft and the path of each row; None after a plain round."""
    draft_seconds: float
    """Time of drafting, including the observation of deferred pairs."""
    pass_seconds: float
    """Time of the target pass, the walk and the host's wait for them."""
    tokens: int
    """Tokens of the target pass: rows + nodes."""
    emitted: int
    """Tokens that the round added over all rows."""
    seconds: float | None = None
    """Time of the whole round, including the drafter's observation; None = draft_seconds + pass_seconds."""
    drafting: Sequence[bool] | None = None
    """[R] the rows that were drafted for; None = all."""
    overhead: float = 0.0
    """Seconds that the previous round took besides its `seconds`: for planning, making room, and learning."""
    prompt_pairs: int = 0
    """Pairs of prompts that the drafter was given since the previous round, read or deferred."""

    @property
    def rows(self) -> int:
        """R, the number of rows that were decoded together."""
        return len(self.texts)

    @property
    def whole(self) -> float:
        """Time of the whole round, as far as it was measured."""
        return self.draft_seconds + self.pass_seconds if self.seconds is None else self.seconds

    @property
    def drafted(self) -> bool:
        """Whether a network, or a window, made the draft, if there is one."""
        return self.draft is not None and not self.draft.tree.lookup.alone

    @property
    def lookup_seconds(self) -> float:
        """The part of `draft_seconds` in which a drafter with a network looked for copies."""
        return 0.0 if self.draft is None else self.draft.tree.lookup.seconds

    @property
    def copied(self) -> list[int]:
        """[R] accepted tokens that were copied, and that the drafter's network, if there is one, didn't guess too."""
        if self.draft is None or self.draft.tree.sources is None:
            return [0] * self.rows
        sources = self.draft.tree.sources.tolist()
        return [
            sum(row[node - 1] in (Source.LOOKUP, Source.DISPUTED) for node in path[1:])
            for row, path in zip(sources, self.draft.paths, strict=True)
        ]

    @property
    def padded(self) -> int:
        """The padded positions of the pass: the sum over rows of how much shorter they are than the longest."""
        if self.draft is None or self.rows == 1:
            return 0
        longest = 1 + int(self.draft.tree.valid.sum(1).max())
        return max(0, self.rows * longest - self.tokens)


@dataclass(frozen=True)
class ControllerState:
    """The controller's current choice and its totals; depth, width and budget are 0 for plain decoding."""

    depth: int = 0
    width: int = 0
    budget: int = 0
    """Expected nodes of a round, over the whole batch."""
    predicted_tokens_per_second: float = 0.0
    """Prediction for the shape in use."""
    plain_tokens_per_second: float = 0.0
    """Prediction for plain decoding of the same rows."""
    measured_tokens_per_second: float = 0.0
    """Running average over the last rounds."""
    mean_depth: float = 0.0
    """Average levels of a round so far; plain rounds count as 0 here and in the next two."""
    mean_width: float = 0.0
    mean_nodes: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    probes: int = 0
    """Rounds that were probes of other shapes."""


class Totals:
    """Running averages and counts over the rounds so far."""

    def __init__(self) -> None:
        self._emitted = self._seconds = self._prompt_pairs = 0.0
        self._counts = {"rounds": 0, "plain_rounds": 0, "probes": 0}
        self._sums = {"depth": 0, "width": 0, "nodes": 0}

    @property
    def rounds(self) -> int:
        """The number of rounds so far, plain ones included."""
        return self._counts["rounds"]

    @property
    def prompt_pairs(self) -> float:
        """The pairs of prompts that come with each generated token."""
        return self._prompt_pairs / (self._emitted + ANSWER)

    def count(self, record: RoundRecord, width: int) -> None:
        """Count a round and the depth, `width` and nodes of its tree."""
        self._counts["rounds"] += 1
        self._counts["plain_rounds"] += not record.drafted and record.tokens == record.rows
        self._sums["nodes"] += record.tokens - record.rows
        if record.drafted and record.spec is not None:
            self._sums["depth"] += record.spec.depth
            self._sums["width"] += width

    def probed(self) -> None:
        """Count a round that was a probe."""
        self._counts["probes"] += 1

    def average(self, record: RoundRecord) -> None:
        """Include a round in the running averages."""
        self._emitted = self._emitted * _FADE + record.emitted
        self._seconds = self._seconds * _FADE + record.whole
        self._prompt_pairs = self._prompt_pairs * _FADE + record.prompt_pairs

    def state(self) -> ControllerState:
        """The part of the state that is about the rounds so far."""
        depth, width, nodes = (total / max(1, self.rounds) for total in self._sums.values())
        return ControllerState(
            measured_tokens_per_second=self._emitted / self._seconds if self._seconds else 0.0,
            mean_depth=depth,
            mean_width=width,
            mean_nodes=nodes,
            **self._counts,
        )
