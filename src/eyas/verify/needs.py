"""Which steps of sampling a request needs, known on the host: what nobody in a batch needs is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eyas.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy (vLLM's limit): logits divided by them leave no room for the noise."""


@dataclass(frozen=True)
class Needs:
    """One flag a step; `top_k` is the greatest k, 0 = nobody asks."""

    noise: bool = False
    temperature: bool = False
    bias: bool = False
    repetition: bool = False
    counts: bool = False
    min_tokens: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    grammar: bool = False

    @staticmethod
    def of(params: SamplingParams, has_stops: bool, vocab_size: int, has_grammar: bool = False) -> Needs:
        """The steps that change anything for these parameters; filters change nothing for a greedy row."""
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
        """What a batch needs."""
        flags: dict[str, int] = {}
        for each in needs:
            for name, value in vars(each).items():
                flags[name] = max(flags.get(name, 0), value)
        top_k = flags.pop("top_k", 0)
        return Needs(top_k=top_k, **{name: bool(value) for name, value in flags.items()})

    @property
    def history(self) -> bool:
        """Does a token's choice depend on which tokens came before it?"""
        return self.repetition or self.counts

    @property
    def plain(self) -> bool:
        """Is the choice the argmax of the raw logits?"""
        return self == Needs()
