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
class Serving:
    """The target as the exported files and the command name it; `ends` has its sizes, embedding and head."""

    name: str
    ends: Target
    tokenizer: Any = None
    """transformers' own, for formats that carry it."""

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        weight: Tensor = self.ends.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor | None:
        """[V, H]; None where logits are more than its product with the state."""
        layer = self.ends.model.get_output_embeddings()
        probe = torch.full((1,), 0.5)
        finished = torch.equal(logit_finish(self.ends.config)(probe), probe)
        plain = getattr(layer, "bias", None) is None and finished
        return layer.weight.detach() if plain else None


@dataclass(frozen=True)
class Subject:
    """What an exporter works on."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """As `DraftNetwork.state_dict` names them, the vocabulary map included."""
    serving: Serving | None = None
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
        return None if self.serving is None else self.serving.ends.num_layers

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


def subject_of(network: DraftNetwork, serving: Serving | None, provenance: Mapping[str, Any]) -> Subject:
    """Take a loaded network apart; taps that the file leaves to a default are written down if the target is known."""
    subject = Subject(network.config, network.state_dict(), serving, provenance)
    fused = subject.get("num_aux_hidden_states") is not None
    if fused and network.config.taps is None and serving is not None:
        taps = network.config.default_taps(serving.ends.num_layers)
        subject = _changed(subject, {"taps": taps}, {}, f"the default taps {list(taps)} of this target written down")
    return subject


def at_least_the_targets_length(subject: Subject) -> Subject:
    """`max_position_embeddings` raised to the target's where that changes no rotation: engines size tables by it."""
    have = subject.get("max_position_embeddings")
    need = None if subject.serving is None else subject.serving.ends.max_length
    if have is None or need is None or have >= need:
        return subject
    if subject.get("rope_parameters")["rope_type"] in ("dynamic", "longrope"):
        return subject
    return _changed(subject, {"max_position_embeddings": need}, {}, f"max_position_embeddings {have} raised to {need}")


def own_embedding(subject: Subject) -> Subject | None:
    """With a copy of the target's embedding; None if the target is unknown."""
    if subject.config.embedding != "shared":
        return subject
    if subject.serving is None:
        return None
    weight = subject.serving.embedding.to(subject.dtype)
    tensors = {"embed_tokens.weight": weight}
    return _changed(subject, {"embedding": "own"}, tensors, "the target's embedding copied into the file")


def own_head(subject: Subject) -> Subject | None:
    """With a copy of the target's head, for draft tokens; None if it is unknown or more is done to its logits."""
    if subject.config.head == "own":
        return subject
    head = None if subject.serving is None else subject.serving.head
    if head is None:
        return None
    ids = subject.tensors["d2t"] + torch.arange(subject.config.draft_vocab_size)
    rows = head[ids].to(subject.dtype)
    return _changed(subject, {"head": "own"}, {"lm_head.weight": rows}, "the target's head copied into the file")


def lent_embedding(subject: Subject) -> Subject | None:
    """Without an embedding; None unless it is the target's own, number for number."""
    if subject.config.embedding == "shared":
        return subject
    own = subject.tensors.get("embed_tokens.weight")
    if own is None or subject.serving is None or not _same(own, subject.serving.embedding):
        return None
    return _changed(subject, {"embedding": "shared"}, {"embed_tokens.weight": None}, "its embedding is the target's")


def lent_head(subject: Subject) -> Subject | None:
    """Without a head; None unless it is the target's own, number for number."""
    if subject.config.head == "shared":
        return subject
    head = None if subject.serving is None else subject.serving.head
    own = subject.tensors.get("lm_head.weight")
    if head is None or own is None or subject.reduced or not _same(own, head):
        return None
    return _changed(subject, {"head": "shared"}, {"lm_head.weight": None}, "its head is the target's")


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own.shape == theirs.shape and torch.equal(own, theirs.to(own.dtype).to(own.device))


def _changed(subject: Subject, fields: Mapping[str, Any], tensors: Mapping[str, Tensor | None], what: str) -> Subject:
    """With other fields and tensors; None takes a tensor away."""
    merged = {**subject.tensors, **tensors}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    config = subject.config.model_copy(update=dict(fields))
    return replace(subject, config=config, tensors=kept, changes=(*subject.changes, what))


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


def tree_plan(subject: Subject) -> TreePlan:
    """The drafter's own tree; a chain where it has one of another sort or none. Chains are as long as it is deep."""
    own = plan_of(subject.config.default_tree or "")
    return TreePlan(DEFAULT_CHAIN, 1, DEFAULT_CHAIN) if own is None else own
