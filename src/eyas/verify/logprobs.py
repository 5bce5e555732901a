"""Log-probabilities of emitted tokens under the target's own distribution.

They are the log-softmax of its unmodified logits: no bias, penalty, grammar, temperature or filter. Speculation
changes them as little as it changes the logits, by the rounding of sums that are split differently.

Shapes: A rows that ask, S = D + 1 tokens a round emits at most, K alternatives, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.tree import NodeLogits
from eyas.types import TokenLogprobs
from eyas.verify.walk import Walk


@dataclass(frozen=True)
class EmittedLogprobs:
    """A round's log-probabilities on the device, to be moved with what else the host is told."""

    wanted: Mapping[int, int]
    """The rows that ask, and for how many alternatives."""
    values: Tensor  # [A, S, 1 + K] float32: the emitted token's, the alternatives'
    ids: Tensor  # [A, S, K] the alternatives

    @staticmethod
    def of(logits: NodeLogits, walk: Walk, wanted: Mapping[int, int]) -> EmittedLogprobs:
        """Of the tokens of a walk, from the target's own logits; one place of each asking row at a time."""
        rows = torch.tensor(list(wanted), device=walk.path.device)  # [A]
        most = max(wanted.values())
        values, ids = [], []
        for places, tokens in zip(walk.path[rows].unbind(1), walk.tokens[rows].unbind(1), strict=True):
            raw = logits.rows[logits.index[rows, places]].to(torch.float32)  # [A, V]
            top = raw.topk(most, dim=-1)
            emitted = raw.gather(1, tokens.clamp(min=0).unsqueeze(1))
            values.append(torch.cat((emitted, top.values), dim=1) - raw.logsumexp(dim=-1, keepdim=True))
            ids.append(top.indices)
        return EmittedLogprobs(wanted, torch.stack(values, dim=1), torch.stack(ids, dim=1))

    def pack(self) -> Tensor:
        """[A * S * (1 + 2 K)] int64, the floats' bits among them: what `read` takes."""
        bits = self.values.contiguous().view(torch.int32).to(torch.int64)
        return torch.cat((bits, self.ids), dim=2).flatten()

    def read(self, packed: Tensor, tokens: Sequence[Sequence[int]]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """On the host: for each asking row one entry a token of `tokens` [R][<= S]."""
        asking, steps, width = self.values.shape
        table = packed.view(asking, steps, 2 * width - 1)
        values = table[..., :width].to(torch.int32).view(torch.float32).tolist()
        ids = table[..., width:].tolist()
        found = {}
        for (row, count), row_values, row_ids in zip(self.wanted.items(), values, ids, strict=True):
            found[row] = tuple(
                TokenLogprobs(token, value[0], tuple(zip(top[:count], value[1 : 1 + count], strict=True)))
                for token, value, top in zip(tokens[row], row_values, row_ids, strict=False)
            )
        return found
