"""Draft trees: the tensors, the shapes that can be asked for, and how a drafter grows each of them."""

from eyas.tree.draft_tree import DraftTree, Frontier, Growth, NodeLogits, TreeSpec
from eyas.tree.spec import parse_tree

__all__ = ["DraftTree", "Frontier", "Growth", "NodeLogits", "TreeSpec", "parse_tree"]
