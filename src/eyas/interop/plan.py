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


def tree_plan(subject: Subject) -> TreePlan:
    """The drafter's own `dynamic:` tree; a chain where it has another or none."""
    kind, _, rest = (subject.config.default_tree or "").partition(":")
    if kind == "dynamic":
        depth, width, nodes = (int(float(part)) for part in rest.split(",")[:3])
        return TreePlan(depth, width, nodes)
    length = int(rest) if kind == "chain" else DEFAULT_CHAIN
    return TreePlan(length, 1, length)


def chain_length(subject: Subject) -> int:
    """For consumers that draft chains only."""
    return tree_plan(subject).depth
