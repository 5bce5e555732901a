"""A decoder of Llama's kind as one native pass: which models are such, and how a pass over the slot cache is run.

Layers are recognised by what they consist of, never by name; whether the pass computes what the modules compute is
tried by whoever uses it (`logits_agree`). The modules stay: they hold the weights, and training runs them.

Shapes: T tokens of a pass, R rows, Q columns of a row, S columns staged so far, those of the pass included, A taps,
H hidden size, V outputs of the head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from ctypes import Array, addressof, byref, c_int64
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import attention_plan, context_limit, decoder_layers, text_decoder
from eyas.targets.native.library import PANEL, Decoder, Layer, Linear, NativePass, kernels
from eyas.targets.native.linears import NativeLinear, address, threads_for
from eyas.targets.slots import SlotCache

_LOG = logging.getLogger("eyas")

RopeTables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [1, S] -> cosines and sines [1, S, rotated], as the model's own rotary embedding gives them."""


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer, taken apart."""

    attention: Any
    mlp: Any
    input_norm: nn.Module | None
    mlp_norm: nn.Module
    embedding_norm: nn.Module | None = None
    """The norm of the embeddings, in a drafter's first layer that reads them beside its state."""
    normed_residual: bool = False
    """Whether the layer adds to its normed input."""
    window: int | None = None
    """Number of latest positions that a token sees; None = all."""


class Heads(NamedTuple):
    """Sizes of a decoder's attention."""

    queries: int
    keys: int
    size: int
    scale: float


class Staged(NamedTuple):
    """Where the tokens of a pass go in the cache, and what they see there: the committed columns and their own path."""

    rows: range
    columns: int
    """Q, the cells of each row."""
    cells: Tensor | None  # [T] row * Q + column of each token; None = every cell has one
    lengths: Sequence[int]
    """[R] committed columns."""
    parents: Tensor | None  # [R or 1, S] the staged column that each follows, -1 = none; None = the one before it
    start: int
    """The first staged column."""
    first: int
    """The first column that the pass writes; those from `start` on were staged before."""


class Above(NamedTuple):
    """The states of the level above, from which guesses take that of their parent."""

    states: Tensor  # [R, W, H] float32
    first: int
    """The staged column of the first; -1 if they are the states of committed tokens."""


class Outcome(NamedTuple):
    """What a pass computes, in the model's dtype."""

    states: Tensor  # [T, H] float32, what a drafter is fed back: of the last layer, or after the norm
    final: Tensor | None  # [T, H] after the final norm
    logits: Tensor | None  # [T, V]
    taps: Tensor  # [T, A, H]


