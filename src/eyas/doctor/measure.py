"""How well a reading drafts, teacher-forced: the drafter reads the target's true states along the target's own answer.

From every position of an answer a chain is drafted; fed with the true tokens, which is what it would be fed as long as
it is right, so the greedy acceptance of a chain is exact. Beside it stands the *overlap* sum(min(p, q)) of the target's
and the drafter's distribution, which is what sampling at temperature 1 accepts: a smooth figure of the same thing,
so it tells readings apart with far fewer tokens.

Shapes: B answers, S positions, H draft hidden, K chain positions, M answer tokens, T likeliest tokens,
Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from eyas.doctor.reading import Reading
from eyas.doctor.transcript import AT_ONCE, Transcript
from eyas.drafters.network import DraftNetwork
from eyas.targets import Target
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.ttt import ChainRows, chain_rows, unrolled

BLOCK = 16
"""Answer tokens that are counted as one observation: neighbours are not independent."""


@dataclass(frozen=True)
class Measurement:
    """A reading on a transcript; token by token, so that readings can be compared in pairs."""

    accepted: tuple[float, ...]
    """By chain position, as `Stats.accepted_by_position` counts it."""
    right: Tensor  # [M] share of the chain positions whose first choice was the target's token
    overlap: Tensor  # [M] mean over the chain positions
    blocks: Tensor  # [M] int64: which tokens are neighbours

    @property
    def accept_length(self) -> float:
        """Tokens a round, the bonus token counted."""
        return 1.0 + sum(self.accepted)


@torch.inference_mode()
def measure(reading: Reading, transcript: Transcript, target: Target, length: int) -> Measurement:
    """Draft chains of `length` tokens from everywhere in the answers."""
    network = reading.network(target)
    rows = chain_rows(transcript.answers, length)
    truth = transcript.tokens.flatten()[rows.answers + 1]
    seen = _Likely(network, transcript, rows)
    right, overlap = [], []
    with fast_linears(transcript.device):
        for step, (_, normed) in enumerate(unrolled(network, transcript.tokens, transcript.states(reading.taps), rows)):
            guessed, share = seen.compare(normed[rows.guesses[step].clamp(min=0)])
            right.append(guessed == truth)
            overlap.append(share)
    there = rows.guesses[: len(right)] >= 0  # [K, M]; no answer may be as long as the chain
    hits = torch.stack(right) & there
    counted = there.sum(0)
    return Measurement(
        accepted=_accepted(hits, there, rows, transcript),
        right=hits.sum(0) / counted,
        overlap=(torch.stack(overlap) * there).sum(0) / counted,
        blocks=_blocks(transcript.answers, rows),
    )


class _Likely:
    """The target's likeliest tokens where answer tokens follow, as the draft vocabulary numbers them."""

    def __init__(self, network: DraftNetwork, transcript: Transcript, rows: ChainRows) -> None:
        self._network, ids = network, network.target_ids
        back = torch.full((network.config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        back[ids] = torch.arange(len(ids), device=ids.device)
        own = back[transcript.ids.flatten(0, 1)[rows.answers]]  # [M, T], -1 where it can't be drafted
        self._ids = own.clamp(min=0)
        self._p = transcript.likely.flatten(0, 1)[rows.answers] * (own >= 0)

    def compare(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """States that the head reads [M, H] -> first choices, as target ids, and overlap, both [M]."""
        ids = self._network.target_ids
        parts = zip(*(torch.split(each, AT_ONCE) for each in (normed, self._ids, self._p)), strict=True)
        choices, overlaps = [], []
        for states, likely, p in parts:
            logits = self._network.logits(states).float()  # [., Vd]
            q = (logits.gather(1, likely) - logits.logsumexp(1, keepdim=True)).exp()
            choices.append(ids[logits.argmax(-1)])
            overlaps.append(torch.minimum(q, p).sum(1))
        return torch.cat(choices), torch.cat(overlaps)


def _accepted(hits: Tensor, there: Tensor, rows: ChainRows, transcript: Transcript) -> tuple[float, ...]:
    """Of the chains that start within an answer: how many are right up to position i, of those that get so far.

    hits, there [K, M], by the token that is guessed.
    """
    steps = len(hits)
    hit = torch.zeros(steps, transcript.answers.numel(), dtype=torch.bool, device=hits.device)  # by where it starts
    known = torch.zeros_like(hit)
    for step in range(steps):
        start = (rows.answers - step)[there[step]]
        hit[step, start], known[step, start] = hits[step][there[step]], True
    known = known & known[0]
    alive = hit.cumprod(0).bool() & known
    return tuple((alive.sum(1) / known.sum(1).clamp(min=1)).tolist())


def _blocks(answers: Tensor, rows: ChainRows) -> Tensor:
    """[M] a number for each run of neighbouring answer tokens; no run crosses answers."""
    width = answers.shape[1]
    row = rows.answers // width
    place = answers.cumsum(1).flatten()[rows.answers + 1] - 1
    longest = int(place.max()) // BLOCK + 1
    return row * longest + place // BLOCK


# When one reading is better than another, and not by chance.
#
# Both are measured on the same answer tokens, so what counts is the difference of their overlap, token by token. Blocks
# of 16 neighbouring tokens are one observation each, as neighbours aren't independent. With the sum D_b of the
# differences and the number n_b of the tokens of each of B blocks:
#
#     gain = sum D_b / sum n_b,   error^2 = B / (B - 1) * sum (D_b - gain * n_b)^2 / (sum n_b)^2,   z = gain / error
#
# Of m readings that are tried one wins if z exceeds the normal quantile of 1 - 0.001 / m (so that all of them together
# win by chance once in a thousand drafters), its gain is at least 0.001, and its greedy acceptance isn't lower.


CHANCE = 0.001
"""How often any reading of a sound drafter may win by chance."""
LEAST_GAIN = 0.001
"""Less overlap than this is of no use, however certain it is."""
LEAST_FROM_TAPS = 0.02
"""Less overlap than this from the target's states means that a drafter doesn't understand them."""


@dataclass(frozen=True)
class Gain:
    """Of one reading over another."""

    mean: float
    """In overlap: sampling at temperature 1 accepts so much more of a draft token."""
    error: float
    """Its standard error."""
    greedy: float
    """In the share of draft tokens that are right, fed with the true ones."""

    @property
    def z(self) -> float:
        """In standard errors."""
        if self.error:
            return self.mean / self.error
        return 0.0 if self.mean == 0 else inf if self.mean > 0 else -inf

    def convincing(self, tried: int, least: float = LEAST_GAIN) -> bool:
        """Is it there, with `tried` readings to choose from?"""
        return self.z > needed(tried) and self.mean >= least and self.greedy >= 0


def needed(tried: int) -> float:
    """The z that one of `tried` readings needs."""
    return NormalDist().inv_cdf(1 - CHANCE / max(1, tried))


def gain(other: Measurement, base: Measurement) -> Gain:
    """Of `other` over `base`, on the same tokens."""
    difference = (other.overlap - base.overlap).double()
    count = int(base.blocks.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=difference.device).index_add_(0, base.blocks, difference)
    sizes = torch.bincount(base.blocks, minlength=count).double()
    mean = float(difference.mean())
    real = int((sizes > 0).sum())
    spread = float((sums - mean * sizes).square().sum())
    error = sqrt(real / (real - 1) * spread) / len(difference) if real > 1 else inf
    return Gain(mean, error, float((other.right - base.right).double().mean()))
