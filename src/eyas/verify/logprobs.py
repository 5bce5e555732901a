"""Log-probabilities of emitted tokens, and of prompts, under the target's own distribution.

They are the log-softmax of its unmodified logits: no bias, penalty, grammar, temperature or filter. Speculation
changes them only by rounding, where sums are split differently.

Shapes: R rows of the round, A of them with log-probabilities, S = D + 1 tokens that a round emits at most, K
alternatives, V vocabulary, P positions of a prompt, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.runtime import to_device
from eyas.targets import Target
from eyas.tree import NodeLogits
from eyas.types import PromptLogprobs, TokenLogprobs
from eyas.verify.walk import Walk

_MAX_LOGITS = 1 << 22
"""Maximum number of logits of a prompt to compute together; for all positions they would take gigabytes."""


@dataclass(frozen=True)
class EmittedLogprobs:
    """A round's log-probabilities on the device, to be fetched together with the rest of its results."""

    wanted: Mapping[int, int]
    """Row -> number of requested alternatives."""
    values: Tensor  # [A, S, 1 + K] float32: of the emitted token, then of the alternatives
    ids: Tensor  # [A, S, K] token ids of the alternatives

    @staticmethod
    def of(logits: NodeLogits, walk: Walk, wanted: Mapping[int, int]) -> EmittedLogprobs:
        """Compute them for a walk's tokens from the target's `logits`; `wanted` as in the attribute."""
        rows = to_device(list(wanted), walk.path.device)  # [A]
        most = max(wanted.values())
        values, ids = [], []
        for nodes, tokens in zip(walk.path[rows].unbind(1), walk.tokens[rows].unbind(1), strict=True):
            raw = logits.rows[logits.index[rows, nodes]].to(torch.float32)  # [A, V]
            scores, alternatives = _scores(raw, tokens.clamp(min=0), most)
            values.append(scores)
            ids.append(alternatives)
        return EmittedLogprobs(wanted, torch.stack(values, dim=1), torch.stack(ids, dim=1))

    def flat(self) -> Tensor:
        """Values and ids as one int64 tensor [A * S * (1 + 2 K)], floats as their bits, for `read` on the host."""
        bits = self.values.contiguous().view(torch.int32).to(torch.int64)
        return torch.cat((bits, self.ids), dim=2).flatten()

    def read(self, flat: Tensor, tokens: Sequence[Sequence[int]]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Row -> log-probabilities of its `tokens` [R][<= S], from the fetched tensor `flat`."""
        rows, steps, width = self.values.shape
        table = flat.view(rows, steps, 2 * width - 1)
        values = table[..., :width].to(torch.int32).view(torch.float32).tolist()
        ids = table[..., width:].tolist()
        found = {}
        for (row, count), row_values, row_ids in zip(self.wanted.items(), values, ids, strict=True):
            found[row] = tuple(
                TokenLogprobs(token, value[0], tuple(zip(top[:count], value[1 : 1 + count], strict=True)))
                for token, value, top in zip(tokens[row], row_values, row_ids, strict=False)
            )
        return found


def prompt_logprobs(target: Target, final: Tensor, following: Tensor, alternatives: int) -> list[PromptLogprobs]:
    """Log-probabilities of the tokens `following` [P] the positions whose `final` states [P, Ht] are given.

    The target's head runs over a few positions at a time, so memory doesn't grow with the prompt. The head must be
    exact (`head_is_exact`).
    """
    found: list[PromptLogprobs] = []
    size = max(1, _MAX_LOGITS // target.vocab_size)
    for states, tokens in zip(torch.split(final, size), torch.split(following, size), strict=True):
        raw = target.head(states).to(torch.float32)  # [<= P, V]
        values, ids = _scores(raw, tokens, alternatives)
        ranks = (raw > raw.gather(1, tokens.unsqueeze(1))).sum(dim=-1) + 1
        for token, rank, (own, *others), top in zip(*map(Tensor.tolist, (tokens, ranks, values, ids)), strict=True):
            found.append(PromptLogprobs(token, own, tuple(zip(top, others, strict=True)), rank))
    return found


def _scores(raw: Tensor, tokens: Tensor, alternatives: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [P, 1 + K] of `tokens` [P] and of the K most probable tokens, and the ids of those [P, K]."""
    top = raw.topk(alternatives, dim=-1)
    chosen = torch.cat((raw.gather(1, tokens.unsqueeze(1)), top.values), dim=1)
    return chosen - raw.logsumexp(dim=-1, keepdim=True), top.indices
