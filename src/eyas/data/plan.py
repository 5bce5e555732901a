"""Estimates for `eyas plan`: the disk space, hours and speedup of a drafter, before anything is downloaded.

Bytes are exact for rows of the given length and share of answer tokens: they come from the layout that the store writer
uses. Hours and speedup are estimates; every assumption is a named constant here. The model's size is counted from its
config alone: the model is built on the meta device, without memory for weights.

Drafters that make all guesses in one pass have work of their own. Block drafters: a chat's states become keys and
values of every layer once; each anchor runs all slots of a block through all layers. Embedding and head are the
target's, so the draft vocabulary is the whole one and heads have no weight gradients. P-EAGLE: EAGLE-3's first layer
and further ones, with an embedding and a head of its own that are trained; its steps have fewer and fewer rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eyas.data.devices import Machine
from eyas.data.store.layout import RowTotals, ShardLayout, classic_bytes
from eyas.targets.architecture import attention_plan, model_class, refuse_unsupported
from eyas.targets.recurrent import ShapeProbe
from eyas.targets.transformers_names import given

VARIANTS: dict[str, dict[str, Any]] = {
    "--states bf16 --final all": {"states": "bf16", "final": "all", "top": None},
    "--states bf16 --final answers": {"states": "bf16", "final": "answers", "top": None},
    "--states fp8 --final all": {"states": "fp8", "final": "all", "top": None},
    "--states fp8 --final answers": {"states": "fp8", "final": "answers", "top": None},
    "--states fp8 --final top:64": {"states": "fp8", "final": "top", "top": 64},
}
"""Options of `eyas data capture` and what they change in a layout, most exact first."""

ACCEPT_LENGTHS = (4.24, 6.74)
"""EAGLE-3 on Llama-3.1-8B as its authors report: MT-bench at temperature 1, HumanEval at 0 (arXiv 2503.01840)."""
PUBLISHED_ANSWERS = 50e6
"""Answer tokens from which drafters are as good as published ones: those of some 60,000 chats."""
DATA_EXPONENT = 1 / 3
"""With a share s of these tokens, s to this power of the tokens beyond the first of a pass are guessed. An estimate,
chosen so that 1 million tokens give a toy drafter's measured 2.3 (tests/toy); nothing else was measured."""
EFFICIENCIES = (0.53, 0.84)
"""Speedup divided by accept length: in an independent benchmark, and at the authors' best."""
DRAFT_PASSES = 6
"""Drafter passes a round: five levels of a tree, and one pass over the accepted tokens."""

ACTIVATIONS = (50, 8, 5)
"""Bytes of a row that the backward pass needs, for each of hidden size, MLP width, and widths of queries and keys: what
autograd saves under bf16 autocast, counted."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Workload(NamedTuple):
    """The data to capture and train on, and the settings of training that decide its cost."""

    samples: int
    length: int
    """Tokens a sample."""
    answer_share: float = 0.5
    """Share of the tokens that are answer tokens."""
    epochs: int = 1
    unroll: int = 7
    """Steps of the training-time test."""
    draft_vocab: int = 32000

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def size(self) -> RowTotals:
        """The totals from which a layout computes its bytes."""
        return RowTotals(self.samples, self.tokens, round(self.tokens * self.answer_share))


class StorageOption(NamedTuple):
    """The bytes that a layout takes: in all, for each token, and relative to the classic layout."""

    name: str
    total: int
    per_token: float
    of_classic: float


class Speedup(NamedTuple):
    """An estimate of the speedup over plain decoding, as a range."""

    draft_cost: float
    """The time of a drafter pass in units of a target pass."""
    low: float
    high: float


def variants(layout: ShardLayout) -> dict[str, ShardLayout]:
    """The layout with each option of `VARIANTS` applied: the same taps of the same target, stored differently."""
    return {option: ShardLayout(**{**layout.model_dump(), **change}) for option, change in VARIANTS.items()}


def storage(layout: ShardLayout, work: Workload) -> list[StorageOption]:
    """The bytes of the classic layout and of each variant; headers, some 700 bytes a shard, are not counted."""
    classic = classic_bytes(work.tokens, layout.hidden)
    totals = {"classic (8 H + 16)": classic}
    totals |= {option: other.data_bytes(work.size) for option, other in variants(layout).items()}
    return [StorageOption(name, total, total / work.tokens, total / classic) for name, total in totals.items()]


def drafter_parameters(target: ModelSize, taps: int, draft_vocab: int) -> tuple[int, int, int]:
    """Parameter counts (fc, layer, head) of an EAGLE-3 drafter that has the target's widths."""
    hidden, vocab = target.hidden, min(draft_vocab, target.vocab)
    attention = 2 * hidden * (target.query + 2 * target.key) + target.query * hidden
    return taps * hidden * hidden, attention + 3 * hidden * target.intermediate, vocab * hidden


