"""Estimates for `eyas plan` of drafters that make all guesses in one pass: as in `plan.py`, with their own work.

Block drafters: a chat's states become keys and values of every layer once; each anchor runs all slots of a block
through all layers. Embedding and head are the target's, so the draft vocabulary is the whole one and heads have no
weight gradients. P-EAGLE: EAGLE-3's first layer and further ones, with an embedding and a head of its own that are
trained; its steps have fewer and fewer rows.
"""

from __future__ import annotations

from typing import NamedTuple

from eyas.data import plan as plans
from eyas.data.devices import Machine
from eyas.data.plan import (
    ACTIVATIONS,
    EFFICIENCIES,
    ModelSize,
    Speedup,
    TrainingMemory,
    Workload,
    drafter_parameters,
)

ACCEPT_LENGTHS = {"dflash": (3.07, 5.40), "dspark": (3.64, 6.11)}
"""On Qwen3-4B at temperature 1, MT-bench and GSM8K, as DSpark's authors report for both."""
MARKOV_RANK = 256
"""The rank of DSpark's Markov head, as published."""


class BlockShape(NamedTuple):
    """A block drafter of the target's widths, and how it is trained."""

    kind: str
    layers: int
    taps: int
    block_size: int
    """Slots, the anchor's included."""
    anchors: int
    """Most blocks of a chat."""

    @property
    def guesses(self) -> int:
        """Tokens that a block predicts: the anchor's slot of DFlash predicts none."""
        return self.block_size - (self.kind == "dflash")

    def blocks(self, answer_tokens: float) -> float:
        """Blocks that are trained on in a chat with so many answer tokens."""
        return min(float(self.anchors), answer_tokens)


class BlockParameters(NamedTuple):
    """Parameter counts of a block drafter; embedding and head, which are the target's, aren't counted."""

    fc: int
    context: int
    """Keys and values of all layers, which are part of the layers."""
    layers: int
    markov: int
    """One of the Markov head's two matrices; the other is only looked up."""

    @property
    def own(self) -> int:
        """All that is trained."""
        return self.fc + self.layers + 2 * self.markov


def block_parameters(target: ModelSize, shape: BlockShape) -> BlockParameters:
    """The parameters of a drafter of this shape for a target."""
    hidden = target.hidden
    layer = 2 * hidden * (target.query + target.key) + 3 * hidden * target.intermediate
    return BlockParameters(
        fc=shape.taps * hidden * hidden,
        context=shape.layers * 2 * hidden * target.key,
        layers=shape.layers * layer,
        markov=MARKOV_RANK * target.vocab if shape.kind == "dspark" else 0,
    )


class BlockPlan(NamedTuple):
    """What a block drafter will cost, and what it may bring."""

    target: ModelSize
    shape: BlockShape
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch goes over, in words."""
        return f"chats, up to {self.shape.anchors} blocks of {self.shape.block_size} slots each"

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: every anchor's block forward and backward, and the teacher's head.

        Forward and backward are counted as three forwards, the drafter's use of the target's head as two.
        """
        target, shape, work = self.target, self.shape, self.work
        found, answers = block_parameters(target, shape), work.length * work.answer_share
        blocks = shape.blocks(answers)
        context = 2 * (found.fc + found.context) * work.length
        slots = blocks * shape.block_size * (2 * found.layers + shape.layers * 2 * target.query * work.length)
        guesses = blocks * shape.guesses
        each = 3 * (context + slots + 2 * found.markov * guesses) + 2 * target.head * (2 * guesses + answers)
        return work.epochs * work.samples * each / (machine.tflops * 1e12 * devices) / 3600

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, counted as for EAGLE-3."""
        target, shape = self.target, self.shape
        found = block_parameters(target, shape)
        rows = chats * shape.blocks(length * self.work.answer_share) * shape.block_size * shape.layers
        by_hidden, by_intermediate, by_heads = ACTIVATIONS
        row = by_hidden * target.hidden + by_intermediate * target.intermediate + by_heads * (target.query + target.key)
        context = chats * length * (2 * (shape.taps + 1) * target.hidden + 8 * shape.layers * target.key)
        kept = round(rows * row) + context
        return TrainingMemory(18 * found.own, kept, 4 * target.head, 2 * target.total, target.layers)

    def speedup(self) -> Speedup:
        """The expected speedup at batch size 1: a draft reads the drafter's weights and the target's head once."""
        found, target = block_parameters(self.target, self.shape), self.target
        cost = (found.fc + found.layers + found.markov + target.head) / (target.body + target.head)
        bound = 1 / (1 + cost)
        lengths = plans.expected_lengths(ACCEPT_LENGTHS[self.shape.kind], self.work)
        low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
        return Speedup(cost, low, high)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"a {self.shape.kind} drafter of the target's widths, {self.shape.layers} layers, with the target's "
            f"embedding and head: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{plans.about_lengths(ACCEPT_LENGTHS[self.shape.kind], self.work)}: what DSpark's authors report for "
            "Qwen3-4B at temperature 1; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as measured for EAGLE-3",
        )


SAMPLED, LEAST_SAMPLED = 0.7, 0.2
"""P-EAGLE's position sampling as published: step j is trained on 0.7^j of the chains, at least on a fifth of them."""


