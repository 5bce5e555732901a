"""A reading at work: the engine's own rounds over the doctor's prompts. Answers are the target's, whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.doctor.reading import Reading
from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.target import Target
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams, Stats


@dataclass(frozen=True)
class Decoded:
    """Greedy answers with chains."""

    stats: Stats
    answers: list[list[int]]


def decode(
    reading: Reading, target: Target, tokenizer: Any, prompts: Sequence[tuple[int, ...]], length: int, max_tokens: int
) -> Decoded:
    """Answer all prompts together, chains of `length` tokens."""
    drafter = NetworkDrafter(reading.network(target), reading.taps)
    engine = Engine(target, tokenizer, Speculation(drafter, parse_tree(f"chain:{length}")), batch_size=len(prompts))
    params = SamplingParams(max_tokens=max_tokens)
    stats, answers = Stats(), []
    for completion in engine.generate([Request(prompt, params) for prompt in prompts]):
        stats.merge(completion.stats)
        answers.append(list(completion.token_ids))
    target.resize(0)  # what follows needs the memory
    return Decoded(stats, answers)
