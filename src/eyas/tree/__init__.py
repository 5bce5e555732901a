"""Draft trees: the tensors, the available shapes, and how a drafter grows each of them.

Public names are imported on first use, so that tree names can be checked without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.tree.draft_tree import DraftTree, Draws, Frontier, Growth, NodeLogits, TreeSpec
    from eyas.tree.spec import AUTO, is_auto, parse_tree

__all__ = ["AUTO", "DraftTree", "Draws", "Frontier", "Growth", "NodeLogits", "TreeSpec", "is_auto", "parse_tree"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "spec" if name in ("AUTO", "is_auto", "parse_tree") else "draft_tree"
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value
