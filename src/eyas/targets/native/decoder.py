"""A Llama-like decoder (a target's layers or a drafter's) as one native pass over the slot cache.

The caller checks by trials that the pass computes what the modules compute (`logits_agree`). The modules stay, because
they hold the weights, and training runs them.

Shapes: T tokens of a pass, R rows, Q columns of a row, S columns staged so far, those of the pass included, A taps,
H hidden size, V outputs of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, byref, c_int64
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.runtime import inference
from eyas.targets.kernel_decoder import PassColumns, RecordedTree
from eyas.targets.native.experts import NativeExperts, NativeRouter
from eyas.targets.native.forms import NormForm
from eyas.targets.native.latent import LatentHeads, latent_parts
from eyas.targets.native.library import (
    KINDS,
    PANEL,
    Activation,
    Beam,
    Experts,
    Fold,
    Latent,
    Layer,
    Linear,
    Mode,
    NativePass,
    Recurrent,
    RowStates,
    address,
    kernels,
)
from eyas.targets.native.library import Decoder as DecoderStruct
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.native.recurrent import RecurrentParts
from eyas.targets.native.states import GivenStates, NativeStates
from eyas.targets.slots import SlotCache
from eyas.targets.threads import threads_for
from eyas.tree import NodeLogits

RopeTables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [1, S] -> cosines and sines [1, S, rotated], as the model's own rotary embedding gives them."""


Warp = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""[R] each, or None: divisors of the logits, scales of the noise added to them, its seeds, and the next positions."""


class LayerFactors(NamedTuple):
    """Factors of what a layer adds to the residual, and of its MLP's gate."""

    recurrent: float = 1.0
    attention: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0


_NO_FACTORS = LayerFactors()


class RoutedExperts(NamedTuple):
    """A layer's experts, the router that chooses among them, and the gate of the expert that all tokens share."""

    experts: NativeExperts
    router: NativeRouter
    shared_gate: nn.Module | None = None


@dataclass(frozen=True)
class LayerParts:
    """The parts of a decoder layer; its linears have Llama's names."""

    attention: Any
    """Has `qkv_proj` instead of `q_proj`, `k_proj` and `v_proj` if they are fused; None = there is no attention."""
    mlp: Any
    """The MLP, or the expert that all tokens share, with or without a `gate_proj`; None if there are only routed
    experts, or none."""
    input_norm: nn.Module | None
    mlp_norm: nn.Module | None
    embedding_norm: nn.Module | None = None
    """The norm of the embeddings, in a drafter's first layer that reads them along with its state."""
    normed_residual: bool = False
    """Whether the residual is the layer's input after the norm, not before it."""
    window: int | None = None
    """Number of latest positions that a token sees; None = all."""
    anchored: bool = False
    """Whether all guesses of a draft see as far back as the last committed token does."""
    whole_draft: bool = False
    """Whether guesses see each other and the last committed token, however small the window is. For native passes, this
    and `causal` are set per pass."""
    causal: bool = True
    """Whether a token sees none that follow it in its pass."""
    attention_out_norm: nn.Module | None = None
    """The norm of attention's output, before the residual is added."""
    mlp_out_norm: nn.Module | None = None
    """The norm of the MLP's output, before the residual is added."""
    rope: int | None = 0
    """Index of the decoder's RoPE tables that rotate queries and keys; None = no RoPE."""
    routed: RoutedExperts | None = None
    sinks: Tensor | None = None
    """[heads] the scores of keys without a value."""
    recurrent: RecurrentParts | None = None
    """The recurrence that replaces attention, or reads the same input in parallel with it: then outputs are added."""
    factors: LayerFactors = _NO_FACTORS

    @property
    def norms(self) -> tuple[nn.Module | None, ...]:
        """The layer's norms in the order of `library.NORMS`; None for those that it doesn't have."""
        of_heads = (getattr(self.attention, name, None) for name in ("q_norm", "k_norm"))
        own = (None if isinstance(norm, nn.Identity) else norm for norm in of_heads)
        before = self.input_norm, self.mlp_norm, self.embedding_norm
        return (*before, *own, self.attention_out_norm, self.mlp_out_norm)


