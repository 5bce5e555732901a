"""Bad words: sequences of tokens that an answer must not contain. The last token of one is ruled out after the others.

Shapes: S slots, B rows, K sequences, L tokens of the longest, V vocabulary. Shorter sequences are aligned right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_NONE, _ANY = -1, -2
"""In the tables: no token, which equals none; and whatever comes before a sequence."""


class BadWords:
    """The bad words of every slot, and the last tokens of its answer, on the device; longer ones make both wider."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._words = torch.full((slots, 0, 1), _NONE, device=device)  # [S, K, L]
        self.recent = torch.full((slots, 0), _NONE, device=device)
        """[S, L - 1] the last answer tokens of every slot."""

    def write(self, slot: int, words: Sequence[Sequence[int]], emitted: Sequence[int]) -> None:
        """Give a slot its words, none or more, and the answer that it `emitted` so far."""
        _, count, width = self._words.shape
        wider, more = max(0, max(map(len, words), default=1) - width), max(0, len(words) - count)
        self._words = F.pad(F.pad(self._words, (wider, 0), value=_ANY), (0, 0, 0, more), value=_NONE)
        self.recent = F.pad(self.recent, (wider, 0), value=_NONE)
        width += wider
        rows = [[*[_ANY] * (width - len(word)), *word] for word in words]
        rows += [[_NONE] * width] * (self._words.shape[1] - len(words))
        recent = [*[_NONE] * (width - 1), *emitted][len(emitted) :]
        self._words[slot] = torch.tensor(rows, dtype=torch.int64, device=self._words.device)
        self.recent[slot] = torch.tensor(recent, dtype=torch.int64, device=self._words.device)

    def move(self, source: int, target: int) -> None:
        """Copy the words and tokens of slot `source` to slot `target`."""
        self._words[target] = self._words[source]
        self.recent[target] = self.recent[source]

    def banned(self, rows: slice, recent: Tensor, vocab_size: int) -> Tensor:
        """[B, V] bool: the tokens that would complete a bad word after the `recent` ones [B, L - 1]."""
        words = self._words[rows]
        before, last = words[..., :-1], words[..., -1]
        complete = ((before == recent.unsqueeze(1)) | (before == _ANY)).all(dim=-1) & (last != _NONE)  # [B, K]
        table = torch.zeros(len(words), vocab_size + 1, dtype=torch.bool, device=words.device)
        return table.scatter_(1, torch.where(complete, last, vocab_size), True)[:, :vocab_size]


def appended(recent: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """The `recent` tokens [B, L - 1] after the first `counts` [B] of `tokens` [B, N] were appended."""
    kept = torch.arange(recent.shape[1], device=recent.device) + counts.unsqueeze(1)
    return torch.cat((recent, tokens), dim=1).gather(1, kept)
