"""What the target costs: its size, the bytes of its states on disk, and the hours of its passes.

Bytes are exact for rows of the given length and share of answer tokens: they come from the layout that the store writer
uses. Hours are estimates. The model's size is counted from its config alone: the model is built on the meta device,
without memory for weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eyas.data.store.layout import RowTotals, ShardLayout, classic_bytes, variants
from eyas.plan.devices import Machine
from eyas.targets.architecture import attention_plan, model_class, refuse_unsupported
from eyas.targets.recurrent import ShapeProbe
from eyas.targets.transformers_names import config_value, model_cache_kwargs

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Workload(NamedTuple):
    """The data to capture and train on, and the settings of training that decide its cost."""

    samples: int
    length: int
    """Tokens per sample."""
    answer_share: float = 0.5
    """Share of the tokens that are answer tokens."""
    epochs: float = 1
    unroll: int = 7
    """Steps of the training-time test."""
    draft_vocab: int = 32000
    muon_tokens: float | None = None
    """Tokens between two updates by Muon; None = by AdamW, whose updates take hardly any time."""

    @property
    def muon_updates(self) -> float:
        """Updates by Muon in all epochs."""
        return 0.0 if self.muon_tokens is None else self.epochs * self.tokens / self.muon_tokens

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def size(self) -> RowTotals:
        """The totals from which a layout computes its bytes."""
        return RowTotals(self.samples, self.tokens, round(self.tokens * self.answer_share))


class StorageOption(NamedTuple):
    """The bytes that a layout takes: in total, per token, and relative to the classic layout."""

    name: str
    total: int
    per_token: float
    of_classic: float


def storage(layout: ShardLayout, work: Workload) -> list[StorageOption]:
    """The bytes of the classic layout and of each variant; headers, about 700 bytes per shard, are not counted."""
    classic = classic_bytes(work.tokens, layout.hidden)
    totals = {"classic (8 H + 16)": classic}
    totals |= {option: other.data_bytes(work.size) for option, other in variants(layout).items()}
    return [StorageOption(name, total, total / work.tokens, total / classic) for name, total in totals.items()]


def capture_hours(target: ModelSize, work: Workload, machine: Machine, devices: int) -> float:
    """Hours of one pass of the target, without its head, over all tokens."""
    return work.tokens * _forward(target, work.length) / (machine.tflops * 1e12 * devices) / 3600


def regeneration_hours(target: ModelSize, work: Workload, machine: Machine, devices: int, batch: int) -> float:
    """Hours for the target to answer all chats itself, `batch` at a time per device; a drafter shortens them.

    A step takes as long as reading the weights and the KV cache, or as computing, whichever is longer. Prefill costs
    as much as capture.
    """
    active, answers = target.body + target.head, work.tokens * work.answer_share
    weights = min(active * batch, max(active, target.total - target.head))  # more rows are routed to more experts
    cached = 2 * target.attending * target.key * work.length * (1 - work.answer_share / 2)
    states = 2 * target.states  # read and written
    reading = (2 * (weights + batch * cached) + batch * states) / (machine.bandwidth * 1e9)
    computing = 2 * batch * active / (machine.tflops * 1e12)
    prompts = (work.tokens - answers) * _forward(target, work.length) / (machine.tflops * 1e12)
    return (answers / batch * max(reading, computing) + prompts) / devices / 3600


class TrainingMemory(NamedTuple):
    """The bytes that training a drafter takes on a device, not counting other allocations."""

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
        """Bytes per device with the target in the loop, if FSDP shards its layers and the drafter over `devices`.

        Embedding and head stay whole, and one layer at a time is gathered.
        """
        layers = max(0, self.online - self.store)
        return self.activations + self.store + (self.weights + layers) // devices + layers // self.layers


def plain_speed(target: ModelSize, machine: Machine) -> float:
    """Tokens per second of plain bf16 decoding at batch size 1, which reads every active weight once per token."""
    return machine.bandwidth * 1e9 / (2 * (target.body + target.head))


def _forward(target: ModelSize, length: int) -> float:
    """Floating-point operations per token: two per parameter, plus attention over half the row on average."""
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
    """Parameters of the layers that are active for one token; of experts, only the chosen share."""
    total: int
    """All parameters, including embedding and head."""
    attending: int
    """Layers that cache keys and values; the others are recurrent or keep nothing."""
    states: int
    """Bytes of one sequence's recurrent states if the model runs in bf16."""

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
    shapes = _probe_shapes(model) if attention_plan(text).recurrent else None
    heads = text.num_attention_heads
    head_size = config_value(text, "head_dim") or text.hidden_size // heads
    return ModelSize(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        query=heads * head_size,
        key=(config_value(text, "num_key_value_heads") or heads) * head_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        body=body,
        total=total,
        attending=text.num_hidden_layers if shapes is None else len(shapes.shapes),
        states=0 if shapes is None else sum(shape.nbytes for shape in shapes.states.values()),
    )


@torch.inference_mode()
def _probe_shapes(model: Any) -> ShapeProbe:
    """What the layers of a model on the meta device keep per sequence, found by running one token in bf16."""
    probe = ShapeProbe()
    model = model.to(torch.bfloat16)
    with torch.device("meta"), probe.watching(model):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **model_cache_kwargs(model, probe))
    return probe
