"""The cost of each kind of drafter and the speedup to expect. Every assumption is a named constant here.

Drafters that make all guesses in one pass are counted differently. A block drafter computes keys and values of every
layer from a chat's states once; each anchor runs all slots of a block through all layers. Embedding and head are the
target's, so the draft vocabulary is the full one and the head has no weight gradients. P-EAGLE has EAGLE-3's first
layer and further ones, and trains its own embedding and head; its steps have fewer and fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.kinds import KINDS
from eyas.errors import UsageError
from eyas.plan.costs import ModelSize, TrainingMemory, Workload
from eyas.plan.devices import Machine
from eyas.targets.taps import choose_taps, spread_taps, why_taps


class Published(NamedTuple):
    """Accept lengths that somebody measured for drafters of a kind: on chats and on code or mathematics."""

    low: float
    high: float
    source: str


ACCEPT_LENGTHS = {
    "eagle3": Published(4.24, 6.74, "what EAGLE-3's authors report for Llama-3.1-8B"),
    "dflash": Published(3.07, 5.40, "what DSpark's authors report for Qwen3-4B"),
    "dspark": Published(3.64, 6.11, "what DSpark's authors report for Qwen3-4B"),
    "jetspec": Published(4.58, 7.82, "what its authors report for its trees on Qwen3-8B"),
}  # fmt: skip
"""Kind -> its published accept lengths. EAGLE-3's are MT-bench's at temperature 1 and HumanEval's at 0 (arXiv
2503.01840), the others MT-bench's and GSM8K's. A kind that nobody measured so has none, and no speedup is estimated."""
PUBLISHED_ANSWERS = 50e6
"""Answer tokens with which drafters get as good as published ones, about those of 60,000 chats."""
DATA_EXPONENT = 1 / 5
"""With a share s of these tokens, the accept length beyond the first token of a pass is the published one times s to
this power. An estimate: 2.0 million tokens give 2.7 to 4.0 (SmolLM2's drafter was measured at 2.6 to 3.8), and
60,000 give 1.8 to 2.5 (a drafter for the same kind of chats had 2.6)."""
EFFICIENCIES = (0.53, 0.84)
"""Speedup divided by accept length: in an independent benchmark, and at the authors' best."""
DRAFT_PASSES = 6
"""Drafter passes per round: five levels of a tree, and one pass over the accepted tokens."""

MUON_OPERATIONS = 25
"""Floating-point operations of an update by Muon, for each parameter of a matrix and unit of its smaller side: five
times two products with it and one of small squares, which are 20 for a long matrix and 30 for a square one."""

ACTIVATIONS = (50, 8, 5)
"""Bytes per row that the backward pass needs, for each unit of hidden size, of MLP width, and of query and key width:
what autograd saves under bf16 autocast, counted."""


class Speedup(NamedTuple):
    """An estimate of the speedup over plain decoding, as a range."""

    low: float
    high: float


def drafter_parameters(target: ModelSize, taps: int, draft_vocab: int) -> tuple[int, int, int]:
    """Parameter counts (fc, layer, head) of an EAGLE-3 drafter that has the target's widths."""
    hidden = target.hidden
    vocab = min(draft_vocab, target.vocab)
    attention = 2 * hidden * (target.query + 2 * target.key) + target.query * hidden
    return taps * hidden * hidden, attention + 3 * hidden * target.intermediate, vocab * hidden


def expected_lengths(published: Published, work: Workload) -> tuple[float, float]:
    """The accept lengths to expect with this amount of data, if enough data gives the `published` ones."""
    answers = work.tokens * work.answer_share
    reached = min(1.0, answers / PUBLISHED_ANSWERS) ** DATA_EXPONENT
    low, high = (1 + (length - 1) * reached for length in (published.low, published.high))
    return low, high


def about_lengths(kind: str, work: Workload) -> str:
    """The accept lengths to expect of a kind, in words: how the amount of data limits them, and their source."""
    published = ACCEPT_LENGTHS.get(kind)
    if published is None:
        return f"no accept length, so no speedup: none is published for {kind} drafters"
    low, high = expected_lengths(published, work)
    answers = work.tokens * work.answer_share
    if answers >= PUBLISHED_ANSWERS:
        lengths = f"accept length {low} to {high}"
    else:
        lengths = (
            f"accept length {low:.2f} to {high:.2f}, because {answers / 1e6:.2g} million answer tokens are fewer than "
            f"the {PUBLISHED_ANSWERS / 1e6:.0f} million of published drafters, which reach {published.low} to "
            f"{published.high}"
        )
    kept = "as others measured" if kind == "eagle3" else "as measured for EAGLE-3"
    return f"{lengths}: {published.source}; {EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, {kept}"


def _speedup(kind: str, draft_cost: float, passes: float, work: Workload) -> Speedup | None:
    """The expected speedup at batch size 1, where a pass takes as long as reading its weights.

    None = no accept lengths of the kind are published. Else it is accept length / (1 + draft passes x draft cost),
    limited to the published `EFFICIENCIES`.
    """
    published = ACCEPT_LENGTHS.get(kind)
    if published is None:
        return None
    bound = 1 / (1 + passes * draft_cost)
    lengths = expected_lengths(published, work)
    low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
    return Speedup(low, high)


def _hours(target: ModelSize, work: Workload, machine: Machine, devices: int, each: float, matrices: int) -> float:
    """Hours of training with `each` floating-point operations for a token, which the devices share.

    An update by Muon, of `matrices` parameters in layers, is computed whole by every device.
    """
    updates = work.muon_updates * MUON_OPERATIONS * target.hidden * matrices
    return (work.epochs * work.tokens * each / devices + updates) / (machine.tflops * 1e12) / 3600


def _kept_for_backward(target: ModelSize) -> int:
    """Bytes per row that the backward pass needs (`ACTIVATIONS`)."""
    by_hidden, by_intermediate, by_heads = ACTIVATIONS
    return by_hidden * target.hidden + by_intermediate * target.intermediate + by_heads * (target.query + target.key)


def _memory(target: ModelSize, own: int, kept: int) -> TrainingMemory:
    """Training memory for `own` trained parameters and `kept` bytes of activations."""
    return TrainingMemory(18 * own, kept, 4 * target.head, 2 * target.total, target.layers)


class Eagle3Plan(NamedTuple):
    """The cost of an EAGLE-3 drafter and the speedup to expect."""

    target: ModelSize
    taps: int
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch processes, in words."""
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
        return _hours(target, work, machine, devices, each, fc + layer)

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, in bf16.

        With several devices, each holds this much. Later steps have rows only where an answer is predicted.
        """
        target = self.target
        tokens = chats * length
        parts = self._parameters
        rows = tokens * (1 + (self.work.unroll - 1) * self.work.answer_share)
        states = 2 * (self.taps + 1) * target.hidden * tokens
        return _memory(target, sum(parts), round(rows * _kept_for_backward(target)) + states + 12 * parts[2])

    @property
    def draft_cost(self) -> float:
        """The time of a drafter pass in units of a target pass."""
        fc, layer, head = self._parameters
        return (layer + head + fc / DRAFT_PASSES) / (self.target.body + self.target.head)

    def speedup(self) -> Speedup | None:
        """The expected speedup at batch size 1: every level of a tree is a pass of the drafter."""
        return _speedup("eagle3", self.draft_cost, DRAFT_PASSES, self.work)

    def assumed(self) -> tuple[str, str]:
        """What the figures assume about the drafter, in words."""
        return (
            f"an EAGLE-3 drafter of the target's widths, {self.work.draft_vocab} draft tokens: a pass costs "
            f"{self.draft_cost:.1%} of the target's, {DRAFT_PASSES} a round",
            about_lengths("eagle3", self.work),
        )


class BlockShape(NamedTuple):
    """A block drafter of the target's widths, and how it is trained."""

    kind: str
    layers: int
    taps: int
    block_size: int | None
    """Slots, including the anchor's; None = seven guesses."""
    anchors: int
    """Maximum blocks per chat."""

    def network(self, target: ModelSize) -> BlockNetwork:
        """The network on the meta device; the sizes of its heads are the kind's defaults."""
        kind = KINDS["dflash" if self.kind == "jetspec" else self.kind]  # JetSpec has DFlash's tensors
        fields = kind.config.model_fields
        values: dict[str, Any] = {
            "hidden_size": target.hidden, "target_hidden_size": target.hidden, "vocab_size": target.vocab,
            "draft_vocab_size": target.vocab, "embedding": "shared", "head": "shared", "mask_token_id": 0,
            "intermediate_size": target.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": max(1, target.query // target.key), "num_key_value_heads": 1,
            "head_dim": target.key, "num_aux_hidden_states": self.taps,
            "block_size": self.block_size or 7 + (not fields["sample_from_anchor"].default),
        }  # fmt: skip
        return cast(BlockNetwork, kind.blank(kind.config(**values)))

    def blocks(self, answer_tokens: float) -> float:
        """Blocks that are trained on in a chat with `answer_tokens` answer tokens."""
        return min(float(self.anchors), answer_tokens)


class BlockParameters(NamedTuple):
    """Parameter counts of a block drafter's matrices; embedding and head, which are the target's, aren't counted."""

    fc: int
    context: int
    """Key and value projections of all layers, which `layers` includes."""
    layers: int
    correction: int
    """Other matrices that are multiplied for every guess."""
    tables: int
    """Tables that are only looked up, by token."""
    slots: int
    guesses: int
    candidates: int
    """How often the correction is computed per guess: once, or for each of this many candidates."""

    @property
    def own(self) -> int:
        """All trained parameters."""
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
    return BlockParameters(
        **counts, slots=config.block_size, guesses=config.guesses, candidates=network.corrections_per_guess
    )


class BlockPlan(NamedTuple):
    """The cost of a block drafter and the speedup to expect."""

    target: ModelSize
    shape: BlockShape
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch processes, in words."""
        slots = block_parameters(self.target, self.shape).slots
        return f"chats, up to {self.shape.anchors} blocks of {slots} slots each"

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: every anchor's block forward and backward, and the teacher's head.

        Forward and backward are counted as three forwards, the drafter's use of the target's head as two.
        """
        target = self.target
        shape = self.shape
        work = self.work
        found = block_parameters(target, shape)
        answers = work.length * work.answer_share
        blocks = shape.blocks(answers)
        context = 2 * (found.fc + found.context) * work.length
        slots = blocks * found.slots * (2 * found.layers + shape.layers * 2 * target.query * work.length)
        guesses = blocks * found.guesses
        corrections = 2 * found.correction * found.candidates * guesses
        each = 3 * (context + slots + corrections) + 2 * target.head * (2 * guesses + answers)
        return _hours(target, work, machine, devices, each / work.length, found.fc + found.layers)

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, counted as for EAGLE-3."""
        target, shape = self.target, self.shape
        found = block_parameters(target, shape)
        rows = chats * shape.blocks(length * self.work.answer_share) * found.slots * shape.layers
        context = chats * length * (2 * (shape.taps + 1) * target.hidden + 8 * shape.layers * target.key)
        return _memory(target, found.own, round(rows * _kept_for_backward(target)) + context)

    @property
    def draft_cost(self) -> float:
        """The time of a draft in units of a target pass."""
        found = block_parameters(self.target, self.shape)
        read = found.fc + found.layers + found.correction + self.target.head
        return read / (self.target.body + self.target.head)

    def speedup(self) -> Speedup | None:
        """The expected speedup at batch size 1: a draft reads the drafter's weights and the target's head once."""
        return _speedup(self.shape.kind, self.draft_cost, 1, self.work)

    def assumed(self) -> tuple[str, str]:
        """What the figures assume about the drafter, in words."""
        return (
            f"a {self.shape.kind} drafter of the target's widths, {self.shape.layers} layers, with the target's "
            f"embedding and head: a draft costs {self.draft_cost:.1%} of a pass of the target, once a round",
            about_lengths(self.shape.kind, self.work),
        )


SAMPLED, MIN_SAMPLED = 0.7, 0.2
"""P-EAGLE's position sampling as published: step j is trained on 0.7^j of the chains, but at least on a fifth."""


class PEaglePlan(NamedTuple):
    """The cost of a P-EAGLE drafter and the speedup to expect; `work.unroll` is the number of guesses per pass."""

    target: ModelSize
    taps: int
    layers: int
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch processes, in words."""
        return f"tokens, {self.work.unroll} steps on a sample of their positions"

    @property
    def _parameters(self) -> tuple[int, int, int]:
        """Counts of fc, all layers, and the head; only the first layer reads embedding and state, concatenated."""
        target, (fc, first, head) = self.target, drafter_parameters(self.target, self.taps, self.work.draft_vocab)
        further = first - target.hidden * (target.query + 2 * target.key)
        return fc, first + (self.layers - 1) * further, head

    @property
    def _later(self) -> float:
        """Rows of all steps but the first, per answer token."""
        return sum(max(SAMPLED**step, MIN_SAMPLED) for step in range(1, self.work.unroll))

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours of all epochs from a store: all steps forward and backward, and the teacher's head."""
        target, work, (fc, layers, head) = self.target, self.work, self._parameters
        row = 2 * layers + self.layers * 2 * target.query * work.length
        rows, guesses = 1 + work.answer_share * self._later, work.answer_share * (1 + self._later)
        each = 3 * (2 * fc + rows * row + 2 * head * guesses) + 2 * target.head * work.answer_share
        return _hours(target, work, machine, devices, each, fc + layers)

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """The bytes on a device for micro-batches of `chats` chats of `length` tokens, counted as for EAGLE-3."""
        target, tokens, (fc, layers, head) = self.target, chats * length, self._parameters
        rows = tokens * (1 + self.work.answer_share * self._later) * self.layers
        states = 2 * (self.taps + 1) * target.hidden * tokens
        own = fc + layers + head + target.head  # its embedding is as large as the target's head
        return _memory(target, own, round(rows * _kept_for_backward(target)) + states + 12 * head)

    @property
    def draft_cost(self) -> float:
        """The time of a draft in units of a target pass."""
        return sum(self._parameters) / (self.target.body + self.target.head)

    def speedup(self) -> Speedup | None:
        """The expected speedup at batch size 1: a draft reads the drafter's weights once."""
        return _speedup("peagle", self.draft_cost, 1, self.work)

    def assumed(self) -> tuple[str, str]:
        """What the figures assume about the drafter, in words."""
        return (
            f"a P-EAGLE drafter of the target's widths, {self.layers} layers, {self.work.draft_vocab} draft tokens, "
            f"with an embedding of its own: a draft costs {self.draft_cost:.1%} of a pass of the target, once a round",
            about_lengths("peagle", self.work),
        )


DrafterPlan = Eagle3Plan | PEaglePlan | BlockPlan


@dataclass(frozen=True)
class PlannedDrafter:
    """The planned drafter: its kind, and its sizes; None is the kind's default.

    Raises UsageError for a kind that isn't planned.
    """

    kind: str = "eagle3"
    unroll: int | None = None
    draft_vocab: int | None = None
    draft_layers: int | None = None
    block_size: int | None = None
    anchors: int | None = None

    def __post_init__(self) -> None:
        known = ("eagle3", "peagle", "jetspec")
        if self.kind in known or (self.kind in KINDS and KINDS[self.kind].config.is_block):
            return
        blocks = [name for name in KINDS.own if KINDS[name].config.is_block]
        raise UsageError(
            f"no drafter of kind {self.kind!r} can be planned: use {', '.join((*known, *blocks))}, or another "
            "block drafter"
        )

    @property
    def is_block(self) -> bool:
        """Whether it guesses blocks, with the target's embedding and head."""
        return self.kind not in ("eagle3", "peagle")

    @property
    def layers(self) -> int:
        """Its decoder layers, if the kind can have more than one."""
        return self.draft_layers or (5 if self.is_block else 4)

    def boundaries(self, config: Any, size: ModelSize) -> tuple[int, ...]:
        """The default taps for a target with this transformers config."""
        return spread_taps(self.layers, size.layers) if self.is_block else choose_taps(config)

    def why(self, config: Any, taps: tuple[int, ...], *, given: bool) -> str:
        """The reason for these taps in words; `given`: whether they were set by the user."""
        if self.is_block and not given:
            return f"taps for {self.layers} draft layers: capture with `taps={','.join(map(str, taps))}`"
        return why_taps(config, taps)

    def work(self, size: ModelSize, work: Workload) -> Workload:
        """The workload with this drafter's steps and vocabulary."""
        steps = self.unroll or (8 if self.kind == "peagle" else 7)
        return work._replace(unroll=steps, draft_vocab=min(self.draft_vocab or 32000, size.vocab))

    def plan(self, size: ModelSize, taps: int, work: Workload) -> DrafterPlan:
        """The plan for this drafter with `taps` taps, on a workload that the method `work` made."""
        if self.is_block:
            shape = BlockShape(self.kind, self.layers, taps, self.block_size, self.anchors or 512)
            return BlockPlan(size, shape, work)
        return PEaglePlan(size, taps, self.layers, work) if self.kind == "peagle" else Eagle3Plan(size, taps, work)