class NativeDecoder:
    """The layers, final norm and head of a decoder, as the kernels take them."""

    def __init__(
        self, layers: Sequence[LayerParts], norm: nn.Module | None, head: nn.Module | None, heads: Heads,
        rope: RopeTables, embedding: Tensor, dtype: torch.dtype, *, mix: nn.Module | None = None,
        returns_normed: bool = False, limit: int | None = None,
    ) -> None:  # fmt: skip
        """Without a `norm` the final states are those that leave the last layer; without a `head` there are no logits.

        `embedding` [tokens, H] is row-major. `mix` makes a drafter's first input of embedding and state side by side;
        `returns_normed` says which states it is fed back. `limit` is the longest sequence: positions stay below it, and
        some RoPE tables change all their entries beyond it. Raises UnsupportedModelError for layers that the kernels
        don't compute, and where there are none.
        """
        found = kernels()
        if found is None:
            raise UnsupportedModelError("there are no native kernels on this machine")
        self._kernels = found
        self._kept: list[Any] = []  # what the structs point to
        self._rope, self._dtype, self._limit = rope, dtype, limit
        self._tables = (torch.empty(0, 0), torch.empty(0, 0))
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"{dtype} is neither float32 nor bfloat16")
        norms = (norm, *(part for layer in layers for part in _norms(layer)))
        eps = {_epsilon(part) for part in norms if part is not None}
        if len(eps) != 1:
            raise UnsupportedModelError("norms differ in their epsilon")
        self.hidden = _weight(layers[0].mlp_norm).shape[0]
        self.intermediate: int = layers[0].mlp.gate_proj.out_features
        self.outputs: int = 0 if head is None else head.out_features  # type: ignore[assignment]  # of any module
        kinds = (torch.float32, torch.bfloat16)
        if embedding.dtype not in kinds or embedding.shape[1] != self.hidden or not embedding.is_contiguous():
            raise UnsupportedModelError(f"an embedding of {tuple(embedding.shape)} {embedding.dtype}")
        self._kept.append(embedding)
        self._layers = (Layer * len(layers))(*(self._layer(layer, heads) for layer in layers))
        self._grow(256)
        fits = (self.hidden % PANEL, self.intermediate % PANEL, heads.size % self._kernels.lanes)
        if any(fits) or heads.queries % heads.keys or self._tables[0].shape[1] % 2:
            raise UnsupportedModelError(f"sizes {self.hidden}, {self.intermediate}, {heads.size} don't fit the vectors")
        self._struct = Decoder(
            self._layers, len(layers), self.hidden, heads.queries, heads.keys, heads.size, self.intermediate,
            self._tables[0].shape[1], dtype == torch.bfloat16, eps.pop(), heads.scale, embedding.data_ptr(),
            len(embedding), embedding.dtype == torch.bfloat16,
            Linear() if mix is None else self._linear(mix, self.hidden, 2 * self.hidden),
            None if norm is None else self._vector(_weight(norm)), returns_normed,
            Linear() if head is None else self._linear(head, self.outputs, self.hidden), limit or 0,
        )  # fmt: skip
        self._layer_weights = self._layers[0].weights
        self._scratch = self._kernels.token_scratch(byref(self._struct))

    def _layer(self, layer: LayerParts, heads: Heads) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        width = 2 * self.hidden if layer.embedding_norm is not None else self.hidden
        queries, keys = heads.queries * heads.size, heads.keys * heads.size
        return Layer(
            self._linear(attention.q_proj, queries, width),
            self._linear(attention.k_proj, keys, width),
            self._linear(attention.v_proj, keys, width),
            self._linear(attention.o_proj, self.hidden, queries),
            self._linear(mlp.gate_proj, self.intermediate, self.hidden),
            self._linear(mlp.up_proj, self.intermediate, self.hidden),
            self._linear(mlp.down_proj, self.hidden, self.intermediate),
            *(None if norm is None else self._vector(_weight(norm)) for norm in _norms(layer)),
            layer.window or 0,
            layer.normed_residual,
        )

    def _linear(self, module: nn.Module, outputs: int, inputs: int) -> Linear:
        if not isinstance(module, NativeLinear) or (module.out_features, module.in_features) != (outputs, inputs):
            raise UnsupportedModelError(f"{module} is no native linear of {inputs} to {outputs} features")
        self._kept.append(module)
        return module.struct

    def _vector(self, values: Tensor) -> int:
        """The address of float32 values, which are kept."""
        self._kept.append(values.detach().float().contiguous())
        address: int = self._kept[-1].data_ptr()
        return address

    def _grow(self, positions: int) -> None:
        """Extend the RoPE tables to at least `positions`, but not beyond the longest sequence."""
        most = self._limit or positions + 1024
        if min(positions, most) > len(self._tables[0]):
            tables = self._rope(torch.arange(min(positions + -positions % 1024, most)).unsqueeze(0))
            cosines, sines = (table.to(self._dtype)[0].float().contiguous() for table in tables)
            self._tables = (cosines, sines)

    @torch.inference_mode()
    def run(
        self, cache: SlotCache, staged: Staged, tokens: Tensor, states: Tensor | Above | None = None,
        taps: Sequence[int] = (), final: bool = False, logits: bool = False,
    ) -> Outcome:  # fmt: skip
        """Run `tokens` [T]; nothing is committed. IndexError for a token without embedding.

        `states` are those of a drafter's tokens [T, H], or of their parents. `taps` are boundaries; `final` and
        `logits` say what is wanted besides.
        """
        count = tokens.numel()
        above: tuple[int | None, int, int] = (None, 0, 0)
        if isinstance(states, Tensor):
            x = states.to(torch.float32, copy=True).contiguous()
        else:
            x = torch.empty(count, self.hidden)
            if states is not None:
                above = (states.states.data_ptr(), states.states.shape[1], states.first)
        tokens = tokens.contiguous()
        parents = None if staged.parents is None else staged.parents.contiguous()
        self._grow(staged.first + staged.columns + 1)
        keys, values = cache.addresses()
        lengths, boundaries = _integers(staged.lengths), _integers(taps)
        tapped = torch.empty(count, len(taps), self.hidden, dtype=self._dtype)
        normed = torch.empty(count, self.hidden, dtype=self._dtype) if final else None
        scores = torch.empty(count, self.outputs, dtype=self._dtype) if logits else None
        scratch = torch.empty(count * self._scratch)
        failed = self._kernels.decoder(
            byref(self._struct),
            NativePass(
                count, staged.columns, address(staged.cells), tokens.data_ptr(), addressof(lengths),
                address(parents), 0 if parents is None or len(parents) == 1 else parents.shape[1],
                staged.start, staged.first, staged.rows.start, self._tables[0].data_ptr(),
                self._tables[1].data_ptr(), keys.data_ptr(), values.data_ptr(), cache.capacity, x.data_ptr(),
                *above, addressof(boundaries), len(taps), tapped.data_ptr(), address(normed), address(scores),
                scratch.data_ptr(), threads_for(count * self._layer_weights),
            ),
        )  # fmt: skip
        if failed:
            raise IndexError(f"a token has no embedding: ids must be from 0 to {self._struct.embeddings - 1}")
        return Outcome(x, normed, scores, tapped)


