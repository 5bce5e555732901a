"""The walk: which tokens a verification pass commits, by the lossless rule or another one.

Rejection sampling is the classic rule of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318). The drafter draws a token x from a distribution q of its own. The target, whose distribution is p, accepts
it with probability min(1, p(x) / q(x)), or else draws from max(p - q, 0), normalized. The outcome is distributed as p,
but isn't what plain decoding draws with the same seed.

Shapes: B rows, N nodes, D the tree's greatest depth, W frontier nodes, V vocabulary, Vd draft vocabulary. A node index
counts the root as 0 and node i as i + 1; rows whose walk has ended wait off the tree, at index N + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.errors import UsageError
from eyas.runtime import to_device
from eyas.targets.native.noise import best_token, drawn_token, native_rows
from eyas.tree import DraftTree, Draws, NodeLogits
from eyas.types import TypicalAcceptance
from eyas.verify.path import gumbel, keep_min_p, keep_top_k, keep_top_p
from eyas.verify.sampler import Coupling, Sampler


def _is_host(device: torch.device) -> bool:
    """Whether reading a tensor on `device` waits for nothing."""
    return device.type == "cpu"


@dataclass(frozen=True)
class Walk:
    """The path walked through each row's tree, the `accepted + 1` tokens it emits, and the size of the tree."""

    device: torch.device
    fetched: list[list[int]] | None = None
    """The `table`, once the host has it."""
    computed: Tensor | None = None
    """The `table`, if it was made on the device."""
    tree: DraftTree | None = None
    """The trees on the host, if it fetched them to walk there; else None."""

    @cached_property
    def table(self) -> Tensor:
        """[B, 3 + 2 * (D + 1)] int64 on the device: the attributes below, side by side."""
        return to_device(self.fetched, self.device) if self.computed is None else self.computed

    @staticmethod
    def of(path: Tensor, tokens: Tensor, tree: DraftTree) -> Walk:
        """Make a walk from a `path` [B, D + 1], which may leave the tree, and the `tokens` [B, D + 1] chosen on it."""
        inside = path <= tree.size
        deepest = (tree.depth * F.pad(tree.acceptable, (1, 0), value=True)).amax(1)
        counts = torch.stack((inside.sum(1) - 1, deepest, tree.acceptable.sum(1)), dim=1)
        table = torch.cat((counts, tokens.masked_fill(~inside, -1), path.masked_fill(~inside, 0)), dim=1)
        return Walk(table.device, computed=table)

    @cached_property
    def fetched_tokens(self) -> list[list[int]] | None:
        """The `tokens`, once the host has them."""
        return None if self.fetched is None else [row[3 : 3 + self.steps] for row in self.fetched]

    @property
    def on_host(self) -> list[list[int]] | None:
        """The `tokens`, if the host is the device: there, tensors of this size take longer than lists."""
        return self.fetched_tokens if _is_host(self.device) else None

    @property
    def accepted(self) -> Tensor:
        """[B] number of draft tokens among the emitted ones."""
        return self.table[:, 0]

    @property
    def offered(self) -> Tensor:
        """[B] depth of each row's draft tree without scratch nodes; 0 = it has no other nodes."""
        return self.table[:, 1]

    @property
    def nodes(self) -> Tensor:
        """[B] number of the tree's nodes that could be accepted."""
        return self.table[:, 2]

    @property
    def tokens(self) -> Tensor:
        """[B, D + 1] emitted tokens, -1 past the end."""
        return self.table[:, 3 : 3 + self.steps]

    @property
    def path(self) -> Tensor:
        """[B, D + 1] indexes of the nodes to commit, whose logits gave the tokens; 0 past the end."""
        return self.table[:, 3 + self.steps :]

    @property
    def steps(self) -> int:
        """D + 1, the number of `tokens` in a row."""
        return ((self.table.shape[1] if self.fetched is None else len(self.fetched[0])) - 3) // 2

    def replaced(
        self, *, tokens: Tensor | None = None, path: Tensor | None = None, accepted: Tensor | None = None
    ) -> Walk:
        """A walk through the same trees with the given parts replaced, for rules that build on another rule's walk."""
        counts = self.accepted if accepted is None else accepted
        parts = (self.tokens if tokens is None else tokens, self.path if path is None else path)
        return Walk(self.device, computed=torch.cat((counts.unsqueeze(1), self.table[:, 1:3], *parts), dim=1))


