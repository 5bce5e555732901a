"""The target: a stock transformers decoder LM that prefills, verifies draft trees and commits paths.

Shapes: R rows (a contiguous range of slots), Q columns, N tree nodes, T tokens of a pass (R x Q, or fewer where rows
lie end to end), A taps, Ht hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.errors import EyasError, RequestError, UnsupportedModelError
from eyas.targets import attention
from eyas.targets.architecture import attention_plan, context_limit, decoder_layers, logit_finish, refuse_unsupported
from eyas.targets.attention import RaggedLayout, intercept, use_layout
from eyas.targets.linears import agree
from eyas.targets.slots import ShapeProbe, SlotCache, StagedCache
from eyas.targets.taps import caught_taps
from eyas.tree import DraftTree, NodeLogits


class VerifyOutput(NamedTuple):
    """What one verification pass yields."""

    logits: NodeLogits
    taps: Tensor  # [T, A, Ht], in the order of the logits' rows

    @property
    def tokens(self) -> int:
        """T: what the pass cost."""
        return self.taps.shape[0]

    def taps_at(self, places: Tensor) -> Tensor:
        """[R, P, A, Ht] the taps at `places` [R, P] of each row."""
        return self.taps[self.logits.index.gather(1, places)]


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
    ragged: bool = True
    """Do rows of different lengths lie end to end in a pass? Turned off if this model's attention doesn't let them."""

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
        self.ragged = self.ragged and self._runs_ragged()
        self.resize(self.cache_slots)

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
        self.head_is_exact: bool = torch.allclose(
            self._finish(self.model.get_output_embeddings()(final)).float(), out.logits.float(), rtol=1e-3, atol=1e-4
        )

    @torch.inference_mode()
    def _runs_ragged(self) -> bool:
        """Take over the model's attention and see whether a packed pass says what its own padded one does."""
        self.resize(2)
        own, self.ragged = self.model.config._attn_implementation, False
        first = self.vocab_size // 2
        tokens = (torch.arange(first, first + 4, device=self.device) % self.vocab_size).view(2, 2)
        valid = torch.tensor([[True, True], [False, False]], device=self.device)
        tree = DraftTree(tokens, tokens.new_tensor([[-1, 0]] * 2), valid.float(), valid, 2, counted=2)
        for _ in self.prefill(range(2), [tokens[0].tolist() * 2, tokens[1].tolist()], ()):
            pass
        expected = self.verify(range(2), tokens[:, 1], tree, ()).logits.rows[:4].float()  # the second row's node: none
        try:
            self.ragged = intercept(self.model)
            found = self.verify(range(2), tokens[:, 1], tree, ()).logits.rows[:4].float()
        except (RuntimeError, ValueError, TypeError, IndexError, EyasError):
            found = torch.full_like(expected, torch.nan)  # whatever went wrong in there, rows can't lie end to end
        if agree(found, expected, self.dtype):
            return self.ragged
        self.model.set_attn_implementation(own)
        return False

    @property
    def slots(self) -> int:
        """Sequences the cache holds."""
        return self.cache.slots

    def resize(self, slots: int) -> None:
        """Start over with an empty cache of `slots` slots."""
        self.holder: object | None = None  # whose sequences lie in the slots
        self.cache: SlotCache = SlotCache(self._shapes, slots, self.dtype, self.device)

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
        if not self.head_is_exact:
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

    def prefill(
        self, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int], chunk: int = 512
    ) -> Iterator[PrefillChunk]:
        """Commit all of each row's `tokens` but the last, which becomes the root of the first verification.

        Rows may hold a committed prefix already; `tokens` continue it. Yields piece by piece, so that no more than
        `chunk` columns of states exist at a time.
        """
        for done in range(0, max(len(row) for row in tokens) - 1, chunk):
            yield self.prefill_chunk(rows, [row[done : done + chunk + 1] for row in tokens], taps)

    @torch.inference_mode()
    def prefill_chunk(self, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int]) -> PrefillChunk:
        """Commit all of each row's `tokens` but the last, in one pass; the last is where the row's next chunk begins.

        The rows may be any slots, also while others are decoding. A row with at most one token stays as it is.
        """
        counts = [max(0, len(row) - 1) for row in tokens]
        width = max(counts)
        window = torch.tensor([[*row, *[0] * (width + 1 - len(row))] for row in tokens], device=self.device)
        if width == 0:
            return PrefillChunk(window[:, 1:], window.new_empty(len(rows), 0, len(taps), self.hidden_size), counts)
        _, caught = self._read(rows, window[:, :-1], counts, taps)
        return PrefillChunk(window[:, 1:], caught, counts)

    @torch.inference_mode()
    def prefill_to_end(
        self, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int]
    ) -> tuple[NodeLogits, PrefillChunk]:
        """Commit all of each row's `tokens`, at least one, in one pass: the logits after its last, and the piece.

        In the piece the token after a row's last is its own last again: nobody knows it yet. Needs `head_is_exact`.
        """
        counts = [len(row) for row in tokens]
        window = torch.tensor([[*row, *[row[-1]] * (max(counts) + 1 - len(row))] for row in tokens], device=self.device)
        final, caught = self._read(rows, window[:, :-1], counts, taps)
        last = torch.tensor(counts, device=self.device) - 1
        logits = self.head(final[torch.arange(len(counts), device=self.device), last])
        return NodeLogits.of(logits.unsqueeze(1)), PrefillChunk(window[:, 1:], caught, counts)

    def _read(self, rows: range, tokens: Tensor, counts: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Commit the first `counts[r]` of each row of tokens [R, Q]: final states [R, Q, Ht], taps [R, Q, A, Ht]."""
        layout = RaggedLayout.of_counts(counts, self.device) if self.ragged and sum(counts) < tokens.numel() else None
        steps = torch.arange(tokens.shape[1], device=self.device)
        causal = (steps.unsqueeze(1) >= steps).unsqueeze(0)
        final, caught = self._forward(rows, tokens, causal, steps.unsqueeze(0), taps, False, layout)
        self.cache.commit(rows, [range(count) for count in counts])
        return (final, caught) if layout is None else (layout.pad(final), layout.pad(caught))

    @torch.inference_mode()
    def verify(self, rows: range, roots: Tensor, tree: DraftTree, taps: Sequence[int]) -> VerifyOutput:
        """Run roots [R] and the tree's valid nodes through the model in one pass; nothing is committed."""
        layout = self._layout(tree)
        logits, caught = self._forward(rows, tree.columns(roots), tree.ancestors, tree.depth, taps, True, layout)
        placed = NodeLogits.of(logits) if layout is None else NodeLogits(logits[0], layout.index)
        return VerifyOutput(placed, caught.flatten(0, 1))

    def _layout(self, tree: DraftTree) -> RaggedLayout | None:
        """How the tree's valid nodes lie end to end; None = padded: no node is missing, or nobody may ask how many."""
        if not self.ragged or tree.full is not False:
            return None
        nodes = int(tree.valid.sum()) if tree.counted is None else tree.counted
        return RaggedLayout.of(F.pad(tree.valid, (1, 0), value=True), tree.valid.shape[0] + nodes)

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
        self, rows: range, tokens: Tensor, ancestors: Tensor, depth: Tensor, taps: Sequence[int], head: bool,
        layout: RaggedLayout | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Stage tokens [R, Q]; returns logits (or, without the head, the final state) and taps [R, Q, A, Ht].

        Of a packed pass `layout` tells which tokens are real; only they are run, and what comes back is [1, T, ...].
        """
        start = self.cache.start(rows)
        self.cache.reserve(start + tokens.shape[1])
        lengths = torch.tensor(self.cache.lengths[rows.start : rows.stop], device=self.device)
        positions = lengths.unsqueeze(1) + depth
        if self.max_length is not None and start + tokens.shape[1] > self.max_length:
            # nodes past the context's end can't be emitted, but learned positions must not be looked up there
            positions = positions.clamp(max=self.max_length - 1)
        mask = self._masks(lengths, start, ancestors, positions)
        if layout is not None:
            tokens, positions = layout.gather(tokens), layout.gather(positions.expand_as(tokens))
        runner = self.model if head else self.model.base_model
        with use_layout(layout), caught_taps(self.model.base_model, self.layers, taps) as caught:
            out = runner(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=StagedCache(self.cache, rows, start, layout),
                use_cache=True,
            )[0]
        return out, self._stacked(caught, tokens)

    def _stacked(self, caught: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """[R, Q, A, Ht], also of no taps at all."""
        if not caught:
            return torch.empty(*tokens.shape, 0, self.hidden_size, dtype=self.dtype, device=self.device)
        return torch.stack(list(caught), dim=2)

    def _masks(self, lengths: Tensor, start: int, ancestors: Tensor, positions: Tensor) -> Any:
        """A 4-D additive mask, or a dictionary of them where the model mixes attention types."""
        made = {
            kind: attention.additive(attention.visible(lengths, start, ancestors, positions, window), self.dtype)
            for kind, window in self._plan.windows.items()
        }
        return made if self._plan.hybrid else next(iter(made.values()))