class Heads(NamedTuple):
    """Sizes of a decoder's attention."""

    queries: int
    keys: int
    size: int
    scale: float
    softcap: float = 0.0
    """Limit of the scores' absolute values; 0 = none."""
    latent: LatentHeads = LatentHeads()
    interleaved: bool = False
    """Whether `qkv_proj` outputs each head's query, key and value together, not all queries first."""
    gated: bool = False
    """Whether `q_proj` outputs each head's query and gate together."""


class Fusion(NamedTuple):
    """How a drafter's states are made of the target's: a product of all taps, concatenated."""

    linear: nn.Module
    tap_norms: Sequence[nn.Module] = ()
    """A norm for each tap; empty = none."""
    norm_before: nn.Module | None = None
    """The norm of all taps together."""
    norm_after: nn.Module | None = None

    @property
    def norms(self) -> bool:
        """Whether it has norms."""
        return bool(self.tap_norms) or self.norm_before is not None or self.norm_after is not None


class DecoderForm(NamedTuple):
    """How a decoder differs from a plain one."""

    mix: nn.Module | None = None
    """Makes a drafter's first input from embedding and state, concatenated."""
    mix_norms: Sequence[nn.Module] = ()
    """The norms of embedding and state before; empty = none."""
    returns_normed: bool = False
    """Whether a drafter is fed back its states after the norm."""
    limit: int | None = None
    """Length of the longest sequence: positions stay below it, because beyond it some RoPE tables change."""
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    positions: Tensor | None = None
    """[limit, H] row-major embeddings of positions, which are added to token embeddings."""
    parallel_residual: bool = False
    """Whether attention and MLP both read a layer's input, and their sum is added to it."""
    fuse: Fusion | None = None
    """Makes a drafter's states from `TargetStates`."""
    finish: Callable[[Tensor], Tensor] | None = None
    """What is applied to the output of a drafter's head."""


class DecoderDescription(NamedTuple):
    """A whole decoder, as its passes on a CPU and on a GPU are made of it."""

    layers: Sequence[LayerParts]
    norm: nn.Module | None
    """Without it, the final states are the last layer's output."""
    head: nn.Module | None
    """Without it, there are no logits."""
    heads: Heads
    ropes: Sequence[RopeTables]
    embedding: Tensor | PackedLinear  # [tokens, H]
    dtype: torch.dtype
    form: DecoderForm


class Staged(NamedTuple):
    """Where a pass's tokens go in the cache. They see the committed columns and their own path."""

    # Verification of [r0, a, b | r1, c, -], where a and b follow r0: columns 3, cells [0, 1, 2, 3, 4], rooted, and the
    # nodes' parents [[-1, -1], [-1, -1]]. Staged column 2 (b) follows column -1 + 1 = 0, the root, so b doesn't see a.
    # The second level of a draft, two guesses that both follow the first one of the level before: before 2, columns 2,
    # and the parents [[-1, -1, 0, 0]] of all columns staged so far.
    rows: range
    columns: int
    """Q, the number of cells per row."""
    cells: Tensor | None  # [T] row * Q + column of each token; None = every cell has a token
    lengths: Sequence[int]
    """[R] numbers of committed columns, which each row's staged columns follow."""
    parents: Tensor | None  # [R or 1, S] the staged column that each follows, -1 = none; None = the one before it
    before: int = 0
    """Number of columns of each row that earlier passes staged."""
    rooted: bool = False
    """Whether `parents` are those of a tree's nodes: column 0 is the root, which they leave out and count from -1."""
    guesses: bool = False
    """Whether the columns are a drafter's guesses: however small its windows, these see their path and the last
    committed column."""


class ParentStates(NamedTuple):
    """The states of the level above, among them those of the guesses' parents."""

    states: Tensor  # [R, W, H] float32
    first: int
    """The staged column of the first state; -1 if they are states of committed tokens."""


class TargetStates(NamedTuple):
    """The target's states from which a decoder that `fuses` makes a drafter's."""

    taps: Tensor  # [..., A, Ht] of T tokens


