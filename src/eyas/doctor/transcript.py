"""The answers on which readings are measured, with the target's states and probabilities at every position.

Shapes: B answers, S positions (prompt and answer, right-padded), A taps, Ht target hidden, T most probable tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eyas.errors import RequestError
from eyas.targets import Target
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text

LIKELIEST = 64
"""Tokens of the target's distribution that are kept; they hold all but about one percent of its probability."""

POSITIONS_AT_ONCE = 512
"""Positions whose logits over the whole vocabulary are in memory at once."""


@dataclass
class Transcript:
    """The target's own answers, with its states and probabilities from another pass with teacher forcing."""

    tokens: Tensor  # [B, S]
    lengths: Tensor  # [B]
    answers: Tensor  # [B, S] bool: tokens written by the target
    likely_ids: Tensor = field(repr=False)  # [B, S, T] the most probable tokens after each position
    likely: Tensor = field(repr=False)  # [B, S, T] float32: the target's probability of each, at temperature 1
    """The target's probabilities of `likely_ids`; both are 0 where no answer token follows."""
    _states: dict[int, Tensor] = field(repr=False, default_factory=dict)  # boundary -> [B, S, Ht]
    _source: Tensor | None = None  # [B, S] int64: the flat position whose states each position gets; None = its own

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        target: Target,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        boundaries: Collection[int],
    ) -> Transcript:
        """Run the target over all answers in one pass; the states at `boundaries` are kept."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=target.device)
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64, device=target.device)
        written = torch.zeros_like(tokens, dtype=torch.bool)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            tokens[index, : len(row)] = torch.tensor(row, device=target.device)
            written[index, len(prompt) : len(row)] = True
        kept = sorted(set(boundaries))
        trace = target.trace(tokens, lengths, kept)
        ids, likely = _likeliest(target, trace.final, written)
        states = {boundary: trace.taps[:, :, i] for i, boundary in enumerate(kept)}
        return cls(tokens, lengths, written, ids, likely, states)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def answer_tokens(self) -> int:
        """The number of tokens in all answers."""
        return int(self.answers.sum())

    @property
    def most_common_share(self) -> float:
        """The share of the most common answer token, which is the acceptance of always guessing it."""
        return int(torch.bincount(self.tokens[self.answers]).max()) / self.answer_tokens

    def states(self, taps: Sequence[int]) -> Tensor:
        """The states [B, S, A, Ht] at these boundaries, as a drafter reads them at each position."""
        shown = torch.stack([self._states[tap] for tap in taps], dim=2)
        return shown if self._source is None else shown.flatten(0, 1)[self._source]

    def every(self, step: int) -> Transcript:
        """A transcript with one in `step` answers, cut to the longest of these."""
        width = int(self.lengths[::step].max())

        def cut(tensor: Tensor) -> Tensor:
            return tensor[::step, :width]

        states = {boundary: cut(tensor) for boundary, tensor in self._states.items()}
        return Transcript(
            cut(self.tokens), self.lengths[::step], cut(self.answers), cut(self.likely_ids), cut(self.likely), states
        )

    def with_other_states(self) -> Transcript:
        """The same tokens, but every position gets the states of another one, half of the text away."""
        batch, width = self.tokens.shape
        real = torch.arange(width, device=self.device) < self.lengths.unsqueeze(1)
        source = torch.arange(batch * width, device=self.device).view(batch, width)
        positions = source[real]
        source[real] = positions.roll(len(positions) // 2)
        return replace(self, _source=source)


def _likeliest(target: Target, final: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens and their probabilities [B, S, T], where an answer token follows.

    final [B, S, Ht]; written [B, S] bool is true at answer tokens.
    """
    before = torch.nn.functional.pad(written[:, 1:], (0, 1))
    top = min(LIKELIEST, target.vocab_size)
    ids = torch.zeros(*written.shape, top, dtype=torch.int64, device=final.device)
    likely = torch.zeros(*written.shape, top, dtype=torch.float32, device=final.device)
    found = [
        target.head(states).float().softmax(-1).topk(top) for states in torch.split(final[before], POSITIONS_AT_ONCE)
    ]
    ids[before] = torch.cat([each.indices for each in found])
    likely[before] = torch.cat([each.values for each in found])
    return ids, likely


PROMPTS: tuple[str, ...] = (
    "Lena sells 14 jars of honey on Saturday and twice as many on Sunday. Each jar costs $6. "
    "How much money does she earn on both days?",
    "Complete the code I provided.\n\ndef count_words(text, minimum=1):\n"
    '    """Return a dictionary that maps each word of text to the number of times it occurs,\n'
    '    leaving out words that occur fewer than minimum times.\n    """\n',
    "A bus has 48 seats. A third of them are taken at the first stop and 9 more at the second. "
    "How many seats are still free?",
    "Complete the code I provided.\n\ndef read_lines(path, encoding='utf-8'):\n"
    '    """Read a text file and return the list of its lines without the line ends."""\n',
    "What does `shutil.copytree` do?",
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
"""The prompts: short tasks of many kinds, written for the doctor; none is part of an evaluation set."""


def encode_prompts(tokenizer: Any, longest: int | None) -> list[tuple[int, ...]]:
    """The prompts of fewer than `longest` tokens, as chats if the tokenizer has a template, else as plain text.

    Raises RequestError if all are longer.
    """
    encoded = [_encode(tokenizer, text) for text in PROMPTS]
    fitting = [prompt for prompt in encoded if longest is None or len(prompt) < longest]
    if not fitting:
        raise RequestError(f"the target's context of {longest} tokens is too short for the doctor's prompts")
    return fitting


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [Message(role="user", content=text)])
    return encode_text(tokenizer, text)
