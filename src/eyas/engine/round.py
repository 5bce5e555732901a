"""The whole algorithm: draft, verify in one target pass, walk, commit.

It knows nothing of drafter kinds or sampling parameters. Plain decoding is the same round with an empty tree, so the
baseline shares every line that is not speculation. One host sync, where the outcome is read.
Shapes: R rows, N nodes, D deepest level, A taps, Ht hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafters import Drafter, observe_rows
from eyas.targets import Target
from eyas.tree import DraftTree, PlaceLogits, TreeSpec
from eyas.types import TokenLogprobs
from eyas.verify import LegalTree, Sampler, Scores, SeededWalk, Walk, WalkRule


@dataclass(frozen=True)
class Speculation:
    """Who drafts, in which shape; `coupled` lets the drafter rank children with the sampler's own noise."""

    drafter: Drafter
    tree: TreeSpec | None
    """None = a plain round: the drafter is told what was committed and computes nothing."""
    coupled: bool = True


class RoundOutput(NamedTuple):
    """What a round did, on the host."""

    tokens: list[list[int]]
    """Emitted tokens of each row: the accepted draft tokens and the bonus token."""
    accepted: list[int]
    """How many of them were draft tokens."""
    offered: list[int]
    """How deep the row's tree reached."""
    nodes: list[int]
    """How many nodes it had."""
    pass_tokens: int
    """T, the tokens of the target pass."""
    evidence: Evidence | None
    """The draft and what was walked of it; None after a plain round."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    """Of the rows that want them, one for each of their `tokens`."""
    failed: dict[int, str]
    """Rows whose grammar can't be followed any further, and why; their `tokens` are legal, and may be none."""
    draft_seconds: float
    """Drafting, catching up on deferred pairs included. On an accelerator the host's part of it."""
    pass_seconds: float
    """Verifying and walking, until the outcome is known; on an accelerator with what was still to be drafted."""


@torch.inference_mode()
def run_round(
    target: Target,
    speculation: Speculation | None,
    sampler: Sampler,
    rows: range,
    roots: Tensor,  # [R] each row's last token, not yet in the target's cache
    rule: WalkRule | None = None,
    live: Sequence[bool] | None = None,  # [R] which rows may be drafted for; None = all
    told: Sequence[bool] | None = None,  # [R] which rows the drafter hears of; None = all
) -> RoundOutput:
    """Advance every row by one target pass."""
    count = len(rows)
    began = time.perf_counter()
    heard = [True] * count if told is None else list(told)
    if not any(heard):
        speculation = None
    tree, taps, drafting = DraftTree.empty(count, target.device), tuple[int, ...](), False
    if speculation is not None:
        taps = speculation.drafter.taps
        if speculation.tree is not None and (live is None or any(live)):
            drafting = True
            coupling = sampler.coupling(rows, speculation.coupled)
            tree = speculation.drafter.draft(rows, speculation.tree, coupling, live).compact()

    drafted = time.perf_counter()
    if (legal := sampler.legal(rows, tree)) is not None:
        tree = legal.tree
    verified = target.verify(rows, roots, tree, taps)
    walk, paths, outcome = _judge(verified.logits, legal, tree, sampler, rows, rule)
    passed = time.perf_counter()

    target.commit(rows, paths)
    if speculation is not None:
        keep = max(outcome.accepted) + 1
        pairs = walk.tokens[:, :keep].clamp(min=0), verified.taps_at(walk.path[:, :keep])  # [R, keep], [R, keep, A, Ht]
        reading = [drafting and (live is None or live[row]) for row in range(count)]
        observe_rows(speculation.drafter, rows, *pairs, [a + 1 for a in outcome.accepted], heard, reading)
    return outcome._replace(
        pass_tokens=verified.tokens,
        evidence=Evidence(tree, paths) if drafting else None,
        draft_seconds=drafted - began,
        pass_seconds=passed - drafted,
    )


