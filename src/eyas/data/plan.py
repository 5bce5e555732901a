"""What a drafter will cost, before anything is downloaded: bytes, hours and the speedup to expect. Pure arithmetic.

Bytes are exact for rows of the stated length and share of answer tokens: they come from the layout the store is
written by. Hours and speedup are estimates, and every assumption has a name here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from eyas.data.store.layout import RowTotals, ShardLayout, classic_bytes
from eyas.errors import UnsupportedModelError, UsageError
from eyas.targets.architecture import causal_lm_class, refuse_unsupported

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


class Workload(NamedTuple):
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
    def size(self) -> RowTotals:
        """As the layout counts."""
        return RowTotals(self.samples, self.tokens, round(self.tokens * self.answer_share))


class StorageOption(NamedTuple):
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


def variants(layout: ShardLayout) -> dict[str, ShardLayout]:
    """The same taps of the same target, stored in every way."""
    return {option: ShardLayout(**{**layout.model_dump(), **change}) for option, change in VARIANTS.items()}


def storage(layout: ShardLayout, work: Workload) -> list[StorageOption]:
    """The classic layout, and every way of ours. Headers aren't counted: some 700 bytes a shard."""
    classic = classic_bytes(work.tokens, layout.hidden)
    totals = {"classic (8 H + 16)": classic}
    totals |= {option: other.data_bytes(work.size) for option, other in variants(layout).items()}
    return [StorageOption(name, total, total / work.tokens, total / classic) for name, total in totals.items()]


def drafter_parameters(target: ModelSize, taps: int, draft_vocab: int) -> tuple[int, int, int]:
    """(fc, layer, head) of an EAGLE-3 drafter with the target's own widths."""
    hidden, vocab = target.hidden, min(draft_vocab, target.vocab)
    attention = 2 * hidden * (target.query + 2 * target.key) + target.query * hidden
    return taps * hidden * hidden, attention + 3 * hidden * target.intermediate, vocab * hidden


def capture_hours(target: ModelSize, work: Workload, machine: Machine, devices: int) -> float:
    """One pass of the target over all tokens, without its head."""
    return work.tokens * _forward(target, work.length) / (machine.tflops * 1e12 * devices) / 3600


def training_hours(target: ModelSize, taps: int, work: Workload, machine: Machine, devices: int) -> float:
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


# How big a model is, from its config alone: built without memory for its weights, and counted.


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ModelSize(NamedTuple):
    """Parameters, and the widths that bytes and operations depend on."""

    layers: int
    hidden: int
    vocab: int
    query: int
    """Heads x head size: the width of attention."""
    key: int
    """The same of keys."""
    intermediate: int
    body: int
    """Parameters of the layers that one token passes: of experts, as many as are chosen."""
    total: int
    """All parameters, embedding and head included."""

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden


def model_size(config: Any) -> ModelSize:
    """Count a decoder of this transformers config. Raises UnsupportedModelError as loading it would."""
    kind = causal_lm_class(config)
    if kind is None:
        raise UnsupportedModelError(
            f"{config.model_type} is no decoder that transformers can build: name another model"
        )
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
    )


# What a machine sustains, as plans need it: a share of a GPU's published figures, or a measurement of a second.


COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.8
"""Of the published peaks, what large models are assumed to reach."""

# dense bf16 TFLOP/s and GB/s, from the makers' data sheets
PUBLISHED: dict[str, tuple[float, float]] = {
    "A100": (312, 2039), "H100": (989, 3350), "H200": (989, 4800), "B200": (2250, 8000), "MI300X": (1307, 5300),
    "L40S": (362, 864), "A10": (125, 600), "L4": (121, 300), "RTX 4090": (165, 1008), "RTX 3090": (71, 936),
}  # fmt: skip


class Machine(NamedTuple):
    """Sustained speed of one device."""

    name: str
    tflops: float
    """bf16 matrix products."""
    bandwidth: float
    """GB/s from memory."""


def known_machine(name: str) -> Machine:
    """A GPU of the list; UsageError names the list."""
    found = [known for known in PUBLISHED if known.lower() in name.lower()]
    if not found:
        raise UsageError(f"--machine {name}: known are {', '.join(PUBLISHED)}; or give --tflops and --bandwidth")
    best = max(found, key=len)  # A100, not A10
    tflops, bandwidth = PUBLISHED[best]
    return Machine(best, tflops * COMPUTE_SHARE, bandwidth * BANDWIDTH_SHARE)


def this_machine() -> Machine:
    """This GPU if it is known, else what this device does with a matrix product and a copy."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if any(known.lower() in name.lower() for known in PUBLISHED):
            return known_machine(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    block = torch.zeros(2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    product = _seconds(lambda: torch.mm(a, a), device)
    copy = _seconds(lambda: target.copy_(block), device)
    return Machine(f"this {device.type}, measured", 2 * size**3 / product / 1e12, 2 * len(block) / copy / 1e9)


def _seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """The fastest of some runs, within about `budget` seconds."""
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
