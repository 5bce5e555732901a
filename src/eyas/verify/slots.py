"""What the sampler remembers of each slot, on the device.

Shapes: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Slots:
    """Small columns always there, [S, V] tables made when the first request needs them."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.token_ids = torch.arange(vocab_size, device=device)  # [V]
        self.seed = column(torch.int64)
        self.position = column(torch.int64)
        """Index, in the whole sequence, of the next token to be sampled."""
        self.generated = column(torch.int64)
        """Answer tokens so far."""
        self.min_tokens = column(torch.int64)
        self.top_k = column(torch.int64)
        self.divisor = column(torch.float32)
        """The temperature; 1 for greedy rows."""
        self.noise_scale = column(torch.float32)
        """1 for sampled rows, 0 for greedy ones."""
        self.top_p_cut = column(torch.float32)
        self.min_p = column(torch.float32)
        self.repetition = column(torch.float32)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)

        self.bias: Tensor | None = None  # [S, V] float32
        self.stops: Tensor | None = None  # [S, V] bool
        self.prompt: Tensor | None = None  # [S, V] bool: the token is in the prompt
        self.counts: Tensor | None = None  # [S, V] int32: occurrences in the answer

    @property
    def vocab_size(self) -> int:
        return self.token_ids.shape[0]

    def write(self, slot: int, values: Mapping[str, int | float]) -> None:
        """Set `slot` of each named column."""
        for name, value in values.items():
            getattr(self, name)[slot] = value

    def write_table(self, name: str, slot: int, ids: list[int], values: list[float] | float) -> None:
        """Make `slot`'s row zero but for `values` at token `ids`. No table is made for no ids."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            if not ids:
                return
            table = self.make_table(name)
        table[slot] = 0
        if ids:
            index = torch.tensor(ids, device=table.device)
            table[slot, index] = torch.tensor(values, dtype=table.dtype, device=table.device)

    def make_table(self, name: str) -> Tensor:
        """The table, allocated if it wasn't."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            dtype = {"bias": torch.float32, "counts": torch.int32}.get(name, torch.bool)
            table = torch.zeros(self.seed.shape[0], self.vocab_size, dtype=dtype, device=self.seed.device)
            setattr(self, name, table)
        return table

    def move(self, source: int, target: int) -> None:
        """Copy one slot's state over another's."""
        for value in vars(self).values():
            if value is not None and value is not self.token_ids:
                value[target] = value[source]
