"""The tree that a drafter gets: the requested one, its own, or the default."""

from __future__ import annotations

import torch

from eyas.drafters.base import Drafter
from eyas.errors import UsageError
from eyas.tree import TreeSpec, is_auto, parse_tree


def tree_for(drafter: Drafter, tree: TreeSpec | None) -> TreeSpec:
    """`tree`, or the drafter's own shape. Raises UsageError if the drafter can't grow it."""
    own = parse_tree(default_shape(drafter))
    spec = tree or own
    if spec.method != own.method:
        raise UsageError(
            "trees lookahead:W,N,G are for the method lookahead, which takes no other: leave out `tree=`, or give one "
            "that the method has"
        )
    if spec.max_fanout > drafter.max_fanout:
        raise UsageError(f"the tree asks for {spec.max_fanout} children, the drafter can offer {drafter.max_fanout}")
    if drafter.max_depth is not None and spec.depth > drafter.max_depth:
        raise UsageError(f"the tree is {spec.depth} deep, the drafter guesses {drafter.max_depth} tokens at most")
    return spec


def default_tree(drafter: Drafter, device: torch.device) -> str:
    """The name of the tree that a drafter gets on `device` if none is requested: its checkpoint's, or `auto` on a CPU.

    There a pass over a few tokens more takes much longer, so a fixed tree may be slower than none: with a chain of ten
    copied tokens in each round, a 1.5B in 4 bits decodes at 0.56 of its plain speed (two cores, Zen 3).
    """
    return drafter.default_tree or ("auto" if device.type == "cpu" else default_shape(drafter))


def default_shape(drafter: Drafter) -> str:
    """The tree of a drafter's checkpoint if it is a fixed one, and otherwise its method's, as deep as it can draft."""
    if drafter.default_tree is not None and not is_auto(drafter.default_tree):
        return drafter.default_tree
    shape = parse_tree(drafter.fixed_tree)
    if drafter.max_depth is not None and drafter.max_depth < shape.depth:
        return f"dynamic:{drafter.max_depth},6,24"
    return drafter.fixed_tree
