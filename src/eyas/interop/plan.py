"""How far a consumer should draft: from the tree setting that a drafter was tuned for."""

from __future__ import annotations

from typing import NamedTuple

from eyas.interop.subject import Subject

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
