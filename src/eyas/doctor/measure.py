"""Measures how well a reading drafts with teacher forcing, and whether it drafts better than another.

The drafter reads the target's true states along the target's own answers, and a chain is drafted from every position of
an answer. It is fed the true tokens, which are those that it would be fed as long as it is right, so the greedy
acceptance of chains is exact. Of a block drafter a block is run there, which is fed the true tokens where it reads any.
The *overlap* sum(min(p, q)) of the target's and the drafter's distributions is what
sampling at temperature 1 accepts: a smooth measure of the same quality, which distinguishes readings with far fewer
tokens.

Two readings are measured on the same answer tokens, so their overlaps are compared token by token. A block of 16
neighbouring tokens counts as one observation, because neighbours aren't independent. With the sum D_b of the
differences and the number n_b of tokens in each of B blocks:

    gain = sum D_b / sum n_b,   error^2 = B / (B - 1) * sum (D_b - gain * n_b)^2 / (sum n_b)^2,   z = gain / error

Of m readings that are tried, one wins if its z exceeds the normal quantile of 1 - 0.001 / m (so that for one sound
drafter in a thousand, some reading wins by chance), its gain is at least 0.001, and its greedy acceptance isn't lower.

Shapes: B answers, S positions, H draft hidden, K chain positions, M answer tokens, T most probable tokens,
Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.doctor.reading import Reading
from eyas.doctor.transcript import POSITIONS_AT_ONCE, Transcript
from eyas.drafters.block.network import BlockConfig, BlockNetwork
from eyas.drafters.config import DrafterConfig
from eyas.drafters.network import DraftNetwork
from eyas.targets import Target
from eyas.train.loss.block import blocks_at, guessed, read_context, sampled_anchors
from eyas.train.loss.block_attention import BlockAttention
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.ttt import ChainRows, chain_rows, unrolled

BLOCK = 16
"""Neighbouring answer tokens that count as one observation."""
CHANCE = 0.001
"""The share of sound drafters for which some other reading may win by chance."""
MIN_GAIN = 0.001
"""The least gain in overlap that counts, however certain it is."""
_ANCHORS = 64
"""Most blocks of an answer: each runs all its slots through all layers."""
MIN_GAIN_FROM_TAPS = 0.02
"""The least gain in overlap from the target's states that shows that a drafter can use them."""


@dataclass(frozen=True)
class Measurement:
    """How well a reading drafts on a transcript, token by token, so that two readings can be compared in pairs."""

    accepted: tuple[float, ...]
    """Acceptance by chain position, counted like `Stats.accepted_by_position`."""
    right: Tensor  # [M] share of the chain positions whose first choice is the target's token
    overlap: Tensor  # [M] mean overlap over the chain positions
    blocks: Tensor  # [M] int64: the number of the block that a token is in

    @property
    def accept_length(self) -> float:
        """Tokens per target pass, including the bonus token."""
        return 1.0 + sum(self.accepted)


@torch.inference_mode()
def measure(reading: Reading, transcript: Transcript, target: Target, length: int) -> Measurement:
    """Draft a chain of `length` tokens from every position of the answers, and compare it with the target."""
    network, states = reading.network(target), transcript.states(reading.taps)
    right, overlap = [], []
    with fast_linears(transcript.device):
        if isinstance(network, BlockNetwork):
            rows, steps = _block_chains(network, transcript, states, length)
        else:
            rows, steps = _chains(network, transcript, states, length)
        truth = transcript.tokens.flatten()[rows.answers + 1]
        seen = _Likely(network, transcript, rows)
        for step, (read, logits) in enumerate(steps):
            guessed, share = seen.compare(read[rows.guesses[step].clamp(min=0)], logits)
            right.append(guessed == truth)
            overlap.append(share)
    there = rows.guesses[: len(right)] >= 0  # [K, M]; answers may be shorter than the chain
    hits = torch.stack(right) & there
    counted = there.sum(0)
    guessed_at_all = counted > 0  # all tokens, except where only some blocks are run
    return Measurement(
        accepted=_accepted(hits, there, rows, transcript),
        right=(hits.sum(0) / counted)[guessed_at_all],
        overlap=((torch.stack(overlap) * there).sum(0) / counted)[guessed_at_all],
        blocks=_blocks(transcript.answers, rows)[guessed_at_all],
    )


def comparable_length(config: DrafterConfig, length: int) -> int:
    """The longest chain up to `length` that all readings of a drafter guess: their blocks differ by two guesses."""
    if isinstance(config, BlockConfig):
        return min(length, max(1, config.block_size - 2))
    return length if config.guesses is None else min(length, config.guesses)


_Head = Callable[[Tensor], Tensor]
_Steps = Iterator[tuple[Tensor, _Head]]
"""For each step what its head reads [., J], and the head."""


def _chains(network: DraftNetwork, transcript: Transcript, states: Tensor, length: int) -> tuple[ChainRows, _Steps]:
    """A chain from every position of the answers."""
    rows = chain_rows(transcript.answers, length)
    steps = enumerate(unrolled(network, transcript.tokens, states, rows))
    return rows, ((normed, partial(network.logits_at, slot=step)) for step, (_, normed) in steps)