class DraftStart(NamedTuple):
    """Where a pass stores the states that drafts begin with."""

    fed: Tensor  # [slots, H] float32, as they are fed back
    normed: Tensor  # [slots, H] in the model's dtype, after the final norm
    lasts: Sequence[tuple[int, int]]
    """Slots, and the token of the pass whose states each keeps."""


class Outcome(NamedTuple):
    """The results of a pass, in the model's dtype."""

    states: Tensor  # [T, H] float32, the states fed back to a drafter: from the last layer, or after the norm
    final: Tensor | None  # [T, H] after the final norm
    logits: Tensor | None  # [T, V]
    taps: Tensor  # [T, A, H]


class _PassInputs(NamedTuple):
    """What a pass makes its states of: those of the level above, or the target's."""

    above: Tensor | None = None
    width: int = 0
    first: int = 0
    sources: Tensor | None = None


_NO_INPUTS = _PassInputs()


class _PassOutputs(NamedTuple):
    """Where a pass writes its results."""

    tapped: Tensor | None = None
    final: Tensor | None = None
    logits: Tensor | None = None
    starts: tuple[int | None, int | None, int | None] = (None, None, None)
    """Addresses of the slots that keep the tokens' last states [T], and of where they keep them; see `DraftStart`."""


_NO_OUTPUTS = _PassOutputs()


class Table(NamedTuple):
    """An embedding [rows, width] as the kernels look it up."""

    address: int
    rows: int
    width: int
    kind: int

    @classmethod
    def of(cls, embedding: Tensor | PackedLinear) -> Table:
        """Make a table of a row-major embedding or a packed weight. Raises UnsupportedModelError for others."""
        if isinstance(embedding, PackedLinear):
            return cls(
                embedding.rows(0, embedding.out_features).weight,
                embedding.out_features,
                embedding.in_features,
                embedding.kind,
            )
        if embedding.dtype not in (torch.float32, torch.bfloat16) or not embedding.is_contiguous():
            raise UnsupportedModelError(f"unsupported embedding: {tuple(embedding.shape)} {embedding.dtype}")
        return cls(embedding.data_ptr(), len(embedding), embedding.shape[1], KINDS[embedding.dtype])