class PEaglePlan(NamedTuple):
    """What a P-EAGLE drafter will cost, and what it may bring; `work.unroll` is the guesses of a pass."""

    target: ModelSize
    taps: int
    layers: int
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch goes over, in words."""
        return f"tokens, {self.work.unroll} steps on a sample of their positions"

    @property
    def _parameters(self) -> tuple[int, int, int]:
        """Of fc, of all layers, and of the head; only the first layer reads embedding and state side by side."""
        target, (fc, first, head) = self.target, drafter_parameters(self.target, self.taps, self.work.draft_vocab)
        further = first - target.hidden * (target.query + 2 * target.key)
        return fc, first + (self.layers - 1) * further, head

    @property
    def _later(self) -> float:
        """Rows of all steps but the first, for each answer token."""
        return sum(max(SAMPLED**step, LEAST_SAMPLED) for step in range(1, self.work.unroll))

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: all steps forward and backward, and the teacher's head."""
        target, work, (fc, layers, head) = self.target, self.work, self._parameters
        row = 2 * layers + self.layers * 2 * target.query * work.length
        rows, guesses = 1 + work.answer_share * self._later, work.answer_share * (1 + self._later)
        each = 3 * (2 * fc + rows * row + 2 * head * guesses) + 2 * target.head * work.answer_share
        return work.epochs * work.tokens * each / (machine.tflops * 1e12 * devices) / 3600

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, counted as for EAGLE-3."""
        target, tokens, (fc, layers, head) = self.target, chats * length, self._parameters
        rows = tokens * (1 + self.work.answer_share * self._later) * self.layers
        by_hidden, by_intermediate, by_heads = ACTIVATIONS
        row = by_hidden * target.hidden + by_intermediate * target.intermediate + by_heads * (target.query + target.key)
        states = 2 * (self.taps + 1) * target.hidden * tokens
        own = fc + layers + head + target.head  # its embedding is as large as the target's head
        kept = round(rows * row) + states + 12 * head
        return TrainingMemory(18 * own, kept, 4 * target.head, 2 * target.total, target.layers)

    def speedup(self) -> Speedup:
        """The expected speedup at batch size 1: a draft reads the drafter's weights once."""
        cost = sum(self._parameters) / (self.target.body + self.target.head)
        bound, lengths = 1 / (1 + cost), plans.expected_lengths(plans.ACCEPT_LENGTHS, self.work)
        low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
        return Speedup(cost, low, high)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"a P-EAGLE drafter of the target's widths, {self.layers} layers, {self.work.draft_vocab} draft tokens, "
            f"with an embedding of its own: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{plans.about_lengths(plans.ACCEPT_LENGTHS, self.work)}, which is EAGLE-3's: what its authors report for "
            "Llama-3.1-8B; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as others measured",
        )
