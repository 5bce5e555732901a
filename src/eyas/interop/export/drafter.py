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
from eyas.targets.architecture import logit_finish
from eyas.targets.passes import EmbeddingAndHead


@dataclass(frozen=True)
class ServedTarget:
    """The target that a drafter is exported for, or served with."""

    name: str
    """Its name in the exported files and the command."""
    partial: EmbeddingAndHead
    """Its sizes, embedding and head; the layers needn't be loaded."""
    tokenizer: Any = None
    """The transformers tokenizer, for formats that contain one."""

    @property
    def embedding(self) -> Tensor:
        """The weight of the target's embedding [V, H]."""
        weight: Tensor = self.partial.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor | None:
        """The weight of its head [V, H]; None if the head has a bias, or logits are scaled or capped."""
        layer = self.partial.model.get_output_embeddings()
        probe = torch.full((1,), 0.5)
        finish = logit_finish(self.partial.config)
        changed = finish is not None and not torch.equal(finish(probe), probe)
        plain = getattr(layer, "bias", None) is None and not changed
        return layer.weight.detach() if plain else None


@dataclass(frozen=True)
class DrafterToExport:
    """The config and tensors of a drafter, original or changed for a consumer."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """Native name -> tensor, including the vocabulary map."""
    target: ServedTarget | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """Descriptions of the changes made for the consumer, none of which changes logits beyond rounding."""

    @property
    def kind(self) -> Kind:
        """The kind that its configuration belongs to."""
        return kind_for(self.config)

    @property
    def layers(self) -> int | None:
        """The number of the target's layers; None if the target is unknown."""
        return None if self.target is None else self.target.partial.num_layers

    @property
    def reduced(self) -> bool:
        """Whether its draft vocabulary is smaller than the target's."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its floating-point tensors."""
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the config, or `default` if this kind doesn't have it."""
        return getattr(self.config, name, default)


def drafter_to_export(
    network: DraftNetwork, target: ServedTarget | None, provenance: Mapping[str, Any]
) -> DrafterToExport:
    """The config and tensors of a loaded network; if the target is known, default taps are made explicit."""
    drafter = DrafterToExport(network.config, network.state_dict(), target, provenance)
    config = network.config
    if (isinstance(config, FusedTapsConfig) or config.is_block) and config.taps is None and target is not None:
        taps = config.taps_of(target.partial.num_layers)
        drafter = _changed(drafter, {"taps": taps}, {}, f"the default taps {list(taps)} of this target written down")
    return drafter


def raise_max_length(drafter: DrafterToExport) -> DrafterToExport:
    """Raise `max_position_embeddings`, by which engines size tables, to the target's, unless RoPE depends on it."""
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
    change = f"the target's embedding copied into the file: {weight.nbytes / 1e6:.0f} MB of it"
    return _changed(drafter, {"embedding": "own"}, {EMBEDDING: weight}, change)


def copy_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """Copy the rows of the target's head for the draft tokens into the drafter if it has no head.

    None if the target is unknown, or if its head has a bias or its logits are scaled or capped.
    """
    if drafter.config.head == "own":
        return drafter
    head = None if drafter.target is None else drafter.target.head
    if head is None:
        return None
    ids = drafter.tensors["d2t"] + torch.arange(drafter.config.draft_vocab_size)
    rows = head[ids].to(drafter.dtype)
    change = f"the target's head copied into the file: {rows.nbytes / 1e6:.0f} MB of it"
    return _changed(drafter, {"head": "own"}, {HEAD: rows}, change)


def leave_out_embedding(drafter: DrafterToExport) -> DrafterToExport | None:
    """Remove the drafter's embedding; None unless it equals the target's exactly."""
    if drafter.config.embedding == "shared":
        return drafter
    own = drafter.tensors.get(EMBEDDING)
    if own is None or drafter.target is None or not _same(own, drafter.target.embedding):
        return None
    change = f"its embedding is the target's: {own.nbytes / 1e6:.0f} MB left out"
    return _changed(drafter, {"embedding": "shared"}, {EMBEDDING: None}, change)


def leave_out_head(drafter: DrafterToExport) -> DrafterToExport | None:
    """Remove the drafter's head; None unless it equals the target's exactly."""
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
    """The drafter with changed fields and tensors; None removes a tensor. `what` describes the change."""
    merged = {**drafter.tensors, **tensors}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    config = drafter.config.model_copy(update=dict(fields))
    return replace(drafter, config=config, tensors=kept, changes=(*drafter.changes, what))


DEFAULT_CHAIN = 3
"""Draft tokens for a drafter without a default tree, as is usual in engines that draft chains."""


class TreePlan(NamedTuple):
    """The size of the drafts that a consumer is configured for."""

    depth: int
    """Levels of the tree, which are sequential draft steps."""
    width: int
    """Maximum number of children of a node; 1 = a chain."""
    nodes: int
    """Draft tokens in the whole tree, without the root."""


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
    """The plan of the drafter's default tree; a chain of `DEFAULT_CHAIN` if it has none, or one of another type.

    For a drafter that guesses a whole block in one pass, it is a chain of all its guesses: engines mask as many slots
    as they draft tokens, and slots see each other.
    """
    guesses = drafter.config.guesses
    if guesses is not None:
        return TreePlan(guesses, 1, guesses)
    own = plan_of(drafter.config.default_tree or "")
    return TreePlan(DEFAULT_CHAIN, 1, DEFAULT_CHAIN) if own is None else own
