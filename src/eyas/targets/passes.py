"""The passes of an unmodified transformers decoder LM over a slot cache: prefill, and verification of draft trees.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, N tree nodes, T tokens of a pass (R x Q, or fewer in
a ragged pass), A taps, Ht hidden size, V vocabulary. A node index counts the root as 0 and node i as i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.runtime import inference, to_device
from eyas.targets import attention
from eyas.targets.architecture import (
    attention_plan,
    context_limit,
    decoder_layers,
    logit_finish,
    refuse_encoder,
    refuse_unsupported,
    unsupported_if_it_fails,
)
from eyas.targets.attention import RaggedLayout, cap_scores, use_layout
from eyas.targets.backend import Backend, GraphsBackend, ModulesBackend, NativeBackend
from eyas.targets.graphs import PassGraphs, Record, filled_up
from eyas.targets.kernel_decoder import KernelDecoder, PassColumns, RecordedTree
from eyas.targets.native.decoder import NativeDecoder
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.native.products import multiplies_by_vectors
from eyas.targets.recurrent import ShapeProbe, run_by_levels
from eyas.targets.shapes import recurring
from eyas.targets.slots import COLUMNS, SlotCache, StagedCache
from eyas.targets.states import RecurrentStates, SlotStates
from eyas.targets.taps import caught_taps, check_boundaries, odd_taps, stacked
from eyas.targets.transformers_names import model_cache_kwargs
from eyas.tree import DraftTree, NodeLogits
from eyas.tree.draft_tree import cells


class VerifyOutput(NamedTuple):
    """The logits and taps of a verification pass."""

    logits: NodeLogits
    taps: Tensor  # [T, A, Ht], in the order of the logits' rows

    @property
    def tokens(self) -> int:
        """T, the number of tokens that the pass ran."""
        return self.taps.shape[0]

    def taps_at(self, nodes: Tensor) -> Tensor:
        """[R, P, A, Ht] the taps at P nodes of each row, by node index `nodes` [R, P]."""
        return self.taps[self.logits.index.gather(1, nodes)]

    def taps_along(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """[R, P, A, Ht] the taps on a path of each row, by node index, of a host's pass; shorter ones are padded."""
        most = max(map(len, paths))
        index = self.logits.index.tolist()
        at = [
            of_row[node]
            for of_row, path in zip(index, paths, strict=True)
            for node in (*path, *[0] * (most - len(path)))
        ]
        found = self.taps
        if at != list(range(self.tokens)):
            begins = at == list(range(len(at)))  # a chain's first nodes
            found = found[: len(at)] if begins else found.index_select(0, torch.tensor(at))
        return found.view(len(paths), most, *found.shape[1:])


def unchanged(out: Any) -> Any:
    """What most models apply to their head's output. It is a function because calling an `nn.Identity` takes longer."""
    return out


_DENSE_PASS = 64
"""Tokens from which on a pass with a CPU's vector instructions is compute-bound, not memory-bound."""


class PrefillChunk(NamedTuple):
    """A prefilled and committed chunk of some prompts."""

    next_tokens: Tensor  # [R, Q] the token *after* each position of the chunk
    next_on_host: Tensor  # [R, Q] the same tokens in host memory
    taps: Tensor  # [R, Q, A, Ht]
    counts: list[int]  # number of real positions among the Q of each row
    final: Tensor  # [R, Q, Ht], after the final norm: the head's input


