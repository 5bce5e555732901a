"""What a drafter will cost, before anything is downloaded: bytes, hours and the speedup to expect. Pure arithmetic.

Bytes are exact for rows of the stated length and share of answer tokens: they come from the layout the store is
written by. Hours and speedup are estimates, and every assumption has a name here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eyas.data.machines import Machine
from eyas.data.model_size import ModelSize
from eyas.data.store.layout import Layout, Size, classic_bytes

VARIANTS: dict[str, dict[str, Any]] = {
    "--states bf16 --final all": {"states": "bf16", "final": "all", "top": None},
    "--states bf16 --final answers": {"states": "bf16", "final": "answers", "top": None},
    "--states fp8 --final all": {"states": "fp8", "final": "all", "top": None},
    "--states fp8 --final answers": {"states": "fp8", "final": "answers", "top": None},
    "--states fp8 --final top:64": {"states": "fp8", "final": "top", "top": 64},
}
"""Options of `data capture`, the exactest first."""

ACCEPT_LENGTHS = (4.24, 6.74)
"""EAGLE-3 on Llama-3.1-8B as its authors report: MT-bench at temperature 1, HumanEval at 0 (arXiv 2503.01840)."""
EFFICIENCIES = (0.53, 0.84)
"""Share of the accept length that survives as speedup: an independent benchmark's, the authors' best."""
DRAFT_PASSES = 6
"""Drafter passes a round: a tree of depth 5, and one over what was accepted."""


class Work(NamedTuple):
    """How much there is to do."""

    samples: int
    length: int
    answer_share: float = 0.5
    epochs: int = 1
    unroll: int = 7
    draft_vocab: int = 32000

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def size(self) -> Size:
        """As the layout counts."""
        return Size(self.samples, self.tokens, round(self.tokens * self.answer_share))


class Bytes(NamedTuple):
    """Room a layout takes."""

    name: str
    total: int
    per_token: float
    of_classic: float


class Speedup(NamedTuple):
    """An estimate, from low to high."""

    draft_cost: float
    """A drafter pass, in target passes."""
    low: float
    high: float


def variants(layout: Layout) -> dict[str, Layout]:
    """The same taps of the same target, stored in every way."""
    return {option: Layout(**{**layout.model_dump(), **change}) for option, change in VARIANTS.items()}


def storage(layout: Layout, work: Work) -> list[Bytes]:
    """The classic layout, and every way of ours. Headers aren't counted: some 700 bytes a shard."""
    classic = classic_bytes(work.tokens, layout.hidden)
    totals = {"classic (8 H + 16)": classic}
    totals |= {option: other.data_bytes(work.size) for option, other in variants(layout).items()}
    return [Bytes(name, total, total / work.tokens, total / classic) for name, total in totals.items()]


def drafter_parameters(target: ModelSize, taps: int, draft_vocab: int) -> tuple[int, int, int]:
    """(fc, layer, head) of an EAGLE-3 drafter with the target's own widths."""
    hidden, vocab = target.hidden, min(draft_vocab, target.vocab)
    attention = 2 * hidden * (target.query + 2 * target.key) + target.query * hidden
    return taps * hidden * hidden, attention + 3 * hidden * target.intermediate, vocab * hidden


def capture_hours(target: ModelSize, work: Work, machine: Machine, devices: int) -> float:
    """One pass of the target over all tokens, without its head."""
    return work.tokens * _forward(target, work.length) / (machine.tflops * 1e12 * devices) / 3600


def training_hours(target: ModelSize, taps: int, work: Work, machine: Machine, devices: int) -> float:
    """All epochs from a store: the unrolled drafter forward and backward (three forwards), and the teacher's head.

    Heads are applied to answer tokens alone. Online training adds `capture_hours` every epoch.
    """
    fc, layer, head = drafter_parameters(target, taps, work.draft_vocab)
    attention = 2 * target.query * work.length
    step = 2 * (layer + head * work.answer_share) + attention
    each = 3 * (2 * fc + work.unroll * step) + 2 * target.head * work.answer_share
    return work.epochs * work.tokens * each / (machine.tflops * 1e12 * devices) / 3600


def plain_speed(target: ModelSize, machine: Machine) -> float:
    """Tokens a second of plain bf16 decoding at batch 1, which reads every active weight once a token."""
    return machine.bandwidth * 1e9 / (2 * (target.body + target.head))


def speedup(target: ModelSize, taps: int, draft_vocab: int) -> Speedup:
    """At batch 1, where a pass costs what reading its weights costs.

    accept length / (1 + draft passes x draft cost), and never more of the accept length than others report to keep.
    """
    fc, layer, head = drafter_parameters(target, taps, draft_vocab)
    cost = (layer + head + fc / DRAFT_PASSES) / (target.body + target.head)
    bound = 1 / (1 + DRAFT_PASSES * cost)
    low, high = (tau * min(bound, share) for tau, share in zip(ACCEPT_LENGTHS, EFFICIENCIES, strict=True))
    return Speedup(cost, low, high)


def _forward(target: ModelSize, length: int) -> float:
    """Operations a token: two a parameter, and scores and sums over half the row on average."""
    return 2 * target.body + 2 * target.layers * target.query * length