@torch.inference_mode()
def run_first_round(
    target: Target,
    drafter: Drafter | None,
    sampler: Sampler,
    rows: range,
    unread: Sequence[Sequence[int]],
    rule: WalkRule | None = None,
    reading: Sequence[bool] = (),
    told: Sequence[bool] | None = None,
) -> RoundOutput:
    """A plain round whose pass reads each row's last `unread` tokens besides its root, the last of them.

    So a first token needs no pass of its own. The drafter hears of the rows that are `told` [R] (None = all), and reads
    those of them that are `reading` [R] now.
    """
    began = time.perf_counter()
    heard = [True] * len(rows) if told is None else list(told)
    drafter = drafter if any(heard) else None
    tree = DraftTree.empty(len(rows), target.device)
    legal = sampler.legal(rows, tree)
    logits, piece = target.prefill_to_end(rows, unread, () if drafter is None else drafter.taps)
    walk, _, outcome = _judge(logits, legal, tree, sampler, rows, rule)
    passed = time.perf_counter()
    if drafter is not None:
        last = torch.tensor(piece.counts, device=target.device).unsqueeze(1) - 1
        next_tokens = piece.next_tokens.scatter(1, last, walk.tokens[:, :1])
        observe_rows(drafter, rows, next_tokens, piece.taps, piece.counts, heard, reading)
    return outcome._replace(pass_tokens=sum(piece.counts), pass_seconds=passed - began)


def _judge(
    logits: PlaceLogits, legal: LegalTree | None, tree: DraftTree, sampler: Sampler, rows: range, rule: WalkRule | None
) -> tuple[Walk, list[list[int]], RoundOutput]:
    """Walk the tree, tell the sampler, and fetch the paths and the outcome: the one host sync.

    What the pass cost and what was drafted is the caller's to fill in.
    """
    allowed = logits if legal is None else legal.restrict(logits)
    walk = (rule or SeededWalk())(allowed, tree, sampler, rows)
    sampler.commit(rows, walk.tokens, walk.accepted + 1)
    wanted = sampler.logprobs(rows)
    scores = Scores.of(logits, walk, wanted) if wanted else None

    depths = tree.depth[:, 1:] * tree.valid  # [R, N]
    offered = depths.amax(1) if tree.size else torch.zeros_like(walk.accepted)
    nodes = tree.valid.sum(1)
    summary = torch.stack((walk.accepted, offered, nodes), dim=1)
    report = torch.cat((summary, walk.tokens, walk.path), dim=1)  # [R, 3 + 2 * (D + 1)]
    told = (report.flatten() if scores is None else torch.cat((report.flatten(), scores.pack()))).cpu()  # the host sync
    table = told[: report.numel()].view(report.shape).tolist()
    width = walk.tokens.shape[1]
    tokens = [row[3 : 4 + row[0]] for row in table]
    logprobs = {} if scores is None else scores.read(told[report.numel() :], tokens)
    failed = sampler.consume(rows, tokens)
    for row, (legal_tokens, _) in failed.items():
        del tokens[row][legal_tokens:]
    paths = [row[3 + width : 4 + width + row[0]] for row in table]
    outcome = RoundOutput(
        tokens=tokens,
        accepted=[row[0] for row in table],
        offered=[row[1] for row in table],
        nodes=[row[2] for row in table],
        pass_tokens=0,
        evidence=None,
        logprobs=logprobs,
        failed={row: why for row, (_, why) in failed.items()},
        draft_seconds=0.0,
        pass_seconds=0.0,
    )
    return walk, paths, outcome


# What a round proved about its draft: the tree that was verified and the path that was walked.


class Evidence(NamedTuple):
    """One round's draft and its outcome; R rows."""

    tree: DraftTree
    paths: list[list[int]]
    """For each row the places walked, the root's 0 first, node i as i + 1: one more than accepted draft tokens."""
