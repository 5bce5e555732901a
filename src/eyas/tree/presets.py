"""Named static trees."""

from __future__ import annotations

from eyas.tree.static import Path

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
