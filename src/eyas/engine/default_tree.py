"""The tree that a drafter gets: the requested one, its own, or the general default."""

from __future__ import annotations

from eyas.drafters.base import Drafter
from eyas.errors import UsageError
from eyas.tree import TreeSpec, is_auto, parse_tree

DEFAULT_TREE = "dynamic:5,6,24"
"""For drafters without their own tree: deep rather than wide, and small enough to be nearly free to verify."""


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


def default_tree(drafter: Drafter) -> str:
    """The name of the tree that a drafter gets if none is requested; it may be `auto`."""
    return drafter.default_tree or default_shape(drafter)


def default_shape(drafter: Drafter) -> str:
    """The drafter's default tree, or the general default if it has none or one that a controller sizes."""
    if drafter.default_tree is not None and not is_auto(drafter.default_tree):
        return drafter.default_tree
    most = drafter.max_depth
    shallow = most is not None and most < parse_tree(DEFAULT_TREE).depth
    return f"dynamic:{most},6,24" if shallow else DEFAULT_TREE
