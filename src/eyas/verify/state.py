"""The sampling state of every slot, on the device, and which steps of sampling its request needs.

Shapes: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.types import SamplingParams


class SamplingState:
    """A column [S] for each number; tables [S, V] are allocated when the first request needs them."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.token_ids = torch.arange(vocab_size, device=device)  # [V]
        self.seed = column(torch.int64)
        self.position = column(torch.int64)
        """Index of the next token to be sampled in the whole sequence, prompt included."""
        self.generated = column(torch.int64)
        """Number of answer tokens so far."""
        self.min_tokens = column(torch.int64)
        self.top_k = column(torch.int64)
        self.divisor = column(torch.float32)
        """The temperature of sampled rows; 1 for greedy ones."""
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
        """Set the values of `slot` in the named columns."""
        for name, value in values.items():
            getattr(self, name)[slot] = value

    def write_table(self, name: str, slot: int, ids: list[int], values: list[float] | float) -> None:
        """Set `slot`'s row of a table to `values` at token `ids` and zero elsewhere; no ids allocate no table."""
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
        """The named table, allocated on first use."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            dtype = {"bias": torch.float32, "counts": torch.int32}.get(name, torch.bool)
            table = torch.zeros(self.seed.shape[0], self.vocab_size, dtype=dtype, device=self.seed.device)
            setattr(self, name, table)
        return table

    def move(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        for value in vars(self).values():
            if value is not None and value is not self.token_ids:
                value[target] = value[source]


GREEDY_BELOW = 1e-5
"""Lower temperatures count as greedy (vLLM's limit): logits divided by them would swamp the noise."""


@dataclass(frozen=True)
class Needs:
    """Which steps of sampling a request or a batch needs, known on the host; steps that no row needs are skipped."""

    noise: bool = False
    temperature: bool = False
    bias: bool = False
    repetition: bool = False
    counts: bool = False
    min_tokens: bool = False
    top_k: int = 0
    """The greatest k of the batch; 0 = the step isn't needed."""
    top_p: bool = False
    min_p: bool = False
    grammar: bool = False

    @staticmethod
    def of(params: SamplingParams, has_stops: bool, vocab_size: int, has_grammar: bool = False) -> Needs:
        """The steps that make a difference for these parameters; filters make none for a greedy row."""
        noise = params.temperature >= GREEDY_BELOW
        return Needs(
            noise=noise,
            temperature=noise and params.temperature != 1.0,
            bias=bool(params.logit_bias),
            repetition=params.repetition_penalty != 1.0,
            counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
            min_tokens=has_stops and params.min_tokens > 0,
            top_k=params.top_k if noise and params.top_k < vocab_size else 0,
            top_p=noise and params.top_p < 1.0,
            min_p=noise and params.min_p > 0.0,
            grammar=has_grammar,
        )

    @staticmethod
    def union(needs: Iterable[Needs]) -> Needs:
        """The steps that any request of a batch needs."""
        flags: dict[str, int] = {}
        for each in needs:
            for name, value in vars(each).items():
                flags[name] = max(flags.get(name, 0), value)
        top_k = flags.pop("top_k", 0)
        return Needs(top_k=top_k, **{name: bool(value) for name, value in flags.items()})

    @property
    def history(self) -> bool:
        """Whether a token's choice depends on the tokens before it (penalties)."""
        return self.repetition or self.counts

    @property
    def plain(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self == Needs()
