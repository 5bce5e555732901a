"""What the target wrote and what it knew while writing: the ground on which every reading is measured.

Shapes: B answers, S positions (prompt and answer, right-padded), A taps, Ht target hidden, T likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eyas.assets import PROMPTS as DEMO
from eyas.errors import RequestError
from eyas.targets import Target
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text

LIKELIEST = 64
"""Of the target's distribution so many tokens are kept: all but a percent or so of its mass, in any vocabulary."""

AT_ONCE = 512
"""Positions whose logits over the whole vocabulary are in memory."""


@dataclass
class Transcript:
    """Answers of the target's own, teacher-forced through it once more."""

    tokens: Tensor  # [B, S]
    lengths: Tensor  # [B]
    answers: Tensor  # [B, S] bool: the tokens the target wrote
    ids: Tensor = field(
        repr=False
    )  # [B, S, T] the likeliest tokens after each position; 0 where no answer token follows
    likely: Tensor = field(repr=False)  # [B, S, T] float32: the target's probability of each, at temperature 1
    _states: dict[int, Tensor] = field(repr=False, default_factory=dict)  # boundary -> [B, S, Ht]
    _from: Tensor | None = None  # [B, S] int64: whose states a position is shown instead of its own

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        target: Target,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        boundaries: Collection[int],
    ) -> Transcript:
        """One pass over all answers; the states at `boundaries` are kept."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=target.device)
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64, device=target.device)
        written = torch.zeros_like(tokens, dtype=torch.bool)
        for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            tokens[at, : len(row)] = torch.tensor(row, device=target.device)
            written[at, len(prompt) : len(row)] = True
        kept = sorted(set(boundaries))
        trace = target.trace(tokens, lengths, kept)
        ids, likely = _likeliest(target, trace.final, written)
        states = {boundary: trace.taps[:, :, i] for i, boundary in enumerate(kept)}
        return cls(tokens, lengths, written, ids, likely, states)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def count(self) -> int:
        """Answer tokens."""
        return int(self.answers.sum())

    @property
    def commonest(self) -> float:
        """Share of the commonest answer token: how often one is right who always guesses that."""
        return int(torch.bincount(self.tokens[self.answers]).max()) / self.count

    def states(self, taps: Sequence[int]) -> Tensor:
        """[B, S, A, Ht]"""
        shown = torch.stack([self._states[tap] for tap in taps], dim=2)
        return shown if self._from is None else shown.flatten(0, 1)[self._from]

    def part(self, every: int) -> Transcript:
        """Every so-manieth answer alone, cut to the longest of them."""
        width = int(self.lengths[::every].max())

        def cut(tensor: Tensor) -> Tensor:
            return tensor[::every, :width]

        states = {boundary: cut(tensor) for boundary, tensor in self._states.items()}
        return Transcript(
            cut(self.tokens), self.lengths[::every], cut(self.answers), cut(self.ids), cut(self.likely), states
        )

    def elsewhere(self) -> Transcript:
        """The same tokens, but every position is shown the states of another one, half of the text away."""
        batch, width = self.tokens.shape
        real = torch.arange(width, device=self.device) < self.lengths.unsqueeze(1)
        source = torch.arange(batch * width, device=self.device).view(batch, width)
        here = source[real]
        source[real] = here.roll(len(here) // 2)
        return replace(self, _from=source)


def _likeliest(target: Target, final: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and probabilities [B, S, T] wherever an answer token follows; final [B, S, Ht], written [B, S]."""
    before = torch.nn.functional.pad(written[:, 1:], (0, 1))
    top = min(LIKELIEST, target.vocab_size)
    ids = torch.zeros(*written.shape, top, dtype=torch.int64, device=final.device)
    likely = torch.zeros(*written.shape, top, dtype=torch.float32, device=final.device)
    found = [target.head(states).float().softmax(-1).topk(top) for states in torch.split(final[before], AT_ONCE)]
    ids[before] = torch.cat([each.indices for each in found])
    likely[before] = torch.cat([each.values for each in found])
    return ids, likely


# What the doctor asks: short tasks of many sorts, written for it; none is part of an evaluation set.


PROMPTS: tuple[str, ...] = (
    *(text for _, text in DEMO),
    "Tom has 3 boxes with 12 pencils each. He gives 7 pencils away. How many are left?",
    "Write a short story about a lighthouse.",
    "Write a Python function that returns the prime numbers below n.",
    "What does `os.path.join` do?",
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours?",
    "List three ways to save water at home.",
    "Complete the code I provided.\n\ndef merge(first, second):\n"
    '    """Merge two sorted lists into one sorted list.\n    """\n',
    "Explain in two sentences why the sky is blue.",
    "Sara bakes 5 trays of 8 cookies and sells each cookie for $2. How much does she earn?",
    "What is the capital of France, and what is it known for?",
    "Explain what a hash table is to someone who has never programmed.",
    "A shop sells apples at $3 a kilo. How much do 4 kilos and a bag for $1 cost?",
    "Describe a walk through a market in the early morning.",
    "What does `json.dumps` do?",
    "Complete the code I provided.\n\ndef flatten(items):\n"
    '    """Return one list with the elements of a list of lists.\n    """\n',
    "Write a polite email that asks for a meeting next week.",
    "Anna reads 18 pages a day. How many pages does she read in two weeks?",
    "Translate 'good morning' into French, Spanish and German.",
    "Give me a simple recipe for pancakes.",
)


def encode_prompts(tokenizer: Any, longest: int | None) -> list[tuple[int, ...]]:
    """Every prompt shorter than `longest` tokens: as a chat where the tokenizer has a template, else as plain text.

    Raises RequestError if none is.
    """
    encoded = [_encode(tokenizer, text) for text in PROMPTS]
    fitting = [prompt for prompt in encoded if longest is None or len(prompt) < longest]
    if not fitting:
        raise RequestError(f"the target's context holds {longest} tokens: too few for any of the doctor's prompts")
    return fitting


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [Message(role="user", content=text)])
    return encode_text(tokenizer, text)
