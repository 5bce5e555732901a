"""Textual names of tree shapes, as `--tree` takes them, and the named static trees.

`chain:K`, `static:NAME`, `dynamic:DEPTH,TOPK,NODES[,THRESHOLD]` and `shared:DEPTH,WIDTH,BUDGET[,PER_ROW[,THRESHOLD]]`,
whose budget is the whole batch's.
"""

from __future__ import annotations

from eyas.errors import UsageError
from eyas.tree.draft_tree import TreeSpec
from eyas.tree.dynamic import DynamicTree
from eyas.tree.shared import SharedTree
from eyas.tree.static import Path, StaticTree

# EAGLE-1's published tree (arXiv 2401.15077): 25 nodes and the root.
_EAGLE1: tuple[Path, ...] = (
    *((i,) for i in range(4)),
    *((0, i) for i in range(3)),
    *((1, i) for i in range(2)),
    *((2, i) for i in range(2)),
    (3, 0),
    *((0, 0, i) for i in range(3)),
    *((0, 1, i) for i in range(2)),
    *((0, 2, i) for i in range(2)),
    (1, 0, 0),
    *((0, 0, 0, i) for i in range(3)),
    *((0, 0, 0, 0, i) for i in range(2)),
)

# Fifteen nodes, five deep, narrow: for machines on which a verification pass grows with its width.
_SLIM: tuple[Path, ...] = (
    (0,), (1,), (2,),
    (0, 0), (0, 1), (1, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip

PRESETS: dict[str, tuple[Path, ...]] = {"eagle1": _EAGLE1, "slim": _SLIM}
"""The paths of `static:NAME` trees."""

_FORMS = (
    "chain:K, static:NAME, dynamic:DEPTH,TOPK,NODES[,THRESHOLD] or shared:DEPTH,WIDTH,BUDGET[,PER_ROW[,THRESHOLD]] "
    "(parts in brackets are optional)"
)


def parse_tree(text: str) -> TreeSpec:
    """The tree shape that `text` names. Raises UsageError, which lists the accepted forms."""
    kind, _, rest = text.partition(":")
    if kind == "static":
        if rest not in PRESETS:
            raise UsageError(f"unknown static tree {rest!r}: known are {', '.join(sorted(PRESETS))}")
        return StaticTree(PRESETS[rest])
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    whole = [int(number) for number in numbers[: 4 if kind == "shared" else 3] if number.is_integer()]
    if kind == "chain" and len(numbers) == len(whole) == 1:
        return StaticTree.chain(whole[0])
    if kind == "dynamic" and len(whole) == 3 and len(numbers) in (3, 4):
        return DynamicTree(whole[0], whole[1], whole[2], threshold=numbers[3] if len(numbers) == 4 else 0.0)
    if kind == "shared" and len(whole) == min(len(numbers), 4) and len(numbers) in (3, 4, 5):
        per_row = whole[3] if len(whole) == 4 else None
        return SharedTree(whole[0], whole[1], whole[2], per_row, numbers[4] if len(numbers) == 5 else 0.0)
    raise UsageError(f"unknown tree {text!r}: write {_FORMS}")
