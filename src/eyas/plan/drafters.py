"""What each kind of drafter costs, and what it may bring. Every assumption is a named constant here.

Drafters that make all guesses in one pass have work of their own. Block drafters: a chat's states become keys and
values of every layer once; each anchor runs all slots of a block through all layers. Embedding and head are the
target's, so the draft vocabulary is the whole one and heads have no weight gradients. P-EAGLE: EAGLE-3's first layer
and further ones, with an embedding and a head of its own that are trained; its steps have fewer and fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.registry import KINDS
from eyas.plan.costs import ModelSize, TrainingMemory, Workload
from eyas.plan.devices import Machine
from eyas.targets.taps import choose_taps, spread_taps, why_taps

ACCEPT_LENGTHS = (4.24, 6.74)
"""EAGLE-3 on Llama-3.1-8B as its authors report: MT-bench at temperature 1, HumanEval at 0 (arXiv 2503.01840)."""
PUBLISHED_ANSWERS = 50e6
"""Answer tokens from which drafters are as good as published ones: those of some 60,000 chats."""
DATA_EXPONENT = 1 / 5
"""With a share s of these tokens, s to this power of the tokens beyond the first of a pass are guessed. An estimate:
2.0 million give 2.7 to 4.0, where SmolLM2's drafter was measured at 2.6 to 3.8, and 60,000 give 1.8 to 2.5, where one
for the same kind of chats had 2.6."""
EFFICIENCIES = (0.53, 0.84)
"""Speedup divided by accept length: in an independent benchmark, and at the authors' best."""
DRAFT_PASSES = 6
"""Drafter passes a round: five levels of a tree, and one pass over the accepted tokens."""

ACTIVATIONS = (50, 8, 5)
"""Bytes of a row that the backward pass needs, for each of hidden size, MLP width, and widths of queries and keys: what
autograd saves under bf16 autocast, counted."""


class Speedup(NamedTuple):
    """An estimate of the speedup over plain decoding, as a range."""

    draft_cost: float
    """The time of a drafter pass in units of a target pass."""
    low: float
    high: float


def drafter_parameters(target: ModelSize, taps: int, draft_vocab: int) -> tuple[int, int, int]:
    """Parameter counts (fc, layer, head) of an EAGLE-3 drafter that has the target's widths."""
    hidden, vocab = target.hidden, min(draft_vocab, target.vocab)
    attention = 2 * hidden * (target.query + 2 * target.key) + target.query * hidden
    return taps * hidden * hidden, attention + 3 * hidden * target.intermediate, vocab * hidden


def expected_lengths(published: tuple[float, float], work: Workload) -> tuple[float, float]:
    """The accept lengths to expect of so much data, where enough of it gives `published` ones."""
    answers = work.tokens * work.answer_share
    reached = min(1.0, answers / PUBLISHED_ANSWERS) ** DATA_EXPONENT
    low, high = (1 + (length - 1) * reached for length in published)
    return low, high


def about_lengths(published: tuple[float, float], work: Workload) -> str:
    """The accept lengths in words, with what the data has to do with them."""
    low, high = expected_lengths(published, work)
    answers = work.tokens * work.answer_share
    if answers >= PUBLISHED_ANSWERS:
        return f"accept length {low} to {high}"
    return (
        f"accept length {low:.2f} to {high:.2f}, as {answers / 1e6:.2g} million answer tokens are less than the "
        f"{PUBLISHED_ANSWERS / 1e6:.0f} of published drafters, whose {published[0]} to {published[1]}"
    )


def _speedup(draft_cost: float, passes: float, published: tuple[float, float], work: Workload) -> Speedup:
    """The expected speedup at batch size 1, where a pass takes as long as reading its weights.

    It is accept length / (1 + draft passes x draft cost), limited to the published `EFFICIENCIES`.
    """
    bound, lengths = 1 / (1 + passes * draft_cost), expected_lengths(published, work)
    low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
    return Speedup(draft_cost, low, high)


