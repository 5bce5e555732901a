"""From a round's tree and path to what a traced request is told.

Shapes: R rows, N nodes. A place counts the root as 0 and node i as i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.engine.evidence import Evidence
from eyas.types import DraftRound


def draft_rounds(evidence: Evidence | None, roots: Sequence[int], rows: Sequence[int]) -> dict[int, DraftRound]:
    """What the round offered to those of `rows` that were offered anything; `roots` has one token for every row.

    Two copies to the host, so nobody pays who didn't ask.
    """
    if evidence is None or not rows or not evidence.tree.size:
        return {}
    tree = evidence.tree
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
            path=tuple(new[place - 1] for place in evidence.paths[row] if place > 0),
        )
    return found