class EmbeddingAndHead:
    """A transformers model's sizes, limits, embedding and head.

    Raises UnsupportedModelError for models that can't be targets.
    """

    head_is_exact: bool
    """Whether `head` computes the model's own logits."""

    def __init__(self, model: Any, config: Any = None) -> None:
        """`config` describes the whole model if `model` has only its first layers; None: `model` is whole."""
        refuse_unsupported(type(model), model.config)
        own = model.config.get_text_config()
        self.model = model
        self.config = own if config is None else config.get_text_config()
        head = model.get_output_embeddings()
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.max_length = context_limit(self.config)
        self.layers = decoder_layers(model, own.num_hidden_layers)
        self.finish = logit_finish(self.config) or unchanged
        """What the model applies to its head's output: nothing, a scale or a soft cap."""
        self._odd_taps: Mapping[int, list[int]] = {}

    @classmethod
    def of_first_layer(cls, model: Any, config: Any) -> EmbeddingAndHead:
        """The embedding and head of the model that `config` describes, from one with only its first layer."""
        made = cls(model, config)
        with unsupported_if_it_fails(model), torch.inference_mode():
            token = made.an_ordinary_token()
            logits = model(input_ids=token, use_cache=False).logits
            made.head_is_exact = made._gives(model.base_model(input_ids=token, use_cache=False)[0], logits)
        return made

    def an_ordinary_token(self, rows: int = 1) -> Tensor:
        """Token ids [rows, 1] for trial passes: not padding, which has all-zero states and logits."""
        return torch.full((rows, 1), self.vocab_size // 2, device=self.device)

    def _gives(self, final: Tensor, logits: Tensor) -> bool:
        """Whether `head` computes these `logits` from the `final` states."""
        head = self.finish(self.model.get_output_embeddings()(final))
        return torch.allclose(head.float(), logits.float(), rtol=1e-3, atol=1e-4)

    @property
    def final_boundary(self) -> int:
        """The tap boundary after the final norm, n + 1: the head's input."""
        return self.num_layers + 1

    def head(self, final: Tensor, rows: nn.Module | None = None) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., Ht]; gradients flow to the states.

        Given `rows` made by `head_rows`, compute only the logits of its tokens. Raises UnsupportedModelError if the
        model does something else to its logits (`head_is_exact` is False).
        """
        if not self.head_is_exact:
            raise UnsupportedModelError(
                f"{self.config.model_type} changes its logits in a way that eyas doesn't know, so they can't be "
                "recomputed from stored states for training; decoding is not affected"
            )
        head = self.model.get_output_embeddings() if rows is None else rows
        out: Tensor = self.finish(head(final.to(self.dtype)))
        return out

    @property
    def head_is_linear(self) -> bool:
        """Whether logits are the head's output, without a scale or cap."""
        return self.head_is_exact and self.finish is unchanged

    def head_rows(self, ids: Tensor) -> nn.Module:
        """A copy of the head for the tokens `ids` [Vd] only."""
        whole = self.model.get_output_embeddings()
        ids = ids.to(self.device)
        if isinstance(whole, PackedLinear):
            return whole.chosen(ids)
        rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
        rows.weight = nn.Parameter(whole.weight.detach()[ids], requires_grad=False)
        if whole.bias is not None:
            rows.bias = nn.Parameter(whole.bias.detach()[ids], requires_grad=False)
        return NativeLinear(rows, False) if isinstance(whole, NativeLinear) else rows

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise RequestError for boundaries that don't exist or repeat, UnsupportedModelError for unreadable ones."""
        check_boundaries(taps, self.final_boundary, self._odd_taps)


