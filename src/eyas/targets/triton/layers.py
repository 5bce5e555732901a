"""The layers of a Llama-like decoder on a GPU, a target's or a drafter's, as Triton kernels take and run them.

The kernels read the modules' weights. Queries, keys and values of a layer come from one product, so these weights are
put side by side, and the modules keep them as parts of the whole.

Shapes: R rows, Q columns of a pass, T tokens, H hidden size, W width of a drafter's first input; of latent attention L
size of a latent, P features with RoPE, N other features of a query, V size of a value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from triton.errors import TritonError
from typing_extensions import Self

from eyas.errors import UnsupportedModelError
from eyas.targets.attention import RaggedLayout
from eyas.targets.native.decoder import DecoderDescription, LayerParts
from eyas.targets.native.forms import NormForm
from eyas.targets.native.latent import LatentHeads
from eyas.targets.native.layer_trials import shortened
from eyas.targets.native.library import Activation
from eyas.targets.slots import KVShape, SlotCache
from eyas.targets.triton.attention import Heads, Sight, Tokens, attend, attend_placed
from eyas.targets.triton.linear import Norm, Weight, linear, linear_by_head, on_device_of
from eyas.targets.triton.norm import normalize
from eyas.targets.triton.packed_linears import TritonInt8Linear
from eyas.tree.draft_tree import cells


class LatentWeights(NamedTuple):
    """The weights and sizes of latent attention, whose up-projections are absorbed; see `LatentHeads`."""

    queries: Weight
    query_norm: Norm | None
    query_up: Weight | None
    """The second product that makes queries; None = there is only one."""
    down: Weight
    """Makes the latent and the rotated part of the key."""
    norm: Norm
    absorb: Tensor  # [heads, L, N] of the plain part of a query, to the latent space
    expand: Tensor  # [heads, V, L] of mixed latents, to values
    pairs: bool

    @classmethod
    def of(cls, attention: Any, sizes: LatentHeads, heads: int, normed: Callable[[nn.Module], Norm | None]) -> Self:
        """Of an attention module with DeepSeek's parameter names."""
        norm = normed(attention.kv_a_layernorm)
        assert norm is not None
        up = attention.kv_b_proj.weight.detach().unflatten(0, (heads, -1))  # [heads, N + V, L]
        plain, values = up.split([up.shape[1] - sizes.value_size, sizes.value_size], dim=1)
        one = not sizes.query_rank
        return cls(
            Weight.of(attention.q_proj if one else attention.q_a_proj),
            None if one else normed(attention.q_a_layernorm),
            None if one else Weight.of(attention.q_b_proj),
            Weight.of(attention.kv_a_proj_with_mqa),
            norm,
            plain.transpose(1, 2).contiguous(),
            values.contiguous(),
            sizes.pairs,
        )


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's weights and norms."""

    qkv: Weight | None
    """None = attention is latent."""
    latent: LatentWeights | None
    out: Weight
    gate: Weight | None
    up: Weight
    down: Weight
    input_norm: Norm | None
    mlp_norm: Norm | None
    embedding_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_out_norm: Norm | None
    sinks: Tensor | None  # [heads] float32
    rope: int | None
    """Index of the RoPE table; None = no RoPE."""
    window: int
    """Number of latest positions that a token sees; 0 = all."""
    attention_factor: float
    mlp_factor: float
    """Factors of what attention and MLP add to the residual."""


@contextmanager
def without_triton_errors() -> Iterator[None]:
    """Raise UnsupportedModelError where a kernel can't be compiled for this device, or needs more than it has."""
    try:
        yield
    except TritonError as error:
        raise UnsupportedModelError(f"triton: {type(error).__name__}: {error}") from error