def _integers(values: Sequence[int]) -> Array[c_int64]:
    """Numbers as the kernels take them."""
    return (c_int64 * len(values))(*values)


def transformers_decoder(model: Any) -> NativeDecoder | None:
    """A transformers causal LM whose linears are native as a native decoder; None for other kinds of layers."""
    try:
        return _transformers_decoder(model)
    except (UnsupportedModelError, AttributeError, TypeError) as error:
        _LOG.debug("no native passes: %s", error)
        return None


def _transformers_decoder(model: Any) -> NativeDecoder:
    base, config = text_decoder(model), model.config.get_text_config()
    layers, plan = decoder_layers(model, config.num_hidden_layers), attention_plan(config)
    types = config.layer_types if plan.hybrid else list(plan.windows) * len(layers)
    windows = [plan.windows[kind] for kind in types]
    parts = []
    layer: Any
    for layer, window in zip(layers, windows, strict=True):
        _check_children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
        _check_children(layer.self_attn, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm", "rotary_emb"})
        _check_children(layer.mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
        check_silu(layer.mlp.act_fn)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        parts.append(LayerParts(layer.self_attn, layer.mlp, *norms, window=window))
    _check_children(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    if type(base.embed_tokens) is not nn.Embedding:
        raise UnsupportedModelError(f"{type(base.embed_tokens).__name__} is no plain embedding")
    attention: Any = layers[0].self_attn
    size = attention.head_dim
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, size, float(attention.scaling))
    probe = torch.empty(0, dtype=model.dtype)
    return NativeDecoder(
        parts, base.norm, model.get_output_embeddings(), heads,
        lambda positions: base.rotary_emb(probe, positions), base.embed_tokens.weight.detach(), model.dtype,
        limit=context_limit(config),
    )  # fmt: skip


def _check_children(module: nn.Module, needed: set[str], allowed: Collection[str] = ()) -> None:
    found = {name for name, _ in module.named_children()}
    if not needed <= found or found - needed - set(allowed):
        raise UnsupportedModelError(f"{type(module).__name__} has the parts {sorted(found)}")


def check_silu(activation: Any) -> None:
    """Raise UnsupportedModelError unless an activation is SiLU."""
    x = torch.linspace(-4, 4, 9)
    if not torch.allclose(activation(x), nn.functional.silu(x), atol=1e-5):
        raise UnsupportedModelError("the MLP's activation isn't SiLU")


def _norms(layer: LayerParts) -> tuple[nn.Module | None, ...]:
    """A layer's norms in the order of the kernels' struct; None for those it hasn't."""
    of_heads = (getattr(layer.attention, name, None) for name in ("q_norm", "k_norm"))
    found = (None if isinstance(norm, nn.Identity) else norm for norm in of_heads)
    return (layer.input_norm, layer.mlp_norm, layer.embedding_norm, *found)


def _weight(norm: nn.Module) -> Tensor:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or getattr(norm, "bias", None) is not None:
        raise UnsupportedModelError(f"{type(norm).__name__} is no RMSNorm")
    return weight


def _epsilon(norm: nn.Module) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        raise UnsupportedModelError(f"{type(norm).__name__} has no epsilon")
    return eps