def _kept_for_backward(target: ModelSize) -> int:
    """Bytes of a row that the backward pass needs (`ACTIVATIONS`)."""
    by_hidden, by_intermediate, by_heads = ACTIVATIONS
    return by_hidden * target.hidden + by_intermediate * target.intermediate + by_heads * (target.query + target.key)


def _memory(target: ModelSize, own: int, kept: int) -> TrainingMemory:
    """Of `own` parameters, and what a micro-batch keeps."""
    return TrainingMemory(18 * own, kept, 4 * target.head, 2 * target.total, target.layers)


class Eagle3Plan(NamedTuple):
    """What an EAGLE-3 drafter will cost, and what it may bring."""

    target: ModelSize
    taps: int
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch goes over, in words."""
        return f"tokens, {self.work.unroll} steps"

    @property
    def _parameters(self) -> tuple[int, int, int]:
        return drafter_parameters(self.target, self.taps, self.work.draft_vocab)

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: the unrolled drafter forward and backward, and the teacher's head.

        Forward and backward are counted as three forwards; heads are applied to answer tokens only. Online training
        adds `capture_hours` every epoch.
        """
        target, work, (fc, layer, head) = self.target, self.work, self._parameters
        step = 2 * (layer + head * work.answer_share) + 2 * target.query * work.length
        each = 3 * (2 * fc + work.unroll * step) + 2 * target.head * work.answer_share
        return work.epochs * work.tokens * each / (machine.tflops * 1e12 * devices) / 3600

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, in bf16.

        Every device of several holds as much. Later steps have rows only where an answer is predicted.
        """
        target, tokens, parts = self.target, chats * length, self._parameters
        rows = tokens * (1 + (self.work.unroll - 1) * self.work.answer_share)
        states = 2 * (self.taps + 1) * target.hidden * tokens
        return _memory(target, sum(parts), round(rows * _kept_for_backward(target)) + states + 12 * parts[2])

    def speedup(self) -> Speedup:
        """The expected speedup at batch size 1: every level of a tree is a pass of the drafter."""
        fc, layer, head = self._parameters
        cost = (layer + head + fc / DRAFT_PASSES) / (self.target.body + self.target.head)
        return _speedup(cost, DRAFT_PASSES, ACCEPT_LENGTHS, self.work)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"an EAGLE-3 drafter of the target's widths, {self.work.draft_vocab} draft tokens: a pass costs "
            f"{draft_cost:.1%} of the target's, {DRAFT_PASSES} a round",
            f"{about_lengths(ACCEPT_LENGTHS, self.work)}: what EAGLE-3's authors report for Llama-3.1-8B; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as others measured",
        )


BLOCKS = ("dflash", "jetspec", "dspark", "dflash2", "domino", "xpress", "lilicorr")
"""What `shape.kind` calls the block drafters."""
_QWEN4B, _OTHERS = "what DSpark's authors report for Qwen3-4B", "DFlash's on Qwen3-4B, for want of own ones"
BLOCK_ACCEPT_LENGTHS = {
    "dflash": (3.07, 5.40, _QWEN4B), "dspark": (3.64, 6.11, _QWEN4B),
    "jetspec": (4.58, 7.82, "what its authors report for its trees on Qwen3-8B"),
    "domino": (3.70, 6.51, "DFlash's on Qwen3-4B and the 20.6 % that speculators gained (#773)"),
    "xpress": (3.99, 7.02, "DFlash's on Qwen3-4B and the 30 % that its authors report"),
    "dflash2": (3.07, 5.40, _OTHERS), "lilicorr": (3.07, 5.40, _OTHERS),
}  # fmt: skip
"""Accept lengths on MT-bench and GSM8K, at temperature 1 where that is known, and where they are from."""


class BlockShape(NamedTuple):
    """A block drafter of the target's widths, and how it is trained."""

    kind: str
    layers: int
    taps: int
    block_size: int | None
    """Slots, the anchor's included; None = seven guesses."""
    anchors: int
    """Most blocks of a chat."""

    def network(self, target: ModelSize) -> BlockNetwork:
        """It on the meta device, with the sizes of its heads that are the kind's defaults."""
        kind = KINDS.get(self.kind, KINDS["dflash"])  # JetSpec has DFlash's tensors
        fields = kind.config.model_fields
        values: dict[str, Any] = {
            "hidden_size": target.hidden, "target_hidden_size": target.hidden, "vocab_size": target.vocab,
            "draft_vocab_size": target.vocab, "embedding": "shared", "head": "shared", "mask_token_id": 0,
            "intermediate_size": target.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": max(1, target.query // target.key), "num_key_value_heads": 1,
            "head_dim": target.key, "num_aux_hidden_states": self.taps,
            "block_size": self.block_size or 7 + (not fields["sample_from_anchor"].default),
        }  # fmt: skip
        if "lilicorr_hidden_size" in fields:
            values["lilicorr_hidden_size"] = target.hidden
        return cast(BlockNetwork, kind.blank(kind.config(**values)))

    def blocks(self, answer_tokens: float) -> float:
        """Blocks that are trained on in a chat with so many answer tokens."""
        return min(float(self.anchors), answer_tokens)