class TritonLayers:
    """The layers of a decoder, its embedding and its RoPE tables."""

    def __init__(self, description: DecoderDescription) -> None:
        """Raises UnsupportedModelError for parts that the kernels don't compute; no weight has been moved then."""
        layers, norm, _, heads, self._rope_tables, embedding, self._dtype, form = description
        if heads.gated or form.activation == Activation.CLIPPED:
            raise UnsupportedModelError("it has parts that only passes on a CPU compute")
        if not isinstance(embedding, Tensor) or not embedding.is_contiguous():
            raise UnsupportedModelError("its embedding isn't row-major")
        for layer in layers:
            _check(layer)
        self._latent = heads.latent
        self._heads = Heads(heads.queries, heads.keys, heads.size, heads.scale, heads.softcap, heads.interleaved)
        self._activation = form.activation
        self._in_parallel = form.parallel_residual
        self._limit = form.limit
        self._embedding = embedding
        self._norm = self._normed(norm)
        for linears in map(_linears, layers):
            for module in linears:
                Weight.of(module)
        self._layers = [self._layer(layer) for layer in layers]
        self._tables: list[tuple[Tensor, Tensor]] = []  # [positions, rotated] of each RoPE
        self._outgrown: list[Any] = []  # recorded passes may still read them

    @property
    def _device(self) -> torch.device:
        return self._embedding.device

    def _normed(self, norm: nn.Module | None) -> Norm | None:
        if norm is None or isinstance(norm, nn.Identity):
            return None
        return Norm.of(NormForm.of(norm, self._dtype), self._dtype)

    def _layer(self, layer: LayerParts) -> DecoderLayer:
        attention, mlp = layer.attention, layer.mlp
        input_norm, mlp_norm, embedding_norm, q_norm, k_norm, attention_out_norm, mlp_out_norm = map(
            self._normed, layer.norms
        )
        gate: Weight | None = None
        if hasattr(mlp, "gate_up_proj"):
            both = Weight.of(mlp.gate_up_proj)
            gate, up = (both.rows(first, both.outputs // 2) for first in (0, both.outputs // 2))
        else:
            gate, up = Weight.of(mlp.gate_proj) if hasattr(mlp, "gate_proj") else None, Weight.of(mlp.up_proj)
        qkv: Weight | None = None
        latent: LatentWeights | None = None
        if self._latent.rank:
            latent = LatentWeights.of(attention, self._latent, self._heads.queries, self._normed)
        elif hasattr(attention, "qkv_proj"):
            qkv = Weight.of(attention.qkv_proj)
        else:
            qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        if qkv is not None and qkv.outputs != self._heads.width:
            raise UnsupportedModelError(f"{qkv.outputs} queries, keys and values for heads of {self._heads.size}")
        return DecoderLayer(
            qkv, latent, Weight.of(attention.o_proj), gate, up, Weight.of(mlp.down_proj), input_norm, mlp_norm,
            embedding_norm, q_norm, k_norm, attention_out_norm, mlp_out_norm,
            None if layer.sinks is None else layer.sinks.detach().float().contiguous(), layer.rope, layer.window or 0,
            layer.factors.attention, layer.factors.mlp,
        )  # fmt: skip

    def _tokens(
        self, rows: range, end: int, lengths: Tensor, positions: Tensor, paths: Tensor | None,
        layout: RaggedLayout | None, before: int = 0,
    ) -> Tokens:  # fmt: skip
        """Tokens at `positions` [R, Q], behind the `lengths` [R] committed columns of `rows`."""
        own = cells(*positions.shape, self._device)
        if layout is None:
            of_tokens, token_of = own.flatten(), own
        else:
            of_tokens = layout.cell_index
            token_of = torch.full_like(own.flatten(), -1)
            token_of = token_of.scatter(0, of_tokens, torch.arange(len(of_tokens), device=self._device)).view(own.shape)
        rotations = positions if self._limit is None else positions.clamp(max=self._limit - 1)
        narrow = (part.to(torch.int32).contiguous() for part in (of_tokens, token_of, lengths, rotations))
        of_tokens, token_of, lengths, rotations = narrow
        slots = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=self._device)
        return Tokens(of_tokens, token_of, slots, lengths, rotations, paths, end, before)

    def _run_layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        at: Tokens,
        sight: Sight,
        keys: Tensor,
        values: Tensor,
        tables: Sequence[tuple[Tensor, Tensor]],
        wide: Tensor | None = None,
    ) -> Tensor:
        """The states [T, H] that leave a layer, of those x that enter it; attention reads `wide` [T, W] if given."""
        rope = None if layer.rope is None else tables[layer.rope]
        given = (x, layer.input_norm) if wide is None else (wide, None)
        if layer.latent is None:
            mixed = self._attend(layer, *given, at, sight, keys, values, rope)
        else:
            mixed = self._attend_latent(layer.latent, *given, at, sight, keys, values, rope)
        if self._in_parallel:
            addend = linear(mixed, layer.out, factor=layer.attention_factor)
            return self._run_mlp(layer, x, x, addend)
        if layer.attention_out_norm is None:
            x = linear(mixed, layer.out, residual=x, factor=layer.attention_factor)
        else:
            x = normalize(linear(mixed, layer.out), layer.attention_out_norm, x, layer.attention_factor)
        return self._run_mlp(layer, x, x, None)

    def _attend(
        self,
        layer: DecoderLayer,
        x: Tensor,
        norm: Norm | None,
        at: Tokens,
        sight: Sight,
        keys: Tensor,
        values: Tensor,
        rope: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Attention [T, heads * D] over a layer's input x [T, W] after its norm."""
        assert layer.qkv is not None
        qkv = linear(x, layer.qkv, norm)
        q_norm = layer.q_norm
        k_norm = layer.k_norm
        if q_norm is not None and k_norm is not None and q_norm.width != self._heads.size:  # over all heads together
            first = self._heads.queries * self._heads.size
            second = first + self._heads.keys * self._heads.size
            normalize(qkv[:, :first], q_norm, made=qkv[:, :first])
            normalize(qkv[:, first:second], k_norm, made=qkv[:, first:second])
            q_norm = k_norm = None
        return attend(qkv, self._heads, keys, values, at, sight, rope, q_norm, k_norm, layer.sinks)

    def _attend_latent(
        self,
        weights: LatentWeights,
        x: Tensor,
        norm: Norm | None,
        at: Tokens,
        sight: Sight,
        keys: Tensor,
        values: Tensor,
        rope: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """`_attend`, [T, heads * V], where all heads share one latent; what isn't a sum is PyTorch's."""
        assert rope is not None
        rank = self._latent.rank
        q = linear(x, weights.queries, norm)
        q = q if weights.query_up is None else linear(q, weights.query_up, weights.query_norm)
        q_plain, q_turned = torch.unflatten(q, 1, (self._heads.queries, -1)).tensor_split(
            (-self._latent.rotated,), dim=2
        )
        down = linear(x, weights.down, norm)
        latent = normalize(down[:, :rank], weights.norm)
        cell = at.cells.long()
        turns = at.rotations.flatten()[cell]
        cosine, sine = (table[turns].to(x.dtype).unsqueeze(1) for table in rope)  # [T, 1, P]
        q_turned, k_turned = (
            _turned(part, cosine, sine, weights.pairs) for part in (q_turned, down[:, rank:].unsqueeze(1))
        )
        row = cell // at.columns
        column = at.lengths[row].long() + at.before + cell % at.columns
        slot = at.slots[row].long()
        keys[slot, 0, column] = torch.cat((latent, k_turned[:, 0]), dim=1)
        values[slot, 0, column] = latent
        wanted = torch.cat((linear_by_head(q_plain.contiguous(), weights.absorb), q_turned), dim=2)
        mixed = attend_placed(wanted, self._heads, keys, values, at, sight)
        return linear_by_head(mixed.view(len(x), -1, rank), weights.expand).flatten(1)

    def _run_mlp(self, layer: DecoderLayer, x: Tensor, residual: Tensor, addend: Tensor | None) -> Tensor:
        if layer.gate is None:
            inner = linear(x, layer.up, layer.mlp_norm, activation=self._activation)
        else:
            inner = linear(x, layer.gate, layer.mlp_norm, layer.up, self._activation)
        if layer.mlp_out_norm is None:
            return linear(inner, layer.down, addend=addend, residual=residual, factor=layer.mlp_factor)
        return normalize(linear(inner, layer.down), layer.mlp_out_norm, residual, layer.mlp_factor)

    def _grow(self, positions: int) -> None:
        """Extend the RoPE tables to at least `positions`, but not beyond the longest sequence."""
        wanted = min(positions, self._limit or positions)
        if self._rope_tables and (not self._tables or len(self._tables[0][0]) < wanted):
            self._outgrown.append(self._tables)
            self._tables = self._tables_of(torch.arange(wanted, device=self._device))

    def _tables_of(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines [S, rotated] at positions [S], for each RoPE."""
        made = [tables(positions.unsqueeze(0)) for tables in self._rope_tables]
        return [(cosines[0].float().contiguous(), sines[0].float().contiguous()) for cosines, sines in made]

    @without_triton_errors()
    @torch.inference_mode()
    def alone(
        self, index: int, positions: Tensor, rope: int, cut: int, states: Tensor,
        shapes: tuple[KVShape, KVShape] | None, wide: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `TriedDecoder`; for `wide`, see `_run_layer`."""
        count = len(states)
        cache = SlotCache([shapes], 1, torch.float32, states.device, count)
        steps = torch.arange(count, device=states.device).unsqueeze(0)
        unlimited = copy.copy(self)
        unlimited._limit = None
        at = unlimited._tokens(range(1), count, steps.new_zeros(1), steps, None, None)
        layer = self._layers[index]
        layer = replace(layer, rope=None if rope < 0 else rope)
        sight = window_sight(at.rotations, layer.window and shortened(layer.window, cut))
        tables = self._tables_of(positions)
        with on_device_of(states):
            return unlimited._run_layer(layer, states, at, sight, *cache.of_layer(0), tables, wide)


def window_sight(positions: Tensor, window: int) -> Sight:
    """What tokens at `positions` [R, Q] int32 see: themselves and what comes before, the latest `window` (0 = all)."""
    return Sight(positions, (positions - (window - 1)).clamp(min=0) if window else None)


def _check(layer: LayerParts) -> None:
    """Raise UnsupportedModelError for a layer with parts that the kernels don't compute."""
    odd = (layer.recurrent, layer.routed)
    if layer.attention is None or layer.mlp is None or any(part is not None for part in odd):
        raise UnsupportedModelError("a layer has other parts than attention and an MLP")
    if layer.factors.gate != 1.0:
        raise UnsupportedModelError("gates of an MLP are scaled")


def _linears(layer: LayerParts) -> list[nn.Module]:
    """The linears of a layer."""
    names = (
        "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj",
        "up_proj", "gate_up_proj", "down_proj",
    )  # fmt: skip
    return [getattr(part, name) for part in (layer.attention, layer.mlp) for name in names if hasattr(part, name)]


def _joined(modules: Sequence[nn.Module]) -> Weight:
    """The weights of linears with the same input as one weight; each module keeps its own as a part of it."""
    whole = Weight.joined([Weight.of(module) for module in modules])
    first = 0
    for module in modules:
        part = whole.rows(first, Weight.of(module).outputs)
        first += part.outputs
        if isinstance(module, nn.Linear):
            module.weight.data = part.values
        elif isinstance(module, TritonInt8Linear):
            module.hold(replace(part, bias=module.bias))
    return whole


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, pairs: bool) -> Tensor:
    """Apply RoPE to x [T, heads, P], whose rotated features are side by side if in `pairs`."""
    left, right = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
    return torch.cat((left, right), dim=-1) * cosine + torch.cat((-right, left), dim=-1) * sine
