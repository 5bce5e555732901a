"""A drafter on its way out: its configuration, its tensors, and what is known of the target it drafts for.

Shapes: V / Vd full / draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafters.config import DrafterConfig
from eyas.drafters.network import DraftNetwork
from eyas.drafters.registry import Kind, kind_for
from eyas.targets import Target
from eyas.targets.architecture import logit_finish


@dataclass(frozen=True)
class ServedTarget:
    """The target as the exported files and the command name it; `partial` has its sizes, embedding and head."""

    name: str
    partial: Target
    tokenizer: Any = None
    """transformers' own, for formats that carry it."""

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        weight: Tensor = self.partial.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor | None:
        """[V, H]; None where logits are more than its product with the state."""
        layer = self.partial.model.get_output_embeddings()
        probe = torch.full((1,), 0.5)
        finished = torch.equal(logit_finish(self.partial.config)(probe), probe)
        plain = getattr(layer, "bias", None) is None and finished
        return layer.weight.detach() if plain else None


@dataclass(frozen=True)
class DrafterToExport:
    """What an exporter works on."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """As `DraftNetwork.state_dict` names them, the vocabulary map included."""
    target: ServedTarget | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """What was done so that the consumer can read it; no logit moves."""

    @property
    def kind(self) -> Kind:
        """Of drafter."""
        return kind_for(self.config)

    @property
    def layers(self) -> int | None:
        """Of the target, if it is known."""
        return None if self.target is None else self.target.partial.num_layers

    @property
    def reduced(self) -> bool:
        """Does it draft a part of the vocabulary only?"""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the configuration, or `default` where this kind has no such field."""
        return getattr(self.config, name, default)


def drafter_to_export(
    network: DraftNetwork, target: ServedTarget | None, provenance: Mapping[str, Any]
) -> DrafterToExport:
    """Take a loaded network apart; taps that the file leaves to a default are written down if the target is known."""
    drafter = DrafterToExport(network.config, network.state_dict(), target, provenance)
    fused = drafter.get("num_aux_hidden_states") is not None
    if fused and network.config.taps is None and target is not None:
        taps = network.config.default_taps(target.partial.num_layers)
        drafter = _changed(drafter, {"taps": taps}, {}, f"the default taps {list(taps)} of this target written down")
    return drafter


def at_least_the_targets_length(drafter: DrafterToExport) -> DrafterToExport:
    """`max_position_embeddings` raised to the target's where that changes no rotation: engines size tables by it."""
    have = drafter.get("max_position_embeddings")
    need = None if drafter.target is None else drafter.target.partial.max_length
    if have is None or need is None or have >= need:
        return drafter
    if drafter.get("rope_parameters")["rope_type"] in ("dynamic", "longrope"):
        return drafter
    return _changed(drafter, {"max_position_embeddings": need}, {}, f"max_position_embeddings {have} raised to {need}")


def own_embedding(drafter: DrafterToExport) -> DrafterToExport | None:
    """With a copy of the target's embedding; None if the target is unknown."""
    if drafter.config.embedding != "shared":
        return drafter
    if drafter.target is None:
        return None
    weight = drafter.target.embedding.to(drafter.dtype)
    tensors = {"embed_tokens.weight": weight}
    return _changed(drafter, {"embedding": "own"}, tensors, "the target's embedding copied into the file")


def own_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """With a copy of the target's head, for draft tokens; None if it is unknown or more is done to its logits."""
    if drafter.config.head == "own":
        return drafter
    head = None if drafter.target is None else drafter.target.head
    if head is None:
        return None
    ids = drafter.tensors["d2t"] + torch.arange(drafter.config.draft_vocab_size)
    rows = head[ids].to(drafter.dtype)
    return _changed(drafter, {"head": "own"}, {"lm_head.weight": rows}, "the target's head copied into the file")


def lent_embedding(drafter: DrafterToExport) -> DrafterToExport | None:
    """Without an embedding; None unless it is the target's own, number for number."""
    if drafter.config.embedding == "shared":
        return drafter
    own = drafter.tensors.get("embed_tokens.weight")
    if own is None or drafter.target is None or not _same(own, drafter.target.embedding):
        return None
    return _changed(drafter, {"embedding": "shared"}, {"embed_tokens.weight": None}, "its embedding is the target's")


def lent_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """Without a head; None unless it is the target's own, number for number."""
    if drafter.config.head == "shared":
        return drafter
    head = None if drafter.target is None else drafter.target.head
    own = drafter.tensors.get("lm_head.weight")
    if head is None or own is None or drafter.reduced or not _same(own, head):
        return None
    return _changed(drafter, {"head": "shared"}, {"lm_head.weight": None}, "its head is the target's")


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own.shape == theirs.shape and torch.equal(own, theirs.to(own.dtype).to(own.device))


def _changed(
    drafter: DrafterToExport, fields: Mapping[str, Any], tensors: Mapping[str, Tensor | None], what: str
) -> DrafterToExport:
    """With other fields and tensors; None takes a tensor away."""
    merged = {**drafter.tensors, **tensors}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    config = drafter.config.model_copy(update=dict(fields))
    return replace(drafter, config=config, tensors=kept, changes=(*drafter.changes, what))


# How far a consumer should draft: from the tree setting that a drafter was tuned for.


DEFAULT_CHAIN = 3
"""For a drafter that names no tree: what engines on chains are usually run with."""


class TreePlan(NamedTuple):
    """Steps, children a step, and nodes of a tree."""

    depth: int
    width: int
    nodes: int


def plan_of(text: str) -> TreePlan | None:
    """Of a `chain:` or `dynamic:` tree; None for another."""
    kind, _, rest = text.partition(":")
    if kind == "chain":
        length = int(float(rest))
        return TreePlan(length, 1, length)
    if kind == "dynamic":
        depth, width, nodes = (int(float(part)) for part in rest.split(",")[:3])
        return TreePlan(depth, width, nodes)
    return None


def tree_plan(drafter: DrafterToExport) -> TreePlan:
    """The drafter's own tree; a chain where it has one of another sort or none. Chains are as long as it is deep."""
    own = plan_of(drafter.config.default_tree or "")
    return TreePlan(DEFAULT_CHAIN, 1, DEFAULT_CHAIN) if own is None else own
