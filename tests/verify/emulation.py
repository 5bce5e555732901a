"""A whole engine in miniature: table models whose exact distribution can be computed, and rounds over them.

Shapes: B rows, W frontier nodes, N tree nodes, D tree depth, L answer length, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.types import SamplingParams
from eyas.verify import Coupling, IndependentDraws, Sampler, WalkRule

CPU = torch.device("cpu")
PROMPT = (1, 2, 3)
_STATES = 1009


@dataclass
class TableModel:
    """A toy language model: the state after a prefix indexes a table of logits."""

    table: Tensor  # [states, V]

    @staticmethod
    def random(vocab_size: int, seed: int, spread: float = 1.5) -> TableModel:
        generator = torch.Generator().manual_seed(seed)
        return TableModel(spread * torch.randn(_STATES, vocab_size, generator=generator))

    def disagreeing(self, seed: int) -> TableModel:
        """A drafter for this target: correlated, but often wrong."""
        return TableModel(0.6 * self.table + 0.8 * TableModel.random(self.table.shape[1], seed).table)

    @staticmethod
    def after(state: Tensor, token: Tensor) -> Tensor:
        return (state * 31 + token + 1) % _STATES


def draft(drafter: TableModel, state: Tensor, spec: TreeSpec, coupling: Coupling) -> DraftTree:
    """The drafter's tree below `state` [B]."""
    growth = spec.start(len(state), CPU)
    # [B, W]
    frontier = state.unsqueeze(1)
    steps = 0
    while True:
        rank = coupling.rank(drafter.table[frontier], steps, None)
        grown = growth.expand(*rank.topk(growth.fanout))
        if grown is None:
            return growth.tree()
        frontier = drafter.after(frontier.gather(1, grown.parents), grown.tokens)
        steps += 1


def node_states(tree: DraftTree, state: Tensor) -> Tensor:
    """The model's state at every node [B, 1 + N], by node index."""
    states = state.unsqueeze(1).repeat(1, 1 + tree.size)
    for i in range(tree.size):
        parent = states.gather(1, tree.parents[:, i : i + 1] + 1)
        states[:, i + 1] = TableModel.after(parent[:, 0], tree.tokens[:, i])
    return states


def generate(
    sampler: Sampler,
    walk: WalkRule,
    target: TableModel,
    length: int,
    drafter: TableModel | None = None,
    spec: TreeSpec | None = None,
    coupled: bool = True,
) -> tuple[Tensor, float]:
    """Answers [B, L] of all slots and the accept length; plain decoding without `drafter` or `spec`."""
    rows = len(sampler.state.seed)
    state = torch.zeros(rows, dtype=torch.int64)
    done = torch.zeros(rows, dtype=torch.int64)
    out = torch.empty(rows, 0, dtype=torch.int64)
    emitted = rounds = 0
    while int(done.min()) < length:
        if drafter is None or spec is None:
            tree = DraftTree.empty(rows, CPU)
        else:
            draws = None if walk.seeded else IndependentDraws(sampler, range(rows))
            tree = draft(drafter, state, spec, draws or sampler.coupling(range(rows), coupled))
            tree = tree if draws is None else draws.attached_to(tree)
        states = node_states(tree, state)
        result = walk(NodeLogits.of(target.table[states]), tree, sampler, range(rows))
        count = result.accepted + 1
        sampler.commit(range(rows), result.tokens, count)
        width = result.tokens.shape[1]
        out = torch.nn.functional.pad(out, (0, max(0, int(done.max()) + width - out.shape[1])), value=-1)
        out.scatter_(1, done.unsqueeze(1) + torch.arange(width), result.tokens)
        done = done + count
        last = result.accepted.unsqueeze(1)
        state = TableModel.after(states.gather(1, result.path.gather(1, last)), result.tokens.gather(1, last))[:, 0]
        emitted += int(count.sum())
        rounds += rows
    return out[:, :length], emitted / rounds


def admit_all(params: list[SamplingParams], vocab_size: int) -> Sampler:
    """A sampler with a slot for each of `params`."""
    sampler = Sampler(len(params), vocab_size, CPU)
    for slot, each in enumerate(params):
        sampler.admit(slot, each, PROMPT, eos_ids=(0,))
    return sampler


def restart(sampler: Sampler, seeds: Tensor) -> None:
    """Make every slot a fresh request with a new seed (no penalties)."""
    sampler.state.seed.copy_(seeds)
    sampler.state.position.fill_(len(PROMPT))
    sampler.state.generated.zero_()


def exact_distribution(target: TableModel, params: SamplingParams, length: int) -> Tensor:
    """The probability of every answer [V ** L], first token most significant, by `transformers`' own warpers."""
    logits = TemperatureLogitsWarper(params.temperature)(None, target.table)
    if params.top_k:
        logits = TopKLogitsWarper(params.top_k)(None, logits)
    if params.top_p < 1.0:
        logits = TopPLogitsWarper(params.top_p)(None, logits)
    probs = logits.double().softmax(dim=-1)
    vocab_size = target.table.shape[1]
    result = []
    for answer in itertools.product(range(vocab_size), repeat=length):
        state = torch.tensor(0)
        p = 1.0
        for token in answer:
            p *= float(probs[state, token])
            state = target.after(state, torch.tensor(token))
        result.append(p)
    return torch.tensor(result, dtype=torch.float64)


def p_value(answers: Tensor, expected: Tensor, vocab_size: int) -> float:
    """Chi-square test of `answers` [draws, L] against the exact distribution; rare answers share a bin.

    An answer of probability zero must not occur at all.
    """
    powers = vocab_size ** torch.arange(answers.shape[1] - 1, -1, -1)
    observed = (answers * powers).sum(1).bincount(minlength=len(expected)).double()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    expected = expected * len(answers)
    rare = expected < 5
    bins = torch.cat((observed[~rare], observed[rare].sum(0, keepdim=True)))
    sizes = torch.cat((expected[~rare], expected[rare].sum(0, keepdim=True)))
    some = sizes > 0
    return float(chisquare(bins[some].numpy(), (sizes[some] * bins.sum() / sizes.sum()).numpy()).pvalue)
