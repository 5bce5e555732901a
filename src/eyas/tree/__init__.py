"""Draft trees: the type, the shapes a user can ask for, and how each shape grows."""

from eyas.tree.draft_tree import DraftTree, Frontier, Growth, NodeLogits, TreeSpec
from eyas.tree.spec import parse_tree

__all__ = ["DraftTree", "Frontier", "Growth", "NodeLogits", "TreeSpec", "parse_tree"]