@dataclass
class Passes(EmbeddingAndHead):
    """A transformers model, its sizes and limits, and its passes, which are given the slot cache to run over.

    It holds no state of any sequence. In `Target`, trials choose how passes are run.
    """

    model: Any
    ragged: bool = True
    """Whether rows of different lengths run end to end, without padding. Turned off if the model can't do that."""
    decoder: KernelDecoder | None = None
    """Runs the passes instead of the modules. Turned off if it doesn't compute the same."""
    record: Record | None = None
    """Records verification passes of few tokens as CUDA graphs. Turned off if the model can't be recorded."""

    kv_in_codes = False
    """Whether caches hold keys and values in 8 bits. Set after the trials at load: rounding would hide their errors."""

    def __post_init__(self) -> None:
        super().__init__(self.model)
        self.plan = attention_plan(self.config)
        with unsupported_if_it_fails(self.model):
            cap_scores(self.model)
            self._probe()

    @inference
    def _probe(self) -> None:
        """Run one token to learn what layers cache, which taps are readable, and whether `head` gives the logits."""
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        token = zero + self.vocab_size // 2  # not a padding token: its state and logits are all zeros
        mask = self.masks(zero[0], 0, zero[:, :, None] == 0, zero)
        taps = caught_taps(self.model.base_model, self.layers, range(self.final_boundary + 1))
        with probe.watching(self.model), taps as caught:
            out = self.model(
                input_ids=token,
                attention_mask=mask,
                position_ids=zero,
                output_hidden_states=False,
                **model_cache_kwargs(self.model, probe),
            )
        self._odd_taps = odd_taps(caught, self.hidden_size)
        refuse_encoder(self.model, token)
        self.kv_shapes = probe.of_layers(self.config)
        self.states = probe.states
        run_by_levels(probe.modules)
        final = self.model.base_model(input_ids=token, attention_mask=mask, position_ids=zero, use_cache=False)[0]
        self.head_is_exact = self._gives(final, out.logits)

    def allocate(self, slots: int, columns: int = COLUMNS) -> SlotCache:
        """Allocate an empty cache of `slots` x `columns` for passes of this model; it grows as rows do."""
        states: SlotStates | None = None
        if self.states and self.decoder is not None:
            states = self.decoder.allocate_states(slots)
        elif self.states:
            states = RecurrentStates(self.states, slots, self.device)
        cache = SlotCache(self.kv_shapes, slots, self.dtype, self.device, columns, states, self.kv_in_codes)
        cache.graphs = None if self.record is None else PassGraphs(self.record)
        return cache

    def last_layers(self) -> dict[str, int]:
        """Attention type -> the last layer of that type that caches keys and values of its own."""
        kinds = self.plan.of_layers(self.config)
        return {
            kind: layer
            for layer, (kind, shape) in enumerate(zip(kinds, self.kv_shapes, strict=False))  # the last may share keys
            if shape is not None
        }

    @property
    def native(self) -> NativeDecoder | None:
        """The decoder, if it is one for CPUs."""
        return self.decoder if isinstance(self.decoder, NativeDecoder) else None

    @property
    def backend(self) -> Backend:
        """What runs the passes."""
        if self.native is not None:
            return NativeBackend()
        if self.record is not None:
            return GraphsBackend()
        return ModulesBackend(single_threaded=bool(self.states) and self.device.type == "cpu")

    @property
    def dense_pass(self) -> int | None:
        """Tokens from which on a pass's time is proportional to them; None = larger passes are always better."""
        return _DENSE_PASS if multiplies_by_vectors(self.model) else None

    def prefill(
        self, cache: SlotCache, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int], chunk: int = 512
    ) -> Iterator[PrefillChunk]:
        """Commit all of each row's `tokens` but the last, which becomes the root of the first verification.

        Rows may already hold a committed prefix, which `tokens` continue. At most `chunk` columns of states exist at
        any time.
        """
        for done in range(0, max(len(row) for row in tokens) - 1, chunk):
            yield self.prefill_chunk(cache, rows, [row[done : done + chunk + 1] for row in tokens], taps)

    @inference
    def prefill_chunk(
        self, cache: SlotCache, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int]
    ) -> PrefillChunk:
        """Commit all of each row's `tokens` but the last in one pass; the row's next chunk begins with the last token.

        The rows may be any slots, even while others are decoding. A row with at most one token stays as it is.
        """
        counts = [max(0, len(row) - 1) for row in tokens]
        width = max(counts)
        given = [[*row, *[0] * (width + 1 - len(row))] for row in tokens]
        window = to_device(given, self.device)
        on_host = torch.tensor(given)
        if width == 0:
            none = window.new_empty(len(rows), 0, len(taps) + 1, self.hidden_size)
            return PrefillChunk(window[:, 1:], on_host[:, 1:], none[:, :, 1:], counts, none[:, :, 0])
        final, caught = self.read(cache, rows, window[:, :-1], counts, taps)
        return PrefillChunk(window[:, 1:], on_host[:, 1:], caught, counts, final)

    @inference
    def prefill_to_end(
        self, cache: SlotCache, rows: range, tokens: Sequence[Sequence[int]], taps: Sequence[int]
    ) -> tuple[NodeLogits, PrefillChunk]:
        """Commit all of each row's `tokens` (at least one) in one pass; return the logits after the last and the chunk.

        The token after a row's last one isn't known yet, so the chunk repeats the last. Needs `head_is_exact`.
        """
        counts = [len(row) for row in tokens]
        given = [[*row, *[row[-1]] * (max(counts) + 1 - len(row))] for row in tokens]
        window = to_device(given, self.device)
        on_host = torch.tensor(given)
        final, caught = self.read(cache, rows, window[:, :-1], counts, taps)
        last = to_device(counts, self.device) - 1
        states = final[torch.arange(len(counts), device=self.device), last]
        index = cells(len(counts), 1, self.device)
        if self.decoder is None:
            logits = NodeLogits(self.head(states), index)
        else:
            logits = self.decoder.logits_of_states(states, index, self._change_of_logits)
        return logits, PrefillChunk(window[:, 1:], on_host[:, 1:], caught, counts, final)

    def read(
        self, cache: SlotCache, rows: range, tokens: Tensor, counts: Sequence[int], taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Commit the first `counts[r]` tokens of each row [R, Q]; return final states [R, Q, Ht] and taps."""
        layout = RaggedLayout.of_counts(counts, self.device) if self.ragged and sum(counts) < tokens.numel() else None
        if cache.states is not None:
            cache.states.begin(rows, counts, layout, cache.lengths[rows.start : rows.stop])
        read = self._forward(cache, rows, tokens, None, taps, layout)
        cache.commit(rows, [range(count) for count in counts])
        if layout is None:
            final, caught = (part.view(*tokens.shape, *part.shape[1:]) for part in read)
        else:
            final, caught = (layout.pad(part.unsqueeze(0)) for part in read)
        return final, caught

    @inference
    def verify(
        self, cache: SlotCache, rows: range, roots: Tensor, tree: DraftTree, taps: Sequence[int]
    ) -> VerifyOutput:
        """Run the `roots` [R] and the trees' valid nodes through the model in one pass; nothing is committed."""
        tokens = tree.columns(roots)
        replayed = None if cache.graphs is None else self._replayed(cache, cache.graphs, rows, tokens, tree, taps)
        if replayed is not None:
            out, caught = replayed
            index = cells(*out.shape[:2], self.device)
            return VerifyOutput(self._logits(out.flatten(0, 1), index), caught.flatten(0, 1))
        layout = RaggedLayout.of_tree(tree) if self.ragged else None
        if cache.states is not None:
            cache.states.begin(rows, tree, layout, cache.lengths[rows.start : rows.stop])
        out, caught = self._forward(cache, rows, tokens, tree, taps, layout)
        index = cells(len(rows), tokens.shape[1], self.device) if layout is None else layout.token_index
        return VerifyOutput(self._logits(out, index), caught)

    def _logits(self, out: Tensor, index: Tensor) -> NodeLogits:
        """The logits of a verification by node `index` [R, 1 + N], from what its pass returns for each token."""
        if self.decoder is None:
            return NodeLogits(out, index)
        return self.decoder.logits(out, index, self._change_of_logits)

    @property
    def _change_of_logits(self) -> Callable[[Any], Any] | None:
        """`finish`, if it changes anything."""
        return None if self.finish is unchanged else self.finish

    def _forward(
        self,
        cache: SlotCache,
        rows: range,
        tokens: Tensor,
        tree: DraftTree | None,
        taps: Sequence[int],
        layout: RaggedLayout | None,
    ) -> tuple[Tensor, Tensor]:
        """Stage `tokens` [R, Q]: a tree's columns, or a sequence. With a `layout`, only the real tokens are run.

        Returns final states of a sequence, what `_logits` takes of a tree, [T, ...], and taps [T, A, Ht].
        """
        end = cache.start(rows) + tokens.shape[1]
        cache.reserve(end)
        return self._run(cache, PassColumns(rows, end, None, tokens, tree, layout), taps)

    def _replayed(
        self, cache: SlotCache, graphs: PassGraphs, rows: range, tokens: Tensor, tree: DraftTree, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """What `_forward` returns, [R, Q, ...], of a tree's columns [R, Q], by a recorded pass of a recurring shape.

        None = it isn't recorded.
        """
        count, columns = tokens.shape
        width = recurring(columns)
        cache.reserve(cache.start(rows) + columns)
        inputs = [
            filled_up(tokens, count, width),
            filled_up(tree.ancestors, count, width, width),
            filled_up(tree.depth, count, width),
        ]

        def compute(
            rows: range, end: int, lengths: Tensor, tokens: Tensor, ancestors: Tensor, depth: Tensor
        ) -> tuple[Tensor, Tensor]:
            staged = PassColumns(rows, end, lengths, tokens, RecordedTree(ancestors, depth))
            out, caught = self._run(cache, staged, taps)
            return torch.unflatten(out, 0, tokens.shape), torch.unflatten(caught, 0, tokens.shape)

        done = graphs.run(tuple(taps), cache, rows, width, inputs, compute)
        return None if done is None else (done[0][:, :columns], done[1][:, :columns])

    def _run(self, cache: SlotCache, columns: PassColumns, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`_forward` of columns that the cache has room for."""
        if self.decoder is not None:
            return self.decoder.run_columns(cache, columns, taps)
        return self._run_modules(cache, columns, taps)

    def _run_modules(self, cache: SlotCache, columns: PassColumns, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`_run` by the model's own modules, which give a tree's logits."""
        rows, end, _, tokens, tree, layout = columns
        lengths = columns.committed(cache)
        width = tokens.shape[1]
        if tree is None:
            steps = torch.arange(width, device=self.device)
            ancestors = (steps.unsqueeze(1) >= steps).unsqueeze(0)  # [1, Q, Q]
            depth = steps.unsqueeze(0)  # [1, Q]
        else:
            ancestors = tree.ancestors
            depth = tree.depth
        recorded = isinstance(tree, RecordedTree)
        staging = cache.staging(rows, width, 0, lengths, end) if recorded else cache.staging(rows, width)
        positions = lengths.unsqueeze(1) + depth
        if self.max_length is not None and end > self.max_length:
            # nodes beyond the context are never emitted, but learned positions have no entries for them
            positions = positions.clamp(max=self.max_length - 1)
        mask = self.masks(lengths, end - width, ancestors, positions)
        if layout is not None:
            tokens = layout.gather(tokens)
            positions = layout.gather(positions.expand(columns.tokens.shape))
        runner = self.model.base_model if tree is None else self.model
        with use_layout(layout), caught_taps(self.model.base_model, self.layers, taps) as caught:
            out = runner(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                **model_cache_kwargs(runner, StagedCache(cache, staging, layout)),
            )[0]
        return out.flatten(0, 1), stacked(caught, tokens, self.hidden_size, self.dtype).flatten(0, 1)

    def masks(
        self,
        lengths: Tensor,
        start: int,
        ancestors: Tensor,
        positions: Tensor,
        staged: Any = None,
        windows: Mapping[str, int | None] | None = None,
    ) -> Any:
        """The additive mask [R, 1, Q, K] of a pass, or one per attention type; for the arguments, see `visible`.

        `windows` replaces the model's own windows.
        """
        made: dict[str, Any] = {
            kind: attention.additive(
                attention.visible(lengths, start, ancestors, positions, window, staged), self.dtype
            )
            for kind, window in (windows or self.plan.windows).items()
        }
        if self.plan.recurrent:
            return {**made, **dict.fromkeys(self.plan.recurrent)} if made else None
        return made if len(made) > 1 else next(iter(made.values()))
