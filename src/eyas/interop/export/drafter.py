"""A drafter to be exported: its configuration, its tensors, its target, and the changes that consumers may need.

Shapes: V / Vd full / draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafters.config import DrafterConfig, FusedTapsConfig
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.kind import Kind
from eyas.drafters.network import DraftNetwork
from eyas.drafters.registry import kind_for
from eyas.targets import Target
from eyas.targets.architecture import logit_finish


@dataclass(frozen=True)
class ServedTarget:
    """The target that a drafter is exported for, or served with."""

    name: str
    """As the exported files and the command name it."""
    partial: Target
    """Its sizes, embedding and head; its layers need not be loaded."""
    tokenizer: Any = None
    """The tokenizer of transformers, for formats that carry one."""

    @property
    def embedding(self) -> Tensor:
        """The weight of its embedding [V, H]."""
        weight: Tensor = self.partial.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor | None:
        """The weight of its head [V, H]; None if logits are more than the product of weight and state."""
        layer = self.partial.model.get_output_embeddings()
        probe = torch.full((1,), 0.5)
        finished = torch.equal(logit_finish(self.partial.config)(probe), probe)
        plain = getattr(layer, "bias", None) is None and finished
        return layer.weight.detach() if plain else None


@dataclass(frozen=True)
class DrafterToExport:
    """A drafter taken apart, as it is or already changed for a consumer."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """By native name, the vocabulary map included."""
    target: ServedTarget | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """What was changed so that the consumer can read it, in words; no logit moves by it."""

    @property
    def kind(self) -> Kind:
        """The kind that its configuration belongs to."""
        return kind_for(self.config)

    @property
    def layers(self) -> int | None:
        """How many layers the target has; None if it isn't known."""
        return None if self.target is None else self.target.partial.num_layers

    @property
    def reduced(self) -> bool:
        """Whether it drafts only a part of the vocabulary."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its floating-point tensors."""
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the configuration, or `default` where this kind has no such field."""
        return getattr(self.config, name, default)


def drafter_to_export(
    network: DraftNetwork, target: ServedTarget | None, provenance: Mapping[str, Any]
) -> DrafterToExport:
    """Take a loaded network apart; default taps are written down if the target is known."""
    drafter = DrafterToExport(network.config, network.state_dict(), target, provenance)
    config = network.config
    if isinstance(config, FusedTapsConfig) and config.taps is None and target is not None:
        taps = config.taps_of(target.partial.num_layers)
        drafter = _changed(drafter, {"taps": taps}, {}, f"the default taps {list(taps)} of this target written down")
    return drafter


def raise_max_length(drafter: DrafterToExport) -> DrafterToExport:
    """Raise `max_position_embeddings` to the target's where that changes no rotation: engines size tables by it."""
    have = drafter.get("max_position_embeddings")
    need = None if drafter.target is None else drafter.target.partial.max_length
    if have is None or need is None or have >= need:
        return drafter
    if drafter.get("rope_parameters")["rope_type"] in ("dynamic", "longrope"):
        return drafter
    return _changed(drafter, {"max_position_embeddings": need}, {}, f"max_position_embeddings {have} raised to {need}")


def copy_embedding(drafter: DrafterToExport) -> DrafterToExport | None:
    """Copy the target's embedding into the drafter if it has none; None if the target is unknown."""
    if drafter.config.embedding != "shared":
        return drafter
    if drafter.target is None:
        return None
    weight = drafter.target.embedding.to(drafter.dtype)
    return _changed(drafter, {"embedding": "own"}, {EMBEDDING: weight}, "the target's embedding copied into the file")


def copy_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """Copy the target's head, of the draft tokens, into the drafter if it has none.

    None if the target is unknown, or if its logits are more than the product of weight and state.
    """
    if drafter.config.head == "own":
        return drafter
    head = None if drafter.target is None else drafter.target.head
    if head is None:
        return None
    ids = drafter.tensors["d2t"] + torch.arange(drafter.config.draft_vocab_size)
    rows = head[ids].to(drafter.dtype)
    return _changed(drafter, {"head": "own"}, {HEAD: rows}, "the target's head copied into the file")


def leave_out_embedding(drafter: DrafterToExport) -> DrafterToExport | None:
    """Leave out the drafter's embedding; None unless it is the target's, number for number."""
    if drafter.config.embedding == "shared":
        return drafter
    own = drafter.tensors.get(EMBEDDING)
    if own is None or drafter.target is None or not _same(own, drafter.target.embedding):
        return None
    return _changed(drafter, {"embedding": "shared"}, {EMBEDDING: None}, "its embedding is the target's")


def leave_out_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """Leave out the drafter's head; None unless it is the target's, number for number."""
    if drafter.config.head == "shared":
        return drafter
    head = None if drafter.target is None else drafter.target.head
    own = drafter.tensors.get(HEAD)
    if head is None or own is None or drafter.reduced or not _same(own, head):
        return None
    return _changed(drafter, {"head": "shared"}, {HEAD: None}, "its head is the target's")


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own.shape == theirs.shape and torch.equal(own, theirs.to(own.dtype).to(own.device))


def _changed(
    drafter: DrafterToExport, fields: Mapping[str, Any], tensors: Mapping[str, Tensor | None], what: str
) -> DrafterToExport:
    """The drafter with other fields and tensors; None takes a tensor away."""
    merged = {**drafter.tensors, **tensors}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    config = drafter.config.model_copy(update=dict(fields))
    return replace(drafter, config=config, tensors=kept, changes=(*drafter.changes, what))


DEFAULT_CHAIN = 3
"""Tokens to draft with a drafter that names no tree: what engines that draft chains are usually run with."""


class TreePlan(NamedTuple):
    """How much a consumer is to draft."""

    depth: int
    """How many steps, one after another."""
    width: int
    """Children that a node has at most; 1 = a chain."""
    nodes: int
    """Draft tokens in all, without the root."""


def plan_of(text: str) -> TreePlan | None:
    """The plan of a `chain:` or `dynamic:` tree; None for any other."""
    kind, _, rest = text.partition(":")
    if kind == "chain":
        length = int(float(rest))
        return TreePlan(length, 1, length)
    if kind == "dynamic":
        depth, width, nodes = (int(float(part)) for part in rest.split(",")[:3])
        return TreePlan(depth, width, nodes)
    return None


def tree_plan(drafter: DrafterToExport) -> TreePlan:
    """The plan of the drafter's own tree; a chain of `DEFAULT_CHAIN` if it has none, or one of another sort."""
    own = plan_of(drafter.config.default_tree or "")
    return TreePlan(DEFAULT_CHAIN, 1, DEFAULT_CHAIN) if own is None else own