class BlockParameters(NamedTuple):
    """Parameter counts of a block drafter's matrices; embedding and head, which are the target's, aren't counted."""

    fc: int
    context: int
    """Keys and values of all layers, which are part of the layers."""
    layers: int
    correction: int
    """What is multiplied for a guess beside them."""
    tables: int
    """What is only looked up, by token."""
    slots: int
    guesses: int
    candidates: int
    """How often a guess's correction is multiplied: once, or for each of so many candidates."""

    @property
    def own(self) -> int:
        """All that is trained."""
        return self.fc + self.layers + self.correction + self.tables


def block_parameters(target: ModelSize, shape: BlockShape) -> BlockParameters:
    """The parameters of a drafter of this shape for a target."""
    network = shape.network(target)
    readout = network.readout()
    read = {id(p) for p in readout.parameters()} if readout is not None else set()
    counts = dict.fromkeys(("fc", "context", "layers", "correction", "tables"), 0)
    for name, p in network.named_parameters():
        if p.dim() < 2:
            continue
        part = "fc" if name == "fc.weight" else "layers" if name.startswith("layers.") else "correction"
        looked_up = p.shape[0] == target.vocab and id(p) not in read
        counts["tables" if looked_up else part] += p.numel()
        counts["context"] += p.numel() if ".k_proj." in name or ".v_proj." in name else 0
    config = network.config
    candidates = getattr(config, "lilicorr_candidate_topk", 1)
    return BlockParameters(**counts, slots=config.block_size, guesses=config.guesses, candidates=candidates)


