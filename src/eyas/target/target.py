"""The target: a stock transformers decoder LM that prefills, verifies draft trees and commits paths.

Shapes: R rows (a contiguous range of slots), Q columns, N tree nodes, A taps, Ht hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import RequestError, UnsupportedModelError
from eyas.target import masks
from eyas.target.architecture import (
    attention_plan,
    context_limit,
    decoder_layers,
    logit_finish,
    refuse_unsupported,
)  # fmt: skip
from eyas.target.slots import SlotCache
from eyas.target.staged import ShapeProbe, StagedCache
from eyas.target.taps import caught_taps, stack
from eyas.tree import DraftTree


class Verified(NamedTuple):
    """What one verification pass yields."""

    logits: Tensor  # [R, 1 + N, V]
    taps: Tensor  # [R, 1 + N, A, Ht]


class PrefillChunk(NamedTuple):
    """A prefilled and committed piece of some prompts."""

    next_tokens: Tensor  # [R, Q] the token *after* each position of the piece
    taps: Tensor  # [R, Q, A, Ht]
    counts: list[int]
    """How many of the Q positions are real, for each row."""


class Trace(NamedTuple):
    """Teacher-forced states for training."""

    taps: Tensor  # [B, S, A, Ht]
    final: Tensor  # [B, S, Ht], after the final norm: what the head reads


@dataclass
class Target:
    """A model, its tokenizer-independent limits, and the slots of its cache."""

    model: Any
    cache_slots: int = 0

    def __post_init__(self) -> None:
        refuse_unsupported(type(self.model), self.model.config)
        self.config = self.model.config.get_text_config()
        head = self.model.get_output_embeddings()
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        self.max_length = context_limit(self.config)
        self.layers = decoder_layers(self.model, self.num_layers)
        self._plan = attention_plan(self.config)
        self._finish = logit_finish(self.config)
        self._probe()
        self.cache: SlotCache = SlotCache(self._shapes, self.cache_slots, self.dtype, self.device)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run one token to learn what each layer caches and whether `head` reproduces the model's logits."""
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        token = zero + self.vocab_size // 2  # an ordinary one: a padding token's state is all zeros, as are its logits
        mask = self._masks(zero[0], 0, zero[:, :, None] == 0, zero)
        out = self.model(
            input_ids=token, attention_mask=mask, position_ids=zero, past_key_values=probe, use_cache=True,
            output_hidden_states=False,
        )  # fmt: skip
        if sorted(probe.shapes) != list(range(self.num_layers)):
            raise UnsupportedModelError(
                f"{self.config.model_type}: only {len(probe.shapes)} of {self.num_layers} layers use the key-value "
                "cache; a state kept elsewhere can't be rolled back after a rejected guess"
            )
        self._shapes = [probe.shapes[i] for i in range(self.num_layers)]
        final = self.model.base_model(input_ids=token, attention_mask=mask, position_ids=zero, use_cache=False)[0]
        self._head_is_exact = torch.allclose(
            self._finish(self.model.get_output_embeddings()(final)).float(), out.logits.float(), rtol=1e-3, atol=1e-4
        )

    @property
    def slots(self) -> int:
        """Sequences the cache holds."""
        return self.cache.slots

    def resize(self, slots: int) -> None:
        """Start over with an empty cache of `slots` slots."""
        self.cache = SlotCache(self._shapes, slots, self.dtype, self.device)

    def reshape(self, slots: int, columns: int) -> None:
        """Let the cache be `slots` x `columns`, keeping what lies in both."""
        self.cache.reshape(slots, columns)

    def length(self, slot: int) -> int:
        """Tokens of a slot that are in the cache."""
        return self.cache.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything of `slot` from position `length` on."""
        self.cache.truncate(slot, length)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""
        self.cache.move(source, target)

    @property
    def final_boundary(self) -> int:
        """The boundary after the final norm, n + 1: what the head reads."""
        return self.num_layers + 1

    def head(self, final: Tensor) -> Tensor:
        """Final hidden state [..., Ht] -> logits [..., V]; gradients flow to the state."""
        return self._logits(self.model.get_output_embeddings(), final)

    def head_rows(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A copy of the head cut down to the tokens ids [Vd]: final state [..., Ht] -> logits [..., Vd]."""
        whole = self.model.get_output_embeddings()
        ids = ids.to(self.device)
        rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
        rows.weight = nn.Parameter(whole.weight.detach()[ids], requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids], requires_grad=False)
        return partial(self._logits, rows)

    def _logits(self, head: nn.Module, final: Tensor) -> Tensor:
        if not self._head_is_exact:
            raise UnsupportedModelError(
                f"{self.config.model_type} does something to its logits that eyas doesn't know, so the teacher can't "
                "be recomputed from stored states; decoding is not affected"
            )
        out: Tensor = self._finish(head(final.to(self.dtype)))
        return out

    def check_taps(self, taps: Sequence[int]) -> None:
        """Refuse boundaries this model doesn't have."""
        bad = [k for k in taps if not 0 <= k <= self.final_boundary]
        if bad or len(set(taps)) != len(taps):
            raise RequestError(
                f"taps {list(taps)} must be distinct boundaries between 0 and {self.final_boundary} "
                "(after the final norm)"
            )

    @torch.inference_mode()
    def prefill(
        self, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int], chunk: int = 512
    ) -> Iterator[PrefillChunk]:
        """Commit all of each row's `tokens` but the last, which becomes the root of the first verification.

        Rows may hold a committed prefix already; `tokens` continue it. Yields piece by piece, so that no more than
        `chunk` columns of states exist at a time.
        """
        done = 0
        longest = max(len(row) for row in tokens) - 1
        while done < longest:
            width = min(chunk, longest - done)
            counts = [max(0, min(width, len(row) - 1 - done)) for row in tokens]
            padded = [list(row[done : done + width + 1]) for row in tokens]
            window = torch.tensor([p + [0] * (width + 1 - len(p)) for p in padded], device=self.device)
            steps = torch.arange(width, device=self.device)
            causal = (steps.unsqueeze(1) >= steps).unsqueeze(0)
            _, caught = self._forward(rows, window[:, :-1], causal, steps.unsqueeze(0), taps, head=False)
            self.cache.commit(rows, [range(count) for count in counts])
            yield PrefillChunk(window[:, 1:], caught, counts)
            done += width

    @torch.inference_mode()
    def verify(self, rows: range, roots: Tensor, tree: DraftTree, taps: Sequence[int]) -> Verified:
        """Run roots [R] and the tree's nodes through the model in one pass; nothing is committed."""
        logits, caught = self._forward(rows, tree.columns(roots), tree.ancestors, tree.depth, taps, head=True)
        return Verified(logits, caught)

    def commit(self, rows: range, paths: Sequence[Sequence[int]]) -> None:
        """Keep the columns on each row's walked path (0 = root, i + 1 = node i)."""
        self.cache.commit(rows, paths)

    @torch.no_grad()
    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """Teacher-force right-padded tokens [B, S] with `lengths` [B]; no cache is touched."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = steps.expand_as(tokens)
        seen = (steps.unsqueeze(1) >= steps).unsqueeze(0) & (
            (steps < lengths.unsqueeze(1)).unsqueeze(1) | torch.eye(len(steps), dtype=torch.bool, device=tokens.device)
        )
        mask = self._masks(torch.zeros_like(lengths), 0, seen, positions)
        with caught_taps(self.model.base_model, self.layers, taps) as caught:
            final = self.model.base_model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
            )[0]
        return Trace(self._stacked(caught, tokens), final)

    def _forward(
        self, rows: range, tokens: Tensor, ancestors: Tensor, depth: Tensor, taps: Sequence[int], head: bool
    ) -> tuple[Tensor, Tensor]:
        """Stage tokens [R, Q]; returns logits (or, without the head, the final state) and taps [R, Q, A, Ht]."""
        start = self.cache.start(rows)
        self.cache.reserve(start + tokens.shape[1])
        lengths = torch.tensor(self.cache.lengths[rows.start : rows.stop], device=self.device)
        positions = lengths.unsqueeze(1) + depth
        if self.max_length is not None and start + tokens.shape[1] > self.max_length:
            # nodes past the context's end can't be emitted, but learned positions must not be looked up there
            positions = positions.clamp(max=self.max_length - 1)
        runner = self.model if head else self.model.base_model
        with caught_taps(self.model.base_model, self.layers, taps) as caught:
            out = runner(
                input_ids=tokens,
                attention_mask=self._masks(lengths, start, ancestors, positions),
                position_ids=positions,
                past_key_values=StagedCache(self.cache, rows, start),
                use_cache=True,
            )[0]
        return out, self._stacked(caught, tokens)

    def _stacked(self, caught: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """[R, Q, A, Ht], also of no taps at all."""
        if not caught:
            return torch.empty(*tokens.shape, 0, self.hidden_size, dtype=self.dtype, device=self.device)
        return stack(caught)

    def _masks(self, lengths: Tensor, start: int, ancestors: Tensor, positions: Tensor) -> Any:
        """A 4-D additive mask, or a dictionary of them where the model mixes attention types."""
        made = {
            kind: masks.additive(masks.visible(lengths, start, ancestors, positions, window), self.dtype)
            for kind, window in self._plan.windows.items()
        }
        return made if self._plan.hybrid else next(iter(made.values()))