def capture_hours(target: ModelSize, work: Workload, machine: Machine, devices: int) -> float:
    """Hours of one pass of the target, without its head, over all tokens."""
    return work.tokens * _forward(target, work.length) / (machine.tflops * 1e12 * devices) / 3600


def training_hours(target: ModelSize, taps: int, work: Workload, machine: Machine, devices: int) -> float:
    """Hours of all epochs from a store: the unrolled drafter forward and backward, and the teacher's head.

    Forward and backward are counted as three forwards; heads are applied to answer tokens only. Online training adds
    `capture_hours` every epoch.
    """
    fc, layer, head = drafter_parameters(target, taps, work.draft_vocab)
    attention = 2 * target.query * work.length
    step = 2 * (layer + head * work.answer_share) + attention
    each = 3 * (2 * fc + work.unroll * step) + 2 * target.head * work.answer_share
    return work.epochs * work.tokens * each / (machine.tflops * 1e12 * devices) / 3600


def regeneration_hours(target: ModelSize, work: Workload, machine: Machine, devices: int, batch: int) -> float:
    """Hours in which the target answers all chats itself, `batch` at a time on a device; a drafter shortens them.

    A step takes as long as reading the weights and the cached keys and values, or as computing, whichever is longer.
    Prompts are read as in capture.
    """
    active, answers = target.body + target.head, work.tokens * work.answer_share
    weights = min(active * batch, max(active, target.total - target.head))  # more rows choose more experts
    cached = 2 * target.attending * target.key * work.length * (1 - work.answer_share / 2)
    states = 2 * target.states  # read and written
    reading = (2 * (weights + batch * cached) + batch * states) / (machine.bandwidth * 1e9)
    computing = 2 * batch * active / (machine.tflops * 1e12)
    prompts = (work.tokens - answers) * _forward(target, work.length) / (machine.tflops * 1e12)
    return (answers / batch * max(reading, computing) + prompts) / devices / 3600


class TrainingMemory(NamedTuple):
    """The bytes that training an EAGLE-3 drafter takes on a device, whatever is allocated besides."""

    weights: int
    """The drafter's weights, gradients and AdamW's moments in float32, and a copy of the weights in bf16."""
    activations: int
    """What a micro-batch keeps for the backward pass, its target states, and a chunk of logits."""
    store: int
    """The target's parts when states come from a store: embedding and head in bf16."""
    online: int
    """The target's parts when it runs in the loop: all of it in bf16."""
    layers: int
    """Layers of the target."""

    @property
    def from_store(self) -> int:
        return self.weights + self.activations + self.store

    @property
    def in_loop(self) -> int:
        return self.weights + self.activations + self.online

    def sharded(self, devices: int) -> int:
        """With the target in the loop, where FSDP shards its layers and the drafter over so many devices.

        Embedding and head stay whole, and one layer at a time is gathered.
        """
        layers = max(0, self.online - self.store)
        return self.activations + self.store + (self.weights + layers) // devices + layers // self.layers


def training_memory(target: ModelSize, taps: int, work: Workload, batch_tokens: int) -> TrainingMemory:
    """The bytes on a device for micro-batches of `batch_tokens` tokens in bf16; every device of several holds as much.

    Activations are counted in bytes a row (`ACTIVATIONS`); later steps have rows only where an answer is predicted.
    """
    parts = drafter_parameters(target, taps, work.draft_vocab)
    rows = batch_tokens * (1 + (work.unroll - 1) * work.answer_share)
    by_hidden, by_intermediate, by_heads = ACTIVATIONS
    row = by_hidden * target.hidden + by_intermediate * target.intermediate + by_heads * (target.query + target.key)
    states = 2 * (taps + 1) * target.hidden * batch_tokens
    return TrainingMemory(
        weights=18 * sum(parts),
        activations=round(rows * row) + states + 12 * parts[2],
        store=4 * target.head,
        online=2 * target.total,
        layers=target.layers,
    )


def plain_speed(target: ModelSize, machine: Machine) -> float:
    """Tokens per second of plain bf16 decoding at batch size 1, which reads every active weight once a token."""
    return machine.bandwidth * 1e9 / (2 * (target.body + target.head))


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


def speedup(target: ModelSize, taps: int, draft_vocab: int, lengths: tuple[float, float] = ACCEPT_LENGTHS) -> Speedup:
    """The expected speedup at batch size 1, where a pass takes as long as reading its weights.

    It is accept length / (1 + draft passes x draft cost), limited to the published `EFFICIENCIES`.
    """
    fc, layer, head = drafter_parameters(target, taps, draft_vocab)
    cost = (layer + head + fc / DRAFT_PASSES) / (target.body + target.head)
    bound = 1 / (1 + DRAFT_PASSES * cost)
    low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
    return Speedup(cost, low, high)