def _block_chains(
    network: BlockNetwork, transcript: Transcript, states: Tensor, length: int
) -> tuple[ChainRows, _Steps]:
    """A block from every position of the answers, or from `_ANCHORS` of each."""
    begun = transcript.answers | F.pad(transcript.answers[:, 1:], (0, 1))  # with the token before each answer
    anchors = sampled_anchors(begun, _ANCHORS, (0,))
    steps = min(length, network.config.guesses)
    blocks = blocks_at(network.config, transcript.tokens, transcript.answers, anchors, steps)
    attention = BlockAttention(anchors)
    read_context(network, states, attention.store)
    joined = network.joined(guessed(network, network.embed(blocks.masked), blocks, attention), blocks.before)
    return blocks.rows(), ((read, network.joined_logits) for read in joined.unbind(1))


class _Likely:
    """The target's most probable tokens at every answer token, as draft ids with probabilities."""

    def __init__(self, network: DraftNetwork, transcript: Transcript, rows: ChainRows) -> None:
        self._target_ids = ids = network.target_ids
        draft_ids = torch.full((network.config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        draft_ids[ids] = torch.arange(len(ids), device=ids.device)
        likely = draft_ids[transcript.likely_ids.flatten(0, 1)[rows.answers]]  # [M, T], -1 where it can't be drafted
        self._ids = likely.clamp(min=0)
        self._p = transcript.likely.flatten(0, 1)[rows.answers] * (likely >= 0)

    def compare(self, read: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        """First choices (target ids) and overlaps, both [M], of what the head reads [M, J] in a step."""
        ids = self._target_ids
        parts = zip(*(torch.split(each, POSITIONS_AT_ONCE) for each in (read, self._ids, self._p)), strict=True)
        choices, overlaps = [], []
        for states, likely, p in parts:
            logits = head(states).float()  # [., Vd]
            q = (logits.gather(1, likely) - logits.logsumexp(1, keepdim=True)).exp()
            choices.append(ids[logits.argmax(-1)])
            overlaps.append(torch.minimum(q, p).sum(1))
        return torch.cat(choices), torch.cat(overlaps)


def _accepted(hits: Tensor, there: Tensor, rows: ChainRows, transcript: Transcript) -> tuple[float, ...]:
    """The share of chains that are right up to each position, without chains that the answer's end cuts off there.

    hits, there [K, M] are indexed by the token that is guessed.
    """
    steps = len(hits)
    hit = torch.zeros(steps, transcript.answers.numel(), dtype=torch.bool, device=hits.device)  # by a chain's start
    known = torch.zeros_like(hit)
    for step in range(steps):
        start = (rows.answers - step)[there[step]]
        hit[step, start], known[step, start] = hits[step][there[step]], True
    known = known & known[0]
    alive = hit.cumprod(0).bool() & known
    return tuple((alive.sum(1) / known.sum(1).clamp(min=1)).tolist())


def _blocks(answers: Tensor, rows: ChainRows) -> Tensor:
    """The block number of each answer token [M]; a block never spans two answers."""
    width = answers.shape[1]
    row = rows.answers // width
    index = answers.cumsum(1).flatten()[rows.answers + 1] - 1  # within the answer
    blocks = int(index.max()) // BLOCK + 1
    return row * blocks + index // BLOCK


@dataclass(frozen=True)
class Gain:
    """The gain of one reading over another."""

    mean: float
    """The mean difference in overlap, which is the acceptance of a draft token at temperature 1."""
    error: float
    """The standard error of `mean`."""
    greedy: float
    """The difference in the share of draft tokens that are right, given true tokens before them."""

    @property
    def z(self) -> float:
        """`mean` divided by its standard error."""
        if self.error:
            return self.mean / self.error
        return 0.0 if self.mean == 0 else inf if self.mean > 0 else -inf

    def convincing(self, tried: int, least: float = MIN_GAIN) -> bool:
        """Whether the gain of the best of `tried` readings is significant and at least `least`."""
        return self.z > needed_z(tried) and self.mean >= least and self.greedy >= 0


def needed_z(tried: int) -> float:
    """The z that the best of `tried` readings must exceed."""
    return NormalDist().inv_cdf(1 - CHANCE / max(1, tried))


def gain(other: Measurement, base: Measurement) -> Gain:
    """The gain of `other` over `base`, which were measured on the same tokens."""
    difference = (other.overlap - base.overlap).double()
    count = int(base.blocks.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=difference.device).index_add_(0, base.blocks, difference)
    sizes = torch.bincount(base.blocks, minlength=count).double()
    mean = float(difference.mean())
    real = int((sizes > 0).sum())
    spread = float((sums - mean * sizes).square().sum())
    error = sqrt(real / (real - 1) * spread) / len(difference) if real > 1 else inf
    return Gain(mean, error, float((other.right - base.right).double().mean()))
