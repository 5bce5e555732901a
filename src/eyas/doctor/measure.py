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

import torch
from torch import Tensor

from eyas.doctor.reading import Reading
from eyas.doctor.transcript import AT_ONCE, Transcript
from eyas.drafters.network import DraftNetwork
from eyas.target import Target
from eyas.train.chain_rows import ChainRows, chain_rows
from eyas.train.cpu_linear import fast_linears
from eyas.train.ttt import unrolled

BLOCK = 16
"""Answer tokens that are counted as one observation: neighbours are not independent."""


@dataclass(frozen=True)
class Measured:
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
def measure(reading: Reading, transcript: Transcript, target: Target, length: int) -> Measured:
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
    return Measured(
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
