"""What a round proved about its draft: the tree that was verified and the path that was walked."""

from __future__ import annotations

from typing import NamedTuple

from eyas.tree import DraftTree


class Evidence(NamedTuple):
    """One round's draft and its outcome; R rows."""

    tree: DraftTree
    paths: list[list[int]]
    """For each row the places walked, the root's 0 first, node i as i + 1: one more than accepted draft tokens."""
