"""From a round's tree and path to what a traced request is told.

Shapes: R rows, N nodes. A place counts the root as 0 and node i as i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.tree import DraftTree
from eyas.types import DraftRound


def draft_rounds(
    tree: DraftTree, roots: Sequence[int], paths: Sequence[Sequence[int]], rows: Sequence[int]
) -> dict[int, DraftRound]:
    """The rounds of those of `rows` that were offered nodes; `roots` and the walked `paths` (places) are one per row.

    Two copies to the host, so it is called for batches in which somebody asked.
    """
    if not rows or not tree.size:
        return {}
    chosen = torch.tensor(list(rows), device=tree.tokens.device)
    whole = torch.stack((tree.valid.long(), tree.tokens, tree.parents))[:, chosen].tolist()  # [3][rows][N]
    logprobs = tree.logprob[chosen].tolist()
    found = {}
    for row, valid, tokens, parents, logprob in zip(rows, *whole, logprobs, strict=True):
        kept = [node for node, is_valid in enumerate(valid) if is_valid]
        if not kept:
            continue
        new = {node: index for index, node in enumerate(kept)}
        found[row] = DraftRound(
            root=roots[row],
            tokens=tuple(tokens[node] for node in kept),
            parents=tuple(new.get(parents[node], -1) for node in kept),
            logprob=tuple(logprob[node] for node in kept),
            path=tuple(new[place - 1] for place in paths[row] if place > 0),
        )
    return found
