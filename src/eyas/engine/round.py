"""The whole algorithm: draft, verify in one target pass, walk, commit.

It knows nothing of drafter kinds or sampling parameters. Plain decoding is the same round with an empty tree, so the
baseline shares every line that is not speculation. One host sync, where the outcome is read.
Shapes: R rows, N nodes, D deepest level, A taps, Ht hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafters import Drafter
from eyas.target import Target
from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Sampler, SeededWalk, WalkRule


@dataclass(frozen=True)
class Speculation:
    """Who drafts, in which shape; `coupled` lets the drafter rank children with the sampler's own noise."""

    drafter: Drafter
    tree: TreeSpec
    coupled: bool = True


class Outcome(NamedTuple):
    """What a round did, on the host."""

    tokens: list[list[int]]
    """Emitted tokens of each row: the accepted draft tokens and the bonus token."""
    accepted: list[int]
    """How many of them were draft tokens."""
    offered: list[int]
    """How deep the row's tree reached."""


@torch.inference_mode()
def run_round(
    target: Target,
    speculation: Speculation | None,
    sampler: Sampler,
    rows: range,
    roots: Tensor,  # [R] each row's last token, not yet in the target's cache
    rule: WalkRule | None = None,
) -> Outcome:
    """Advance every row by one target pass."""
    count = len(rows)
    tree, taps = DraftTree.empty(count, target.device), tuple[int, ...]()
    if speculation is not None:
        coupling = sampler.coupling(count, speculation.coupled)
        tree, taps = speculation.drafter.draft(rows, speculation.tree, coupling), speculation.drafter.taps

    verified = target.verify(rows, roots, tree, taps)
    walk = (rule or SeededWalk())(verified.logits, tree, sampler, count)
    sampler.commit(count, walk.tokens, walk.accepted + 1)

    offered = (tree.depth[:, 1:] * tree.valid).amax(1) if tree.size else torch.zeros_like(walk.accepted)
    report = torch.cat((walk.accepted.unsqueeze(1), offered.unsqueeze(1), walk.tokens, walk.path), dim=1)
    table = report.tolist()  # the host sync
    width = walk.tokens.shape[1]
    accepted = [row[0] for row in table]
    tokens = [row[2 : 3 + row[0]] for row in table]
    paths = [row[2 + width : 3 + width + row[0]] for row in table]

    target.commit(rows, paths)
    if speculation is not None:
        keep = max(accepted) + 1
        at = walk.path[:, :keep, None, None]  # [R, keep, 1, 1]
        states = verified.taps.gather(1, at.expand(-1, -1, *verified.taps.shape[2:]))  # [R, keep, A, Ht]
        speculation.drafter.observe(rows, walk.tokens[:, :keep].clamp(min=0), states, [a + 1 for a in accepted])
    return Outcome(tokens, accepted, [row[1] for row in table])