class WalkRule(Protocol):
    """A rule by which verification accepts draft tokens."""

    @property
    def lossless(self) -> bool:
        """Whether the output has the distribution of plain sampling."""

    @property
    def seeded(self) -> bool:
        """Whether draws use the request's seed. If not, drafters draw too, and trees keep their distributions."""

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        """Walk the trees of the slots `rows`, given the target's `logits` at their roots and nodes."""


class SeededWalk:
    """The lossless default: emits exactly the tokens that plain decoding with the same seeds emits.

    Sample at the root; while a child has the sampled token, move there and sample again. For a given set of children,
    this accepts as often as any lossless rule can: with the target's probability of the children.
    """

    lossless = seeded = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        # log-probabilities of what was walked are fetched with it, so the device walks
        waits = bool(sampler.logprobs(rows)) and not _is_host(logits.index.device)
        if sampler.needs(rows).plain:
            return _greedy_walk(logits, tree, waits)
        drawn = logits.drawn(lambda: sampler.path(rows).node_draws(), tree.depth)
        if drawn is not None:
            return _chosen_walk(drawn, tree, logits.vocab_size, waits)
        if _is_host(logits.index.device):
            return _host_walk(logits, tree, sampler, rows)
        return _device_walk(logits, tree, sampler, rows)


def _device_walk(logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
    """Walk sampled rows without a device sync."""
    state = sampler.path(rows, tree.max_depth + 1)
    before = list[Tensor]()

    def sample(node: Tensor) -> Tensor:
        if before:
            state.advance(before[-1])
        before.append(state.sample(logits.at(node)))
        return before[-1]

    return _walk_on_device(tree, logits.vocab_size, sample)


def _walk_on_device(tree: DraftTree, vocab_size: int, sample: Callable[[Tensor], Tensor]) -> Walk:
    """Walk without a device sync: all rows take the same number of steps.

    `sample` returns the tokens [B] sampled at nodes [B], which may be off the tree.
    """
    # One number for "this token below that node": (index of the parent) * V + token. With V = 10, the nodes 7 and 9
    # below the root and 5 below the 7 have the keys [7, 9, 15]. The root samples 7: key 7, node 1; node 1 samples 5:
    # key 15, node 3. A token without a node has no key here, and its row waits off the tree.
    keys = torch.add(tree.tokens, tree.parents + 1, alpha=vocab_size).masked_fill_(~tree.acceptable, -1)  # [B, N]
    node = tree.tokens.new_zeros(len(tree.tokens))  # [B]
    path = [node]
    tokens = [sample(node)]
    for _ in range(tree.max_depth):
        key = torch.add(tokens[-1], node, alpha=vocab_size)
        found, child = (keys == key.unsqueeze(1)).max(dim=1)
        node = torch.where(found, child + 1, tree.size + 1)
        path.append(node)
        tokens.append(sample(node))
    return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree)