class Eagle3Plan(NamedTuple):
    """What an EAGLE-3 drafter will cost, and what it may bring; `eyas.data.plan` has that of block drafters."""

    target: ModelSize
    taps: int
    work: Workload

    @property
    def what(self) -> str:
        """What an epoch goes over, in words."""
        return f"tokens, {self.work.unroll} steps"

    def training_hours(self, machine: Machine, devices: int) -> float:
        """Hours, as the function `training_hours` counts them."""
        return training_hours(self.target, self.taps, self.work, machine, devices)

    def training_memory(self, chats: int, length: int) -> TrainingMemory:
        """Bytes, as the function `training_memory` counts them."""
        return training_memory(self.target, self.taps, self.work, chats * length)

    def speedup(self) -> Speedup:
        """The range that the function `speedup` estimates."""
        lengths = expected_lengths(ACCEPT_LENGTHS, self.work)
        return speedup(self.target, self.taps, self.work.draft_vocab, lengths)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"an EAGLE-3 drafter of the target's widths, {self.work.draft_vocab} draft tokens: a pass costs "
            f"{draft_cost:.1%} of the target's, {DRAFT_PASSES} a round",
            f"{about_lengths(ACCEPT_LENGTHS, self.work)}: what EAGLE-3's authors report for Llama-3.1-8B; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as others measured",
        )


def _forward(target: ModelSize, length: int) -> float:
    """Floating-point operations a token: two a parameter, plus attention over half the row on average."""
    return 2 * target.body + 2 * target.attending * target.query * length


class ModelSize(NamedTuple):
    """The parameter counts and widths of a target, from which bytes and operations follow."""

    layers: int
    hidden: int
    vocab: int
    query: int
    """Width of all queries: attention heads x head size."""
    key: int
    """Width of all keys: key-value heads x head size."""
    intermediate: int
    body: int
    """Parameters of the layers that are active for one token; of experts, only as many as are chosen."""
    total: int
    """All parameters, including embedding and head."""
    attending: int
    """Layers that cache keys and values; the others are recurrent, or keep nothing."""
    states: int
    """Bytes of the recurrent states of one sequence, where the model runs in bf16."""

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden


def model_size(config: Any) -> ModelSize:
    """The size of the decoder that a transformers config describes. Raises UnsupportedModelError, as loading would."""
    kind = model_class(config)
    refuse_unsupported(kind, config)
    with torch.device("meta"):
        model = kind(config)
    text = config.get_text_config()
    experts = next((getattr(text, name) for name in _EXPERT_COUNTS if getattr(text, name, None)), 1)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    outside = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    body = total = 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if id(weight) not in outside:
            routed = ".experts." in name
            body += weight.numel() * chosen // experts if routed else weight.numel()
    shapes = _kept(model) if attention_plan(text).recurrent else None
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSize(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        query=heads * head_size,
        key=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        body=body,
        total=total,
        attending=text.num_hidden_layers if shapes is None else len(shapes.shapes),
        states=0 if shapes is None else sum(shape.nbytes for shape in shapes.states.values()),
    )


@torch.inference_mode()
def _kept(model: Any) -> ShapeProbe:
    """What the layers of a model on the meta device keep of a sequence: it runs a token there, in bf16."""
    probe = ShapeProbe()
    model = model.to(torch.bfloat16)
    with torch.device("meta"), probe.watching(model):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **given(model, probe))
    return probe


BLOCK_ACCEPT_LENGTHS = {"dflash": (3.07, 5.40), "dspark": (3.64, 6.11)}
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
        lengths = expected_lengths(BLOCK_ACCEPT_LENGTHS[self.shape.kind], self.work)
        low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
        return Speedup(cost, low, high)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"a {self.shape.kind} drafter of the target's widths, {self.shape.layers} layers, with the target's "
            f"embedding and head: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{about_lengths(BLOCK_ACCEPT_LENGTHS[self.shape.kind], self.work)}: what DSpark's authors report for "
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
        bound, lengths = 1 / (1 + cost), expected_lengths(ACCEPT_LENGTHS, self.work)
        low, high = (tau * min(bound, share) for tau, share in zip(lengths, EFFICIENCIES, strict=True))
        return Speedup(cost, low, high)

    def assumed(self, draft_cost: float) -> tuple[str, str]:
        """What the figures assume of the drafter, in words."""
        return (
            f"a P-EAGLE drafter of the target's widths, {self.layers} layers, {self.work.draft_vocab} draft tokens, "
            f"with an embedding of its own: a draft costs {draft_cost:.1%} of a pass of the target, once a round",
            f"{about_lengths(ACCEPT_LENGTHS, self.work)}, which is EAGLE-3's: what its authors report for "
            "Llama-3.1-8B; "
            f"{EFFICIENCIES[0]} to {EFFICIENCIES[1]} of it kept as speedup, as others measured",
        )