class BlockPlan(NamedTuple):
    """What a block drafter will cost, and what it may bring."""

    target: ModelSize
    shape: BlockShape
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch goes over, in words."""
        slots = block_parameters(self.target, self.shape).slots
        return f"chats, up to {self.shape.anchors} blocks of {slots} slots each"

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: every anchor's block forward and backward, and the teacher's head.

        Forward and backward are counted as three forwards, the drafter's use of the target's head as two.
        """
        target, shape, work = self.target, self.shape, self.work
        found, answers = block_parameters(target, shape), work.length * work.answer_share
        blocks = shape.blocks(answers)
        context = 2 * (found.fc + found.context) * work.length
        slots = blocks * found.slots * (2 * found.layers + shape.layers * 2 * target.query * work.length)
        guesses = blocks * found.guesses
        corrections = 2 * found.correction * found.candidates * guesses
        each = 3 * (context + slots + corrections) + 2 * target.head * (2 * guesses + answers)
        return work.epochs * work.samples * each / (machine.tflops * 1e12 * devices) / 3600

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, counted as for EAGLE-3."""
        target, shape = self.target, self.shape
        found = block_parameters(target, shape)
        rows = chats * shape.blocks(length * self.work.answer_share) * found.slots * shape.layers
        context = chats * length * (2 * (shape.taps + 1) * target.hidden + 8 * shape.layers * target.key)
        return _memory(target, found.own, round(rows * _kept_for_backward(target)) + context)

    def speedup(self) -> Speedup:
        """The expected speedup at batch size 1: a draft reads the drafter's weights and the target's head once."""
        found, target = block_parameters(self.target, self.shape), self.target
        cost = (found.fc + found.layers + found.correction + target.head) / (target.body + target.head)
        return _speedup(cost, 1, BLOCK_ACCEPT_LENGTHS[self.shape.kind][:2], self.work)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        *lengths, source = BLOCK_ACCEPT_LENGTHS[self.shape.kind]
        return (
            f"a {self.shape.kind} drafter of the target's widths, {self.shape.layers} layers, with the target's "
            f"embedding and head: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{about_lengths((lengths[0], lengths[1]), self.work)}: {source}; "
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
        states = 2 * (self.taps + 1) * target.hidden * tokens
        own = fc + layers + head + target.head  # its embedding is as large as the target's head
        return _memory(target, own, round(rows * _kept_for_backward(target)) + states + 12 * head)

    def speedup(self) -> Speedup:
        """The expected speedup at batch size 1: a draft reads the drafter's weights once."""
        cost = sum(self._parameters) / (self.target.body + self.target.head)
        return _speedup(cost, 1, ACCEPT_LENGTHS, self.work)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"a P-EAGLE drafter of the target's widths, {self.layers} layers, {self.work.draft_vocab} draft tokens, "
            f"with an embedding of its own: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{about_lengths(ACCEPT_LENGTHS, self.work)}, which is EAGLE-3's: what its authors report for "
            "Llama-3.1-8B; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as others measured",
        )


DrafterPlan = Eagle3Plan | PEaglePlan | BlockPlan


@dataclass(frozen=True)
class PlannedDrafter:
    """The drafter that is planned: its kind, and sizes of which None is the kind's default."""

    kind: str = "eagle3"
    unroll: int | None = None
    draft_vocab: int | None = None
    draft_layers: int | None = None
    block_size: int | None = None
    anchors: int | None = None

    @property
    def is_block(self) -> bool:
        """Whether it guesses blocks, with the target's embedding and head."""
        return self.kind in BLOCKS

    @property
    def layers(self) -> int:
        """Its decoder layers, if they are more than one."""
        return self.draft_layers or (5 if self.is_block else 4)

    def boundaries(self, config: Any, size: ModelSize) -> tuple[int, ...]:
        """The taps that it reads of a target with this transformers config, if none are given."""
        return spread_taps(self.layers, size.layers) if self.is_block else choose_taps(config)

    def why(self, config: Any, taps: tuple[int, ...], *, given: bool) -> str:
        """Why it reads these taps, unless they were given, in words."""
        if self.is_block and not given:
            return f"taps for {self.layers} draft layers: capture with --taps {','.join(map(str, taps))}"
        return why_taps(config, taps)

    def work(self, size: ModelSize, work: Workload) -> Workload:
        """The workload with this drafter's steps and vocabulary."""
        steps = self.unroll or (8 if self.kind == "peagle" else 7)
        return work._replace(unroll=steps, draft_vocab=min(self.draft_vocab or 32000, size.vocab))

    def plan(self, size: ModelSize, taps: int, work: Workload) -> DrafterPlan:
        """What it will cost on this workload, as `work` makes it, reading so many taps."""
        if self.is_block:
            shape = BlockShape(self.kind, self.layers, taps, self.block_size, self.anchors or 512)
            return BlockPlan(size, shape, work)
        return PEaglePlan(size, taps, self.layers, work) if self.kind == "peagle" else Eagle3Plan(size, taps, work)
