"""The whole algorithm: draft, verify in one target pass, walk, commit.

It knows nothing of drafter kinds or sampling parameters. Plain decoding is the same round with an empty tree, so the
baseline shares every line that is not speculation. There is one host sync per round: `_walk` fetches the outcome.

Shapes: R rows (contiguous slots), N nodes of a tree, D its deepest level, A taps, Ht target hidden, V vocabulary.
A node index counts the root as 0 and node i of the draft as i + 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.runtime import inference, to_device
from eyas.targets import Target
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.tree.draft_tree import Source
from eyas.types import TokenLogprobs
from eyas.verify import EmittedLogprobs, IndependentDraws, LegalTree, Sampler, SeededWalk, Walk, WalkRule

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Speculation:
    """A drafter and the trees it drafts."""

    drafter: Drafter
    tree: TreeSpec | None
    """None = plain rounds: the drafter observes what is committed and computes nothing."""
    coupled: bool = True
    """Let the drafter rank children with the sampler's own noise (Gumbel coupling)."""


@dataclass(frozen=True)
class Slots:
    """A target, the slots that its passes read and write, and how tokens are chosen in them."""

    target: Target
    cache: SlotCache
    sampler: Sampler
    rule: WalkRule = field(default_factory=SeededWalk)


class VerifiedDraft(NamedTuple):
    """A batch of draft trees, on the host, and the paths that verification walked through them."""

    tree: DraftTree
    paths: list[list[int]]
    """Node indices walked in each row, beginning with the root's 0: one more than accepted draft tokens."""
    emitted: Sequence[Sequence[int]] | None = None
    """The tokens that each row emitted: the accepted ones, and the bonus token. None = only the paths are known."""

    def copied_from_prediction(self, row: int) -> tuple[int, int]:
        """How many nodes copied from the request's prediction were accepted in a row, and how many rejected."""
        tree = self.tree
        path = self.paths[row]
        if not tree.lookup.predicted or not tree.lookup.predicted[row]:
            return 0, 0
        copied = tree.valid[row] if tree.sources is None else tree.valid[row] & (tree.sources[row] != Source.NETWORK)
        nodes: list[bool] = copied.tolist()
        accepted = sum(nodes[node - 1] for node in path[1:])
        return accepted, sum(nodes) - accepted


class RoundOutput(NamedTuple):
    """What a round did, on the host; lists have an entry for each row."""

    tokens: list[list[int]]
    """Emitted tokens: the accepted draft tokens, then the bonus token."""
    accepted: list[int]
    """Number of accepted draft tokens."""
    offered: list[int]
    """Depth of the draft tree, scratch nodes left out; 0 = none."""
    nodes: list[int]
    """Number of nodes of the draft tree, scratch nodes left out."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    """Row -> log-probabilities of its `tokens`, for rows that asked for them."""
    failed: dict[int, str]
    """Row -> why its grammar can't be followed any further; its `tokens` are legal, and may be none."""
    draft: VerifiedDraft | None = None
    """The trees that were verified and the paths taken; None after a plain round."""
    pass_tokens: int = 0
    """T, the tokens that the target pass ran."""
    draft_seconds: float = 0.0
    """Time of drafting, including the reading of deferred pairs; on an accelerator only the host's part."""
    pass_seconds: float = 0.0
    """Time of verifying and walking up to the host sync; on an accelerator including unfinished drafting."""
    observe_seconds: float = 0.0
    """Time of the drafter's reading of committed tokens, 0 without a drafter; on an accelerator the host's part."""
    contexts: Sequence[int] = ()
    """Number of tokens before the round, the root included; empty for the round that ends a prompt."""


@inference
def run_round(
    slots: Slots,
    speculation: Speculation | None,
    rows: range,
    roots: Tensor,  # [R] each row's last token, not yet in the target's cache
    drafting: Sequence[bool] | None = None,  # [R] rows that get a draft; None = all
    observed: Sequence[bool] | None = None,  # [R] rows whose committed tokens the drafter observes; None = all
) -> RoundOutput:
    """Advance every row by one target pass."""
    target = slots.target
    cache = slots.cache
    sampler = slots.sampler
    rule = slots.rule
    observed = [True] * len(rows) if observed is None else observed
    drafting = [True] * len(rows) if drafting is None else drafting
    speculation = speculation if any(observed) else None
    spec = speculation.tree if speculation is not None and any(drafting) else None
    contexts = [cache.length(row) + 1 for row in rows]
    taps = () if speculation is None else speculation.drafter.taps

    started = time.perf_counter()
    if speculation is None or spec is None:
        tree = DraftTree.empty(len(rows), target.device)
        drafting = [False] * len(rows)
    else:
        draws = None if rule.seeded else IndependentDraws(sampler, rows)
        coupling = draws or sampler.coupling(rows, speculation.coupled)
        tree = speculation.drafter.draft(rows, spec, coupling, drafting).compact()
        tree = tree if draws is None else draws.attached_to(tree)
    drafted = time.perf_counter()

    legal = sampler.legal(rows, tree)  # the trees as the rows' grammars allow them
    tree = tree if legal is None else legal.tree
    verified = target.verify(cache, rows, roots, tree, taps)
    walk, paths, output = _walk(slots, verified.logits, legal, tree, rows)
    tree = walk.tree or tree
    passed = time.perf_counter()

    cache.commit(rows, paths)
    committed = time.perf_counter()
    if speculation is not None:
        if spec is not None:
            speculation.drafter.verified(rows, tree, verified.logits, drafting)
        counts = [accepted + 1 for accepted in output.accepted]
        most = max(counts)
        known = walk.fetched_tokens if speculation.drafter.reads_on_host else walk.on_host
        if known is None:
            next_tokens = walk.tokens[:, :most].clamp(min=0)  # [R, K]
        else:
            next_tokens = to_device([[max(token, 0) for token in row[:most]] for row in known], _HOST)
        if spec is None:
            states = verified.taps.unsqueeze(1)  # [R, K, A, Ht]
        elif walk.on_host is None:
            states = verified.taps_at(walk.path[:, :most])
        else:
            states = verified.taps_along(paths)
        observe_rows(speculation.drafter, rows, next_tokens, states, counts, observed, drafting)
    return output._replace(
        draft=None if spec is None else VerifiedDraft(tree, paths, output.tokens),
        pass_tokens=verified.tokens,
        draft_seconds=drafted - started,
        pass_seconds=passed - drafted,
        observe_seconds=0.0 if speculation is None else time.perf_counter() - committed,
        contexts=contexts,
    )


