"""Standard speculative sampling's drafter (arXiv 2211.17192, 2302.01318): a smaller language model that guesses.

It is a `Target` of its own: native passes, ragged rows and all. A slot's tokens are read before its
next draft, whether they were observed or deferred; what was read stays in the model's slot cache. With another
vocabulary than the target's the model reads the same text, token by token, in its own (`SharedVocabulary`).

Shapes: R rows (a contiguous range of slots), W frontier nodes, K children offered by each, V the model's vocabulary,
Vd the tokens among them that can be drafted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafters.decoding import best_children
from eyas.drafters.history import HistoryDrafter
from eyas.drafters.small_lm.vocabulary import SharedVocabulary
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.targets.levels import StagedLevels
from eyas.targets.slots import Saved
from eyas.tree import DraftTree, Frontier, TreeSpec
from eyas.verify import Coupling

_TOGETHER = 64
"""A row with more unread tokens, such as a prompt, is read by itself: it would widen the other rows' pass."""


class SavedReading(NamedTuple):
    """The tokens of pairs that were copied out of a slot, and the columns of those that the model has read."""

    tokens: list[int]
    read: int
    """How many of the pairs, from the first, have columns: those of the token that each pair begins with."""
    columns: Saved

    @property
    def unread(self) -> int:
        """How many pairs, from the end, have none."""
        return len(self.tokens) - self.read


class _Texts:
    """Each slot's tokens as the model reads them: itself, or in the words of its own vocabulary."""

    def __init__(self, slots: int, shared: SharedVocabulary | None) -> None:
        self._shared = shared
        self.of: list[list[int]] = [[] for _ in range(slots)]
        self._stops: list[list[int]] = [[] for _ in range(slots)]
        """For each of a slot's tokens the length of the text up to its end."""

    def reshape(self, slots: int) -> None:
        """Change the number of slots: texts of those that stay are kept."""
        more = range(slots - len(self.of))
        self.of = [*self.of[:slots], *([] for _ in more)]
        self._stops = [*self._stops[:slots], *([] for _ in more)]

    def cut(self, slot: int, tokens: int) -> None:
        """Keep the text of a slot's first tokens only."""
        del self._stops[slot][tokens:]
        del self.of[slot][self.end(slot, tokens) :]

    def end(self, slot: int, tokens: int) -> int:
        """The length of the text of a slot's first tokens, as far as it is written."""
        count = min(tokens, len(self._stops[slot]))
        return self._stops[slot][count - 1] if count else 0

    def tokens_in(self, slot: int, length: int) -> int:
        """How many of a slot's tokens lie in the first part of its text."""
        return bisect_right(self._stops[slot], length)

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Bring a slot's text up to the last of its tokens."""
        text, stops = self.of[slot], self._stops[slot]
        for token in tokens[len(stops) :]:
            text += (token,) if self._shared is None else self._shared.read(token)
            stops.append(len(text))

    def move(self, source: int, target: int) -> None:
        """Move a slot's text to another."""
        self.of[target], self._stops[target] = self.of[source], self._stops[source]
        self.of[source], self._stops[source] = [], []


class SmallLmDrafter(HistoryDrafter):
    """A language model that drafts for a larger one."""

    draws = True

    def __init__(self, model: Target, shared: SharedVocabulary | None = None) -> None:
        """Draft with `model`; `shared` maps its vocabulary, None if it is the target's own. There are no slots yet."""
        self.model, self.shared = model, shared
        self._ids = torch.arange(model.vocab_size, device=model.device) if shared is None else shared.target_ids
        self.max_fanout = len(self._ids)
        super().__init__(model.device)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._cache = self.model.allocate(slots)
        self._texts = _Texts(slots, self.shared)

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self._cache.reshape(slots, columns)
        self._texts.reshape(slots)

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:
        super().begin(slot, prompt, owner)
        self._cut(slot, 0)

    def unread(self, slot: int) -> int:
        return max(0, self.length(slot) - self._read_tokens(slot))

    def save(self, slot: int, start: int, stop: int) -> SavedReading:
        between = min(max(self._read_tokens(slot), start), stop)
        columns = self._cache.copy_out(slot, self._texts.end(slot, start), self._texts.end(slot, between))
        return SavedReading(self._tokens[slot][start + 1 : stop + 1], between - start, columns)

    def load(self, slot: int, saved: SavedReading, count: int) -> None:
        start, read = self.length(slot), min(count, saved.read)
        self._tokens[slot] += saved.tokens[:count]
        if read:
            self._texts.write(slot, self._tokens[slot])
            if self._read_tokens(slot) < start:
                raise UsageError("pairs that were read can't follow unread ones")
            first = self._texts.end(slot, start)
            self._cache.truncate(slot, first)
            self._cache.copy_in(slot, saved.columns, self._texts.end(slot, start + read) - first)

    @torch.inference_mode()
    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else drafting
        grown = [want and self._can_read(slot) for want, slot in zip(wanted, rows, strict=True)]
        if not any(grown):
            return DraftTree.empty(len(rows), self._device)
        logits = self._read(rows, grown)
        growth = spec.start(len(rows), self._device, None if all(grown) else grown)
        levels, native = StagedLevels(self.model, self._cache, rows), self.model.native is not None
        for level in range(spec.depth):
            if self.shared is not None:
                logits = logits.index_select(2, self.shared.draft_ids)
            frontier = growth.expand(*best_children(logits, growth.fanout, coupling, level, self._ids, native))
            if frontier is None:
                break
            own = frontier.tokens if self.shared is None else self.shared.own_ids[frontier.tokens]
            logits = levels.add(Frontier(own, frontier.parents))
        return growth.tree()

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._cut(slot, len(self._tokens[slot]))

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._texts.move(source, target)
        self._cache.move(source, target)

    def _cut(self, slot: int, tokens: int) -> None:
        """Keep the text of a slot's first tokens only, and what was read of it."""
        self._texts.cut(slot, tokens)
        self._cache.truncate(slot, len(self._texts.of[slot]))

    def _read_tokens(self, slot: int) -> int:
        """How many of a slot's tokens the model has read."""
        return self._texts.tokens_in(slot, self._cache.length(slot))

    def _can_read(self, slot: int) -> bool:
        """Whether a slot's text is there, and fits the model's context."""
        self._texts.write(slot, self._tokens[slot])
        longest = self.model.max_length
        return bool(self._texts.of[slot]) and (longest is None or len(self._texts.of[slot]) < longest)

    def _read(self, rows: range, wanted: Sequence[bool]) -> Tensor:
        """Read all that the `wanted` rows [R] have not read yet; returns the logits [R, 1, V] of what follows."""
        unread: list[list[int]] = []
        for slot, want in zip(rows, wanted, strict=True):
            if not want:
                unread.append([])
                continue
            text = self._texts.of[slot]
            self._cache.truncate(slot, len(text) - 1)  # the last one's logits are needed
            rest = text[self._cache.length(slot) :]
            if len(rest) > _TOGETHER:
                for _ in self.model.prefill(self._cache, range(slot, slot + 1), [rest], ()):
                    pass  # all but the last one
                rest = rest[-1:]
            unread.append(rest)
        # the token after those of a chunk isn't read: here it isn't known
        chunk = self.model.prefill_chunk(self._cache, rows, [[*rest, 0] for rest in unread], ())
        last = torch.tensor([max(0, len(rest) - 1) for rest in unread], device=self._device)
        steps = torch.arange(len(rows), device=self._device)
        return self.model.head(chunk.final[steps, last]).unsqueeze(1)