class NativeDecoder:
    """The layers, final norm and head of a decoder, as the kernels take them."""

    name = "native"
    recurrent = 0
    """Number of recurrent layers."""
    row_size: int
    """Number of floats that each recurrent layer stages per token of a pass."""
    state_size = 0
    """Number of floats of a slot's recurrent states."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        norm: nn.Module | None,
        head: nn.Module | None,
        heads: Heads,
        ropes: Sequence[RopeTables],
        embedding: Tensor | PackedLinear,
        dtype: torch.dtype,
        form: DecoderForm,
    ) -> None:
        """Without a `norm`, the final states are the last layer's output; without a `head`, there are no logits.

        `embedding` [tokens, H] is row-major or packed. Raises UnsupportedModelError for layers that the kernels don't
        compute, or if there are no kernels.
        """
        found = kernels()
        if found is None:
            raise UnsupportedModelError("there are no native kernels on this machine")
        self._kernels = found
        self._keepalive: list[Any] = []  # what the structs point to
        self._ropes = ropes
        self._dtype = dtype
        self._limit = form.limit
        self._tables = (torch.empty(len(ropes), 0, 0),) * 2  # [ropes, positions, rotated]
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"{dtype} is neither float32 nor bfloat16")
        norms = [part for part in (norm, *(part for layer in layers for part in layer.norms)) if part is not None]
        elsewhere = {weight.device for part in norms for weight in part.parameters()} - {torch.device("cpu")}
        if elsewhere:
            raise UnsupportedModelError(f"native passes run on CPUs, but weights are on {elsewhere.pop()}")
        self._norms = {part: NormForm.of(part, dtype) for part in norms}
        forms = {(form.eps, form.rounds_twice, form.shift is not None) for form in self._norms.values()}
        if len(forms) != 1:
            raise UnsupportedModelError("norms differ in kind, epsilon or rounding")
        eps, rounds_twice, centered = forms.pop()
        table = Table.of(embedding)
        self.hidden: int = table.width
        sizes = [layer.mlp.down_proj.in_features for layer in layers if layer.mlp is not None]
        self.outputs: int = 0 if head is None else head.out_features  # type: ignore[assignment]  # of any module
        _check_positions(embedding, table, form, dtype)
        self._keepalive += [embedding, form.positions]
        # norms 3 and 4 are those of queries and keys (`NORMS`)
        widths = {self._norms[norm].width for layer in layers for norm in layer.norms[3:5] if norm is not None}
        together = widths == {heads.queries * heads.size, heads.keys * heads.size} and widths != {heads.size}
        if widths and not together and widths != {heads.size}:
            raise UnsupportedModelError(f"norms of {sorted(widths)} features for heads of {heads.size}")
        self._layers = (Layer * len(layers))(*(self._layer(layer, heads, rounds_twice) for layer in layers))
        self._grow(256)
        unit = PANEL if heads.interleaved or heads.gated else self._kernels.lanes
        fused: int = 0 if form.fuse is None else form.fuse.linear.in_features  # type: ignore[assignment]  # of any module
        fits = (*(size % PANEL for size in (self.hidden, fused, *sizes)), heads.size % unit)
        if any(fits) or heads.queries % heads.keys or self._tables[0].shape[2] % 2:
            raise UnsupportedModelError(f"the sizes {self.hidden}, {sizes}, {heads.size} don't fit the vectors")
        # in the order of `Decoder` in kernels/abi.h; the same goes for `Layer` and `NativePass` (`Pass` there) below
        self._struct = DecoderStruct(
            self._layers,
            len(layers),
            self.hidden,
            heads.queries,
            heads.keys,
            heads.size,
            max(sizes, default=0),
            self._tables[0].shape[2],
            dtype == torch.bfloat16,
            together,
            rounds_twice,
            centered,
            form.activation,
            form.parallel_residual,
            heads.interleaved,
            heads.gated,
            eps,
            heads.scale,
            heads.softcap,
            form.embedding_scale,
            table.address,
            table.rows,
            table.kind,
            address(form.positions),
            Linear() if form.mix is None else self._linear(form.mix, self.hidden, 2 * self.hidden),
            Linear() if form.fuse is None else self._linear(form.fuse.linear, self.hidden, fused),
            None if norm is None else self._vector(self._norms[norm].values),
            form.returns_normed,
            Linear() if head is None else self._linear(head, self.outputs, self.hidden),
            form.limit or 0,
            *heads.latent[:-1],
        )
        self.fuses = form.fuse is not None
        self._head = head
        self._layer_weights = max(layer.weights for layer in self._layers)
        self._scratch = self._kernels.token_scratch(byref(self._struct))
        self.row_size = self._kernels.row_size(byref(self._struct))

    def _layer(self, layer: LayerParts, heads: Heads, rounds_twice: bool) -> Layer:
        if layer.sinks is not None and (layer.sinks.shape != (heads.queries,) or heads.latent.rank):
            raise UnsupportedModelError(f"sinks of {tuple(layer.sinks.shape)} for {heads.queries} heads")
        of_attention = [Linear()] * 4
        latent = Latent()
        if layer.attention is not None:
            width = 2 * self.hidden if layer.embedding_norm is not None else self.hidden
            of_attention, latent = self._attention(layer.attention, heads, width, rounds_twice)
        return Layer(
            *of_attention,
            *self._mlp(layer.mlp),
            latent,
            Recurrent() if layer.recurrent is None else self._recurrent(layer.recurrent),
            Experts() if layer.routed is None else self._experts(layer.routed),
            *(None if norm is None else self._vector(self._norms[norm].values) for norm in layer.norms),
            None if layer.sinks is None else self._vector(layer.sinks),
            -1 if layer.rope is None else layer.rope,
            layer.window or 0,
            layer.anchored,
            layer.normed_residual,
            *layer.factors,
        )

    def _attention(self, attention: Any, heads: Heads, width: int, rounds_twice: bool) -> tuple[list[Linear], Latent]:
        """The linears of queries, keys and values, which read `width` features, and of the output; latent parts."""
        queries, keys = heads.queries * heads.size, heads.keys * heads.size
        if heads.latent.rank:
            mixed = heads.queries * heads.latent.value_size
            parts, latent = latent_parts(
                attention, heads.latent, heads.queries, heads.size, width, rounds_twice, self._linear, self._vector
            )
        else:
            mixed = queries
            latent = Latent()
            if heads.interleaved:
                parts = [self._linear(attention.qkv_proj, 3 * queries, width), Linear(), Linear()]
            else:
                outputs = (queries * (1 + heads.gated), keys, keys)
                parts = self._linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", outputs, width)
        return [*parts, self._linear(attention.o_proj, self.hidden, mixed)], latent

    def _recurrent(self, parts: RecurrentParts) -> Recurrent:
        def keep_alive(values: Tensor) -> int:
            self._keepalive.append(values.detach().contiguous())
            address: int = self._keepalive[-1].data_ptr()
            return address

        inputs = [self._linear(part, part.out_features, self.hidden) for part in parts.inputs]
        out = self._linear(parts.out, self.hidden, parts.mixed)
        self._keepalive.append((Linear * len(inputs))(*inputs))
        made = parts.struct(self._keepalive[-1], out, self.state_size, keep_alive)
        self.recurrent += 1
        self.state_size += parts.state_size
        return made

    def allocate_states(self, slots: int) -> NativeStates | None:
        """See `KernelDecoder`."""
        return NativeStates.of(self, slots)

    def fold(self, fold: Fold) -> None:
        """Repeat the steps of accepted guesses on the staged states."""
        fold.threads = threads_for(fold.tokens * 3 * self.state_size)
        self._kernels.fold(byref(self._struct), fold)

    def _mlp(self, mlp: Any) -> list[Linear]:
        if mlp is None:
            return [Linear()] * 3
        size: int = mlp.down_proj.in_features
        down = self._linear(mlp.down_proj, self.hidden, size)
        if not (hasattr(mlp, "gate_proj") or hasattr(mlp, "gate_up_proj")):
            return [Linear(), self._linear(mlp.up_proj, size, self.hidden), down]
        inner = self._linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj", (size,) * 2, self.hidden)
        return [*inner, down]

    def _experts(self, routed: RoutedExperts) -> Experts:
        experts, router, gate = routed
        form = router.form
        self._keepalive.append(experts)
        return experts.struct(
            form.chosen,
            router=self._linear(router, experts.num_experts, self.hidden),
            bias=None if form.bias is None else self._vector(form.bias),
            groups=form.groups,
            groups_used=form.groups_used,
            summed=form.summed,
            sigmoid=form.sigmoid,
            renormalized=form.renormalized,
            rounds_scores=form.rounds_scores,
            rounds_weights=form.rounds_weights,
            scale=form.scale,
            shared_gate=Linear() if gate is None else self._linear(gate, 1, self.hidden),
        )

    def _linears(
        self, module: Any, names: Sequence[str], joint: str, outputs: Sequence[int], inputs: int
    ) -> list[Linear]:
        """Linears with the same input: by their `names`, or as parts of the fused linear `joint`."""
        whole = getattr(module, joint, None)
        if whole is None:
            return [self._linear(getattr(module, name), out, inputs) for name, out in zip(names, outputs, strict=True)]
        self._linear(whole, sum(outputs), inputs)
        starts = accumulate(outputs[:-1], initial=0)
        return [whole.rows(first, out) for first, out in zip(starts, outputs, strict=True)]

    def _linear(self, module: nn.Module, outputs: int, inputs: int) -> Linear:
        if not isinstance(module, NativeLinear) or (module.out_features, module.in_features) != (outputs, inputs):
            raise UnsupportedModelError(f"{module} isn't a native linear from {inputs} to {outputs} features")
        self._keepalive.append(module)
        return module.rows(0, outputs)

    def _vector(self, values: Tensor) -> int:
        """The address of a float32 copy of `values`, which is kept alive."""
        self._keepalive.append(values.detach().float().contiguous())
        address: int = self._keepalive[-1].data_ptr()
        return address

    def _grow(self, positions: int) -> None:
        """Extend the RoPE tables to at least `positions`, but not beyond the longest sequence."""
        most = self._limit or positions + 1024
        if self._ropes and min(positions, most) > self._tables[0].shape[1]:
            wanted = torch.arange(min(positions + -positions % 1024, most)).unsqueeze(0)
            made = zip(*(rope(wanted) for rope in self._ropes), strict=True)
            cosines, sines = (torch.cat(tables).float().contiguous() for tables in made)
            self._tables = (cosines, sines)

    def run_columns(self, cache: SlotCache, columns: PassColumns, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `KernelDecoder`; for a tree, the head's output [T, V]."""
        rows, _, _, tokens, tree, layout = columns
        assert not isinstance(tree, RecordedTree)  # a CPU records nothing
        cell_index = None
        if layout is not None:
            tokens = layout.gather(tokens)
            cell_index = layout.cell_index
        # with only two columns, each follows the one before it
        parents = None if tree is None or tree.size < 2 else tree.parents
        lengths = cache.lengths[rows.start : rows.stop]
        staged = Staged(rows, columns.tokens.shape[1], cell_index, lengths, parents, rooted=True)
        done = self.run(cache, staged, tokens, taps=taps, final=tree is None, logits=tree is not None)
        out: Any = done.final if tree is None else done.logits
        return out, done.taps

    def logits(self, out: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> NodeLogits:
        """See `KernelDecoder`."""
        return NodeLogits(out if finish is None else finish(out), index)

    def logits_of_states(self, final: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> NodeLogits:
        """See `KernelDecoder`."""
        assert self._head is not None  # a target has one
        return self.logits(self._head(final), index, finish)

    @inference
    def run(
        self,
        cache: SlotCache,
        staged: Staged,
        tokens: Tensor,
        states: Tensor | ParentStates | TargetStates | None = None,
        taps: Sequence[int] = (),
        final: bool = False,
        logits: bool = False,
        blocks: bool = False,
    ) -> Outcome:
        """Run `tokens` [T]; nothing is committed. IndexError for a token without embedding.

        `states` are a drafter's states of the tokens [..., H] or of the level above, or the target's. `taps` are
        boundaries; `final` and `logits` request these outputs. With `blocks`, a token sees all columns of its row that
        the pass stages.
        """
        count = tokens.numel()
        x, given = _inputs(count, self.hidden, self._dtype, states)
        tapped = torch.empty(count, len(taps), self.hidden, dtype=self._dtype)
        normed = torch.empty(count, self.hidden, dtype=self._dtype) if final else None
        scores = torch.empty(count, self.outputs, dtype=self._dtype) if logits else None
        self._call(
            cache,
            staged,
            x,
            Mode.BLOCKS if blocks else Mode.PATHS,
            tokens.contiguous(),
            given,
            taps,
            _PassOutputs(tapped, normed, scores),
        )
        return Outcome(x, normed, scores, tapped)

    @inference
    def read(
        self, cache: SlotCache, staged: Staged, tokens: Tensor, states: Tensor | TargetStates, start: DraftStart | None
    ) -> None:
        """Run a drafter's `tokens` [T] with their `states`; keep those that their rows' drafts begin with.

        `start` None: no drafts begin with them, and only their keys and values are staged.
        """
        x, given = _inputs(tokens.numel(), self.hidden, self._dtype, states)
        if start is None:
            self._call(cache, staged, x, Mode.STAGING, tokens.contiguous(), given)
            return
        slots = _integers([-1] * len(x))  # [T] the slot that keeps a token's states; -1 = none
        for slot, token in start.lasts:
            slots[token] = slot
        made = _PassOutputs(starts=(addressof(slots), start.fed.data_ptr(), start.normed.data_ptr()))
        self._call(cache, staged, x, Mode.PATHS, tokens.contiguous(), given, made=made)

    @inference
    def stage(self, cache: SlotCache, staged: Staged, states: Tensor) -> None:
        """Stage the keys and values that each layer computes from `states` [T, H] themselves, without a norm before."""
        self._call(cache, staged, states.float().contiguous(), Mode.CONTEXT)

    def search(self, cache: SlotCache, rows: range, staged: int, beam: Beam) -> int:
        """Grow a draft's candidates in `staged` columns; return the number of levels. IndexError as in `run`."""
        lengths = cache.lengths[rows.start : rows.stop]
        self._grow(max(lengths) + staged + 1)
        (keys, values), columns = cache.addresses(), _integers(lengths)
        base = NativePass(
            lengths=addressof(columns),
            slot=rows.start,
            cosines=self._tables[0].data_ptr(),
            sines=self._tables[1].data_ptr(),
            positions=self._tables[0].shape[1],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            capacity=cache.capacity,
            guesses=True,
            threads=threads_for(len(rows) * beam.width * self._layer_weights),
        )
        levels: int = self._kernels.beam(byref(self._struct), byref(base), byref(beam))
        if not levels:
            raise IndexError(f"a token has no embedding: ids must be from 0 to {self._struct.embeddings - 1}")
        return levels

    def _call(
        self,
        cache: SlotCache,
        staged: Staged,
        x: Tensor,
        mode: Mode,
        tokens: Tensor | None = None,
        given: _PassInputs = _NO_INPUTS,
        taps: Sequence[int] = (),
        made: _PassOutputs = _NO_OUTPUTS,
    ) -> None:
        """Call the kernel for states x [T, H]."""
        parents = None if staged.parents is None else staged.parents.contiguous()
        most = max(staged.lengths) + staged.before + staged.columns
        self._grow(most + 1)
        keys, values = cache.addresses()
        lengths = _integers(staged.lengths)
        boundaries = _integers(taps)
        scratch = torch.empty(len(x) * self._scratch)
        rows = cache.states.of_pass(len(x)) if isinstance(cache.states, NativeStates) else GivenStates(RowStates())
        failed = self._kernels.decoder(
            byref(self._struct),
            NativePass(
                mode,
                len(x),
                staged.columns,
                address(staged.cells),
                address(tokens),
                addressof(lengths),
                address(parents),
                0 if parents is None or len(parents) == 1 else parents.shape[1],  # stride of rows; 0 = all share them
                staged.rooted,
                staged.before,
                most,
                staged.rows.start,
                self._tables[0].data_ptr(),
                self._tables[1].data_ptr(),
                self._tables[0].shape[1],
                keys.data_ptr(),
                values.data_ptr(),
                cache.capacity,
                cache.in_codes,
                staged.guesses,
                x.data_ptr(),
                address(given.above),
                given.width,
                given.first,
                address(given.sources),
                addressof(boundaries),
                len(taps),
                address(made.tapped),
                address(made.final),
                *made.starts,
                address(made.logits),
                scratch.data_ptr(),
                rows.states,
                threads_for(len(x) * self._layer_weights),
            ),
        )
        if failed:
            raise IndexError(f"a token has no embedding: ids must be from 0 to {self._struct.embeddings - 1}")


def _inputs(
    count: int, hidden: int, dtype: torch.dtype, states: Tensor | ParentStates | TargetStates | None
) -> tuple[Tensor, _PassInputs]:
    """The buffer [T, H] for the states of `count` tokens, filled if they are known, and what they are made of."""
    if isinstance(states, Tensor):
        # a copy, because the pass writes the states that leave the decoder to the same buffer
        return states.to(torch.float32, copy=True).reshape(count, hidden), _PassInputs()
    x = torch.empty(count, hidden)
    if isinstance(states, ParentStates):
        return x, _PassInputs(states.states, states.states.shape[1], states.first)
    taps = None if states is None else states.taps.to(dtype).contiguous()
    return x, _PassInputs(sources=taps)


def _check_positions(embedding: Tensor | PackedLinear, table: Table, form: DecoderForm, dtype: torch.dtype) -> None:
    """Refuse position embeddings unless they have the token embeddings' width and dtype, and cover the limit."""
    alike = (table.width, KINDS[dtype] if isinstance(embedding, PackedLinear) else table.kind)
    positions, limit = form.positions, form.limit
    if positions is not None and Table.of(positions)[2:] != alike:
        raise UnsupportedModelError(f"unsupported position embeddings: {tuple(positions.shape)} {positions.dtype}")
    if positions is not None and not (limit and limit <= len(positions)):
        raise UnsupportedModelError(f"{len(positions)} position embeddings for a limit of {limit}")


def _integers(values: Sequence[int]) -> Array[c_int64]:
    """Numbers as the kernels take them."""
    return (c_int64 * len(values))(*values)