@inference
def run_first_round(
    slots: Slots,
    drafter: Drafter | None,
    rows: range,
    unread: Sequence[Sequence[int]],
    reading: Sequence[bool] = (),
    observed: Sequence[bool] | None = None,
) -> RoundOutput:
    """Run a plain round whose pass reads each row's `unread` tokens, the last of which is its root.

    So a first token needs no pass of its own. The drafter observes the `observed` rows [R] (None = all). It reads
    the pairs of `reading` rows [R] immediately and defers the others. Needs `target.head_is_exact`.
    """
    target = slots.target
    observed = [True] * len(rows) if observed is None else observed
    drafter = drafter if any(observed) else None

    started = time.perf_counter()
    tree = DraftTree.empty(len(rows), target.device)
    legal = slots.sampler.legal(rows, tree)
    logits, piece = target.prefill_to_end(slots.cache, rows, unread, () if drafter is None else drafter.taps)
    walk, _, output = _walk(slots, logits, legal, tree, rows)
    passed = time.perf_counter()

    if drafter is not None:
        known = walk.fetched_tokens if drafter.reads_on_host else None
        if known is None:
            last = to_device(piece.counts, target.device).unsqueeze(1) - 1
            next_tokens = piece.next_tokens.scatter(1, last, walk.tokens[:, :1])
        else:
            last = torch.tensor(piece.counts).unsqueeze(1) - 1
            next_tokens = piece.next_on_host.scatter(1, last, to_device(known, _HOST)[:, :1])
        observe_rows(drafter, rows, next_tokens, piece.taps, piece.counts, observed, reading)
    return output._replace(pass_tokens=sum(piece.counts), pass_seconds=passed - started)


def observe_rows(
    drafter: Drafter,
    rows: range,
    next_tokens: Tensor,
    taps: Tensor,
    counts: Sequence[int],
    observed: Sequence[bool],
    reading: Sequence[bool],
) -> None:
    """Give a drafter the first `counts[r]` pairs of each `observed` row [R]; rows not `reading` [R] defer theirs."""
    counts = [count * wanted for count, wanted in zip(counts, observed, strict=True)]
    now = [count * reads for count, reads in zip(counts, reading, strict=True)]
    if any(now):
        drafter.observe(rows, next_tokens, taps, now)
    if now != counts:
        drafter.defer(rows, next_tokens, taps, [count - read for count, read in zip(counts, now, strict=True)])


def _walk(
    slots: Slots, logits: NodeLogits, legal: LegalTree | None, tree: DraftTree, rows: range
) -> tuple[Walk, list[list[int]], RoundOutput]:
    """Walk the trees, advance the sampler, and fetch the outcome: the one host sync of a round.

    Returns the walk, the node indices walked in each row, and the output as far as it is known. From then on the walk
    has its table and the trees on the host, too, so that nothing has to sync again.
    """
    sampler = slots.sampler
    walk = slots.rule(logits if legal is None else legal.restrict(logits), tree, sampler, rows)
    if walk.on_host is None:
        sampler.commit(rows, walk.tokens, walk.accepted + 1)
    else:
        sampler.commit(rows, walk.on_host, [len(row) - row.count(-1) for row in walk.on_host])
    wanted = sampler.logprobs(rows)
    scores = EmittedLogprobs.of(logits, walk, wanted) if wanted else None

    table = walk.fetched
    flat = None if scores is None else scores.flat()
    if table is None:  # the host sync, unless the walk was made on the host
        packed = [] if walk.device.type == "cpu" else [tree.packed()]
        parts = [walk.table, *packed, *(() if flat is None else (flat,))]
        copied = torch.split_with_sizes(
            torch.cat([part.flatten() for part in parts]).cpu(), [part.numel() for part in parts]
        )
        of_walk, *rest = (copy.view(part.shape) for copy, part in zip(copied, parts, strict=True))
        table = of_walk.tolist()
        walk = replace(walk, fetched=table, tree=tree.unpacked(rest[0]) if packed else tree)
        flat = None if flat is None else rest[-1]
    # a row of `Walk.table`: accepted, offered, nodes, then `width` tokens, then `width` node indices; `accepted + 1` of
    # each are used
    width = walk.steps
    tokens = [row[3 : 4 + row[0]] for row in table]
    paths = [row[3 + width : 4 + width + row[0]] for row in table]
    logprobs = {} if scores is None or flat is None else scores.read(flat.cpu(), tokens)
    failed = sampler.consume(rows, tokens)
    for row, (legal_tokens, _) in failed.items():
        del tokens[row][legal_tokens:]
    output = RoundOutput(
        tokens=tokens,
        accepted=[row[0] for row in table],
        offered=[row[1] for row in table],
        nodes=[row[2] for row in table],
        logprobs=logprobs,
        failed={row: why for row, (_, why) in failed.items()},
    )
    return walk, paths, output
