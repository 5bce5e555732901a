"""Log-probabilities of emitted tokens under the target's own distribution.

They are the log-softmax of its unmodified logits: no bias, penalty, grammar, temperature or filter. Speculation
changes them only by the rounding of sums that are split differently.

Shapes: R rows of the round, A of them that want log-probabilities, S = D + 1 tokens a round emits at most, K
alternatives, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.runtime import to_device
from eyas.tree import NodeLogits
from eyas.types import TokenLogprobs
from eyas.verify.walk import Walk


@dataclass(frozen=True)
class EmittedLogprobs:
    """A round's log-probabilities on the device, to be fetched together with the rest of the round's outcome."""

    wanted: Mapping[int, int]
    """Row -> number of alternatives it wants."""
    values: Tensor  # [A, S, 1 + K] float32: of the emitted token, then of the alternatives
    ids: Tensor  # [A, S, K] token ids of the alternatives

    @staticmethod
    def of(logits: NodeLogits, walk: Walk, wanted: Mapping[int, int]) -> EmittedLogprobs:
        """Those of a walk's tokens, from the target's `logits`; `wanted` is as the attribute."""
        rows = to_device(list(wanted), walk.path.device)  # [A]
        most = max(wanted.values())
        values, ids = [], []
        for nodes, tokens in zip(walk.path[rows].unbind(1), walk.tokens[rows].unbind(1), strict=True):
            raw = logits.rows[logits.index[rows, nodes]].to(torch.float32)  # [A, V]
            top = raw.topk(most, dim=-1)
            emitted = raw.gather(1, tokens.clamp(min=0).unsqueeze(1))
            values.append(torch.cat((emitted, top.values), dim=1) - raw.logsumexp(dim=-1, keepdim=True))
            ids.append(top.indices)
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