def _host_walk(logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
    """Walk sampled rows on a CPU; ends when no row can continue."""
    state = sampler.path(rows, tree.max_depth + 1)
    draws = state.draws() if native_rows(logits.rows) else None
    if draws is not None:
        index = logits.index.tolist()
        ahead = itertools.count()

        def draw(nodes: list[int]) -> list[int]:
            step = next(ahead)
            each = zip(draws, index, nodes, strict=True)
            return [0 if node == _ENDED else drawn_token(logits.rows, at[node], how, step) for how, at, node in each]

        return _walk_lists(_table(tree), tree, draw)
    sampled: list[Tensor] = []

    def choose(nodes: list[int]) -> list[int]:
        if sampled:
            state.advance(sampled[-1])
        sampled.append(state.sample(logits.at(torch.tensor(nodes).clamp(min=0))))
        chosen: list[int] = sampled[-1].tolist()
        return chosen

    return _walk_lists(_table(tree), tree, choose)


_ENDED = -1
"""Stands for a node: the row's walk has ended."""


def _table(tree: DraftTree) -> list[list[list[int]]]:
    """[B] each row's node tokens, parents and acceptable flags; the tree is on the host."""
    columns = (tree.tokens.tolist(), tree.parents.tolist(), tree.acceptable.tolist())
    return list(map(list, zip(*columns, strict=True)))


def _greedy_walk(logits: NodeLogits, tree: DraftTree, waits: bool = False) -> Walk:
    """Walk greedy rows, whose token at a node doesn't depend on the path to it.

    It runs on the host, because its steps are too small for kernels. A device computes the tokens of all nodes at once,
    a CPU only those on the path. For `waits`, see `_chosen_walk`.
    """
    if not logits.chooses:
        index = logits.index.tolist()

        def choose(at: list[int]) -> list[int]:
            each = zip(index, at, strict=True)
            return [0 if node == _ENDED else best_token(logits.rows, of_node[node]) for of_node, node in each]

        return _walk_lists(_table(tree), tree, choose)
    return _chosen_walk(logits.best(), tree, logits.vocab_size, waits)


def _chosen_walk(chosen: Tensor, tree: DraftTree, vocab_size: int, waits: bool) -> Walk:
    """Walk a tree whose nodes' next tokens `chosen` [B, 1 + N] are known.

    The host walks. If the outcome `waits`, because more is computed from the walk before anything is fetched, the
    device does.
    """
    if waits:
        last = chosen.shape[1] - 1
        return _walk_on_device(
            tree, vocab_size, lambda node: chosen.gather(1, node.clamp(max=last).unsqueeze(1)).squeeze(1)
        )
    # the host sync
    packed, tokens = torch.cat((tree.packed(), chosen), dim=1).cpu().tensor_split((-chosen.shape[1],), dim=1)
    on_host = tree.unpacked(packed)
    fetched = tokens.tolist()

    def fetched_token(at: list[int]) -> list[int]:
        return [row[node] for row, node in zip(fetched, at, strict=True)]

    return replace(_walk_lists(_table(on_host), tree, fetched_token), tree=on_host)


def _walk_lists(table: list[list[list[int]]], tree: DraftTree, choose: Callable[[list[int]], list[int]]) -> Walk:
    """Walk a `tree` whose rows' node tokens, parents and acceptable flags are in `table`.

    `choose` returns the tokens sampled at one node of each row, starting with the roots; its result for a row at
    `_ENDED` is ignored.
    """
    below: list[dict[tuple[int, int], int]] = []
    counts = []
    for row in table:
        children = dict[tuple[int, int], int]()
        depth = [0] * (len(row[0]) + 1)
        for node, (token, parent, valid) in enumerate(zip(*row, strict=True), 1):
            if valid:  # a node's parent comes before it
                depth[node] = depth[parent + 1] + 1
                children.setdefault((parent + 1, token), node)
        below.append(children)
        counts.append((max(depth), sum(row[2])))
    paths = [[0] for _ in table]
    tokens = [[token] for token in choose([0] * len(table))]
    going = list(range(len(table)))
    while going := [at for at in going if (paths[at][-1], tokens[at][-1]) in below[at]]:
        reached = [_ENDED] * len(table)
        for at in going:
            reached[at] = below[at][paths[at][-1], tokens[at][-1]]
            paths[at].append(reached[at])
        chosen = choose(reached)
        for at in going:
            tokens[at].append(chosen[at])
    rows = []
    steps = tree.max_depth + 1
    for path, emitted, (deepest, offered) in zip(paths, tokens, counts, strict=True):
        missing = steps - len(path)
        rows.append([len(path) - 1, deepest, offered, *emitted, *[-1] * missing, *path, *[0] * missing])
    return Walk(tree.tokens.device, rows)


class TypicalWalk:
    """Typical acceptance, a LOSSY rule: it trades the target's distribution for longer accepted drafts.

    Medusa's rule (arXiv 2401.10774): a draft token is acceptable if the target finds it probable enough, p(x) >
    min(epsilon, delta * exp(-H(p))), whether or not the target would have sampled it. The threshold is lower where the
    target is unsure. The walk moves to the most probable acceptable child; if there is none, it samples the last token.
    Probable draft tokens are emitted more often than p says, and at temperature 0 a token other than the best may be
    emitted. Outputs differ from plain decoding's, so this is never the default.

    p is the target's distribution after penalties, temperature and filters. A greedy row has no temperature: there p is
    the distribution at temperature 1, unfiltered, and the last token is the argmax.
    """

    lossless = False
    seeded = True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        numbers = TypicalAcceptance(epsilon, delta)
        self.epsilon = numbers.epsilon
        self.delta = numbers.delta

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        return _walk_by(partial(self._best_child, tree), logits, tree, sampler, rows)

    def _best_child(self, tree: DraftTree, level: int, node: Tensor, warped: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Whether `node` [B] has an acceptable child, and the tree column of the most probable one: two [B]."""
        probs = warped.softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, 1]
        drafted = probs.gather(1, tree.tokens)  # [B, N]
        good = (drafted > threshold) & tree.acceptable & (tree.parents + 1 == node.unsqueeze(1))
        best, child = drafted.masked_fill(~good, -1.0).max(dim=1)
        return best >= 0, child


class SyntheticWalk:
    """Accepts a given number of draft tokens, whatever the target says. LOSSY: only for BENCHMARKS of speed.

    Rounds emit `accept_length` tokens on average, if drafts are deep enough: the beginning of a tree's first path, and
    one token of the target's. So the gain from a drafter of that quality can be measured before there is one. (vLLM has
    synthetic acceptance, SGLang a simulated accept length, for the same.)
    """

    lossless = False
    seeded = True

    def __init__(self, accept_length: float) -> None:
        """Raises UsageError for less than the one token that every round emits."""
        if not accept_length >= 1.0:
            raise UsageError(f"a synthetic accept length of {accept_length:g}: a pass emits at least one token")
        self.accept_length = accept_length

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        whole, share = divmod(self.accept_length - 1.0, 1.0)
        wanted = whole + (uniform_draws(sampler, rows, 1)[:, 0] < share)  # [B]

        def first_child(level: int, node: Tensor, warped: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
            children = tree.acceptable & (tree.parents + 1 == node.unsqueeze(1))
            found, child = children.max(dim=1)  # the first of equals
            return found & (level < wanted), child

        return _walk_by(first_child, logits, tree, sampler, rows)


def _walk_by(
    child_of: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    logits: NodeLogits,
    tree: DraftTree,
    sampler: Sampler,
    rows: range,
) -> Walk:
    """Walk from child to child, and sample where there is none to continue to.

    `child_of(level, node [B], warped [B, V])` says whether a node has a child to continue to, and in which column, both
    [B].
    """
    state = sampler.path(rows, tree.max_depth + 1)
    row = torch.arange(len(rows), device=logits.index.device)
    node = torch.zeros_like(row)  # [B]
    path, tokens = [node], []
    for level in range(tree.max_depth):
        warped = state.warped(logits.at(node))  # [B, V]
        found, child = child_of(level, node, warped)
        tokens.append(torch.where(found, tree.tokens[row, child], state.choose(warped)))
        state.advance(tokens[-1])
        node = torch.where(found, child + 1, tree.size + 1)
        path.append(node)
    tokens.append(state.sample(logits.at(node)))
    return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree)


_DRAFT_STREAM, _ACCEPT_STREAM = 0x51ED270B2D5A9C33, 0x2545F4914F6CDD1D
"""Turn a request's seed into the seeds of two more noise streams, independent of the one it samples with."""


class IndependentDraws(Coupling):
    """Ranks children by draws from the drafter's own distribution, with separate noise, and keeps the distributions.

    Temperature and filters are the request's, as in the papers: q comes from the drafter's logits in the same way as p
    from the target's. Only chains are drawn, with one node per level.
    """

    def __init__(self, sampler: Sampler, rows: range) -> None:
        """Draw for the slots `rows`, with the settings that `sampler` has for them."""
        own = sampler.coupling(rows, True)
        super().__init__(own.state, own.needs, rows, True, own.constraints, own.legal)
        self._probs: list[Tensor] = []
        self._ids: Tensor | None = None

    def warp(self) -> None:
        return None

    def rank(self, logits: Tensor, steps_ahead: int, target_ids: Tensor | None) -> Tensor:
        state = self.state
        rows = self.rows
        needs = self.needs
        logits = self.warped(logits, steps_ahead, target_ids)
        shape = logits.shape
        flat = logits[:, 0]
        if needs.top_k:
            flat = keep_top_k(flat, state.top_k[rows], needs.top_k)
        if needs.top_p:
            flat = keep_top_p(flat, state.top_p_cut[rows])
        if needs.min_p:
            flat = keep_min_p(flat, state.min_p[rows])
        scale = state.noise_scale[rows].unsqueeze(1)
        self._probs.append(distribution(flat, scale))
        self._ids = target_ids
        ids = state.token_ids if target_ids is None else target_ids
        noise = gumbel(state.seed[rows] ^ _DRAFT_STREAM, state.position[rows].unsqueeze(1) + steps_ahead, ids)[:, 0]
        return torch.addcmul(flat, noise, scale).log_softmax(dim=-1).view(shape)

    def attached_to(self, tree: DraftTree) -> DraftTree:
        """The tree with the distributions that its tokens were drawn from."""
        return replace(tree, draws=Draws(tuple(self._probs), self._ids, tree.valid)) if self._probs else tree


def distribution(logits: Tensor, noise_scale: Tensor) -> Tensor:
    """The probabilities [B, V] with which warped logits are sampled; a greedy row's are 1 at its best token."""
    best = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(torch.float32)
    return torch.where(noise_scale > 0, logits.softmax(dim=-1), best)


class RejectionWalk:
    """Speculative sampling by rejection: LOSSLESS IN DISTRIBUTION, but not equal to plain decoding with the same seed.

    At temperature 0 it emits what plain decoding emits. It needs chains of fixed length from a drafter that draws from
    a distribution. Leaving out nodes depending on what was drawn would bias the outcome.
    """

    lossless = True
    seeded = False

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        if not sampler.needs(rows).noise or not tree.size:
            return SeededWalk()(logits, tree, sampler, rows)
        if tree.draws is None:
            raise UsageError(
                "the rejection rule needs the distributions that a chain was drawn from, but this tree has none"
            )
        state = sampler.path(rows, tree.max_depth + 1)
        draws = tree.draws
        size = tree.size
        uniform = uniform_draws(sampler, rows, tree.max_depth)
        scale = sampler.state.noise_scale[rows.start : rows.stop].unsqueeze(1)
        node = logits.index.new_zeros(len(rows))  # [B]
        path, tokens = [node], []
        for level in range(tree.max_depth):
            warped = state.warped(logits.at(node))
            p = distribution(warped, scale)
            q = draws.at(level, logits.vocab_size)
            drawn, was_drawn = tree.tokens[:, level], draws.valid[:, level]
            p_drawn, q_drawn = (each.gather(1, drawn.unsqueeze(1)).squeeze(1) for each in (p, q))
            good = was_drawn & (uniform[:, level] * q_drawn < p_drawn)
            left = (p - q).clamp(min=0.0)
            # p - q leaves nothing if q equals p up to rounding
            from_p = ~was_drawn | (left.sum(dim=-1) == 0)
            tokens.append(torch.where(good, drawn, state.choose(torch.where(from_p.unsqueeze(1), warped, left.log()))))
            state.advance(tokens[-1])
            node = torch.where(good & (node == level), level + 1, size + 1)
            path.append(node)
        tokens.append(state.sample(logits.at(node)))
        return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree)


def uniform_draws(sampler: Sampler, rows: range, steps: int) -> Tensor:
    """[B, steps] uniform numbers in (0, 1) that decide on acceptance, by the requests' seeds."""
    here = slice(rows.start, rows.stop)
    ids = sampler.state.token_ids[:1]
    positions = sampler.state.position[here].unsqueeze(1) + torch.arange(steps, device=ids.device)
    noise = gumbel(sampler.state.seed[here] ^ _ACCEPT_STREAM, positions, ids).squeeze(2)
    return noise.neg().exp().neg().exp()
