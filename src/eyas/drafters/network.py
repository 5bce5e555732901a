"""The networks of drafters: the base class of every kind, and the layers of kinds that are decoders.

Decoding and training use a network in the same way: `fuse`, `step`, `logits`. The caller decides what each position
sees: its `attend` gets rotated queries and keys and returns the mixed values. Decoding passes one that uses the slot
cache (`staged_attention`), training one for training-time test. Parameter names follow the `layers.{i}.*` checkpoint
layout.

Shapes: B batch, R rows (a contiguous range of slots), S positions, F staged guesses so far, A taps, Ht target hidden, H
draft hidden, D / Dv head size of keys / values, V / Vd full / draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.drafters.base import Drafter
from eyas.drafters.config import DrafterConfig, GroupedConfig, TransformerConfig
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.drafters.window.layers import SlidingWindow
from eyas.errors import CheckpointError, UnsupportedModelError
from eyas.targets.attention import RaggedLayout, columns_seen, grouped_attention
from eyas.targets.graphs import Compute
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.decoder import DecoderDescription, DecoderForm, Heads, LayerParts, NativeDecoder
from eyas.targets.native.forms import activation_of
from eyas.targets.native.library import PANEL
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed import PIECE
from eyas.targets.native.packed_linears import PackedLinear, matrix_of
from eyas.targets.passes import EmbeddingAndHead
from eyas.targets.slots import KVShape, SlotCache

_LOG = logging.getLogger("eyas")
_PLAIN = DecoderForm()

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, heads, S, D], k [B, kv_heads, S, D], v [B, kv_heads, S, Dv]) -> [B, heads, S, Dv].

Scores are scaled by D ** -0.5; a network that needs another scale applies it to q. Dv may differ from D.
"""

T = TypeVar("T")

Rope = tuple[Tensor, Tensor]
"""The cosines and sines [B, S, D] of the rotation at each position."""


class MaskedPair(NamedTuple):
    """The pair that a network with several guesses per pass reads in the slots after a row's last true pair."""

    token: int
    state: Tensor  # [1, 1, H]


@dataclass(frozen=True)
class SharedParts:
    """The target's embedding and head, for a network without its own. They aren't saved, moved or trained with it."""

    embedding: Tensor | PackedLinear  # [V, H]
    head: Callable[[Tensor], Tensor]  # [..., H] -> [..., Vd]
    linear: nn.Module
    """The linear layer of the head."""
    finish: Callable[[Tensor], Tensor] | None
    """What the head does to that layer's output; None = nothing."""


class SharedEmbedding(nn.Module):
    """The target's embedding in place of an equal one of the drafter's own. Not saved, moved or trained with it."""

    def __init__(self, table: Tensor | PackedLinear) -> None:
        super().__init__()
        self._kept = (table,)  # neither a parameter nor a child module

    @property
    def table(self) -> Tensor | PackedLinear:
        """The embedding [V, H]."""
        return self._kept[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens [...]."""
        return looked_up(self.table, tokens)


class DraftNetwork(nn.Module):
    """Base of all kinds: the vocabulary map, and an embedding and a head that are its own or the target's."""

    config: DrafterConfig
    fixed_tree = Drafter.fixed_tree
    d2t: Tensor  # [Vd] int64: target id - draft id
    t2d: Tensor  # [V] bool: the target ids the draft vocabulary covers

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self._shared: SharedParts | None = None
        if config.embedding == "own":
            self.embed_tokens: nn.Embedding | SharedEmbedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.head == "own":
            self.make_heads()
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def make_heads(self) -> None:
        """Create its own head; only called if it doesn't use the target's."""
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.draft_vocab_size, bias=False)

    @property
    def heads(self) -> list[nn.Linear]:
        """Its own heads over the draft vocabulary, usually one; empty if it uses the target's."""
        return [self.lm_head] if self.config.head == "own" else []

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        """The shapes of the keys and values that each decoder layer caches; empty without attention."""
        return [block.kv_shape for block in decoder_blocks(self)]

    @property
    def layer_windows(self) -> tuple[SlidingWindow | None, ...]:
        """The sliding window of each decoder layer, None = it sees everything; empty if no layer has one."""
        return ()

    @property
    def state_size(self) -> int:
        """The width of the state of a row's last pair that is kept to be fed back."""
        return self.config.hidden_size

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the target token id of every draft id."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in."""
        tensors = (each.dtype for each in chain(self.parameters(), self.buffers()) if each.is_floating_point())
        packed = (part.dtype for part in self.modules() if isinstance(part, PrepackedLinear))  # may be all there is
        return next(chain(tensors, packed))

    def fill(self, tensors: Mapping[str, Tensor], target: EmbeddingAndHead | None = None) -> DraftNetwork:
        """Fill a blank network with exactly these tensors, without copies, and borrow shared parts from `target`.

        Returns the network itself, in inference mode.
        """
        self.load_state_dict(tensors, assign=True)
        if target is not None and "shared" in (self.config.embedding, self.config.head):
            self.borrow(target)
        return self.eval().requires_grad_(False)

    def borrow(self, target: EmbeddingAndHead) -> None:
        """Use the target's embedding and head where this network has none; the vocabulary must be set before.

        Raises CheckpointError if their sizes don't match.
        """
        need = (self.config.vocab_size, self.config.hidden_size)
        model = target.model
        table = matrix_of(model.get_input_embeddings())
        weight = matrix_of(model.get_output_embeddings())
        for part, shared, shape in (
            (EMBEDDING, self.config.embedding, table.shape),
            (HEAD, self.config.head, weight.shape),
        ):
            if shared == "shared" and shape != need:
                raise CheckpointError(
                    f"there is no {part}, and the target's is {' x '.join(map(str, shape))} where the drafter "
                    f"needs {need[0]} x {need[1]}: use the target it was trained for"
                )
        full = self.config.draft_vocab_size == self.config.vocab_size
        rows = model.get_output_embeddings() if full else target.head_rows(self.target_ids)
        finish = None if target.head_is_linear else target.finish
        self._shared = SharedParts(table, partial(target.head, rows=rows), rows, finish)

    def share_equal_embedding(self, target: EmbeddingAndHead) -> None:
        """Use the target's embedding instead of an own one with the same values, a copy that may take a gigabyte."""
        if self.config.embedding != "own":
            return
        own = matrix_of(self.embed_tokens)
        table = matrix_of(target.model.get_input_embeddings())
        if not isinstance(own, Tensor) or table.shape != own.shape:
            return
        for first in range(0, len(own), PIECE):  # a different one is mostly found in the first piece
            rows = own[first : first + PIECE]
            ids = torch.arange(first, first + len(rows), device=target.device)
            if not torch.equal(looked_up(table, ids).to(own.device, own.dtype), rows):
                return
        self.embed_tokens = SharedEmbedding(table)

    def fuse(self, taps: Tensor) -> Tensor:
        """The drafter states [B, S, H] from target taps [B, S, A, Ht]; never applied to states that are fed back."""
        return taps[:, :, 0]

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass over pairs (token i+1, state i) at RoPE positions i.

        tokens, positions [B, S]; hidden [B, S, H]. Returns the state to feed back and the state that `logits` takes,
        both [B, S, H].
        """
        raise NotImplementedError

    def masked_pair(self) -> MaskedPair | None:
        """The pair read in place of a guess and the state before it; None = real guesses, with one pass per level."""
        return None

    def description(self) -> DecoderDescription | None:
        """The layers of `step`, as passes of our own are made of them; None if they aren't Llama-like."""
        return None

    def decoder(self) -> NativeDecoder | None:
        """The layers as one native pass that computes `step`; None if native passes don't support them."""
        return native_decoder(self)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [B, S, H] of target tokens [B, S]."""
        if self.config.embedding == "own":
            out: Tensor = self.embed_tokens(tokens)
            return out.to(self.dtype)
        return looked_up(self.shared_parts().embedding, tokens).to(self.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., Vd] of states [..., H]; gradients flow to `normed`, even through the target's head."""
        out: Tensor = self.lm_head(normed) if self.config.head == "own" else self.shared_parts().head(normed)
        return out

    def shared_parts(self) -> SharedParts:
        """The parts borrowed from the target. Raises CheckpointError if there are none."""
        if self._shared is None:
            raise CheckpointError("this drafter shares its target's embedding or head: give it one with borrow(target)")
        return self._shared


def looked_up(table: Tensor | PackedLinear, tokens: Tensor) -> Tensor:
    """The rows [..., H] of an embedding for `tokens` [...]."""
    return table.lookup(tokens) if isinstance(table, PackedLinear) else F.embedding(tokens, table)


def set_vocabulary(network: DraftNetwork, ids: Tensor) -> None:
    """Let draft id i stand for target id `ids[i]`; ids [Vd] are in ascending order."""
    network.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    network.t2d.fill_(False)
    network.t2d[ids.to(network.t2d.device)] = True


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all its tensors, including the vocabulary map."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def by_layer(kinds: Sequence[T], attend_as: Callable[[T], Attend]) -> Attend:
    """Attention that differs by layer: the kind of each layer, and a function that makes a kind's attention."""
    made = {kind: attend_as(kind) for kind in dict.fromkeys(kinds)}
    if len(made) == 1:
        return made[kinds[0]]
    return lambda layer, q, k, v: made[kinds[layer]](layer, q, k, v)


def decoder_blocks(network: nn.Module) -> list[DecoderBlock]:
    """Its decoder layers, in order."""
    return [part for part in network.modules() if isinstance(part, DecoderBlock)]


def grouped_heads(config: GroupedConfig) -> Heads:
    """The heads of grouped-query attention."""
    return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim**-0.5)


def described(
    network: DraftNetwork, heads: Heads, norm: nn.Module | None, rotary: Any, form: DecoderForm = _PLAIN
) -> DecoderDescription:
    """The description of a network's layers, followed by its head."""
    config = network.config
    layers = [block.parts() for block in decoder_blocks(network)]
    for index, window in enumerate(network.layer_windows):
        if window is not None:
            size, anchored, whole_draft = window
            layers[index] = replace(layers[index], window=size, anchored=anchored, whole_draft=whole_draft)
    shared = None if config.embedding == config.head == "own" else network.shared_parts()
    if config.embedding == "own" or shared is None:
        own = network.embed_tokens
        embedding = own.table if isinstance(own, SharedEmbedding) else matrix_of(own)
    else:
        embedding = shared.embedding
    head = network.lm_head if config.head == "own" or shared is None else shared.linear
    finish = None if config.head == "own" or shared is None else shared.finish
    form = form._replace(activation=activation_of(layers[0].mlp.act), finish=finish)
    ropes = [partial(rotary, torch.empty(0, dtype=network.dtype, device=network.target_ids.device))]
    return DecoderDescription(layers, norm, head, heads, ropes, embedding, network.dtype, form)


def native_decoder(network: DraftNetwork) -> NativeDecoder | None:
    """A network's layers as a native pass; None if native passes don't support them.

    What they don't compute of a head or of the fusing of taps is left to the caller.
    """
    try:
        description = network.description()
    except UnsupportedModelError as error:
        _LOG.debug("no native passes of the drafter: %s", error)
        return None
    if description is None or description.form.mix_norms or description.heads.latent.rank:
        return None
    form, head = description.form, description.head
    fuse = form.fuse
    if fuse is not None and (
        fuse.norms or not isinstance(fuse.linear, NativeLinear) or fuse.linear.in_features % PANEL
    ):
        form = form._replace(fuse=None)
    if form.finish is not None or not isinstance(head, NativeLinear):
        head = None
    try:
        return NativeDecoder(*description._replace(head=head, form=form))
    except UnsupportedModelError as error:
        _LOG.debug("no native passes of the drafter: %s", error)
        return None


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` that computes in its weight's dtype, even under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]  # transformers ships no types
    """RoPE tables of any type that transformers knows; frequencies stay float32 when the network is cast."""

    def __init__(self, config: TransformerConfig) -> None:
        sizes = LlamaConfig(
            hidden_size=config.rope_size,  # of one head: the tables are the same for all
            num_attention_heads=1,
            head_dim=config.rope_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        with torch.device("cpu"):  # computed, never loaded: real even if the network is on the meta device
            super().__init__(sizes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # in bf16 a frequency is off by up to 0.4%: after a few hundred positions the angle is meaningless
        return super()._apply(lambda t: t.to(fn(t).device), recurse)

    def rotated_by(self, keys: Tensor, by: int) -> Tensor:
        """Rotate already rotated keys [..., D] by another `by` positions; of wider keys only the last channels.

        This is only correct if the frequencies don't depend on the length of a sequence.
        """
        precise = torch.promote_types(keys.dtype, torch.float32)
        angles = (by * self.inv_freq.double()).to(keys.device)
        cos = angles.cos().to(precise)
        sin = angles.sin().to(precise)
        plain, left, right = keys.to(precise).tensor_split(
            (keys.shape[-1] - 2 * len(cos), keys.shape[-1] - len(cos)), -1
        )
        return torch.cat((plain, left * cos - right * sin, right * cos + left * sin), dim=-1).to(keys.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output."""

    def __init__(self, config: GroupedConfig, width: int, qkv_bias: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, q_size, bias=bias or qkv_bias)
        self.k_proj = nn.Linear(width, kv_size, bias=bias or qkv_bias)
        self.v_proj = nn.Linear(width, kv_size, bias=bias or qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()

    @property
    def kv_shape(self) -> tuple[KVShape, KVShape]:
        """The shapes of the keys and values that a cache holds."""
        shape = KVShape(self.kv_heads, self.head_dim)
        return shape, shape

    def forward(self, x: Tensor, rope: Rope, layer: int, attend: Attend) -> Tensor:
        """x [B, S, width] -> [B, S, H]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(layer, rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """The gated MLP of a decoder layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """States [B, S, H] -> the update [B, S, H] to add to them."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderBlock(nn.Module):
    """Attention and MLP of a decoder layer; subclasses decide what enters the attention."""

    def __init__(self, config: TransformerConfig, index: int, attention: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.self_attn = attention
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def kv_shape(self) -> tuple[KVShape, KVShape]:
        """The shapes of this layer's keys and values in a cache."""
        shape: tuple[KVShape, KVShape] = self.self_attn.kv_shape  # type: ignore[assignment]  # any attention here
        return shape

    def mix(self, x: Tensor, residual: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Attention over x [B, S, width], then the MLP, both added to residual [B, S, H]."""
        residual = residual + self.self_attn(x, rope, self.index, attend)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out

    def parts(self) -> LayerParts:
        """The layer in the form that native passes take."""
        raise NotImplementedError


class DecoderLayer(DecoderBlock):
    """A pre-norm decoder layer; EAGLE-1's first one has no norm at its input."""

    def __init__(self, config: TransformerConfig, index: int, attention: nn.Module, input_norm: bool = True) -> None:
        super().__init__(config, index, attention)
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, eps=config.rms_norm_eps) if input_norm else nn.Identity()

    def parts(self) -> LayerParts:
        norm = None if isinstance(self.input_layernorm, nn.Identity) else self.input_layernorm
        return LayerParts(self.self_attn, self.mlp, norm, self.post_attention_layernorm)

    def forward(self, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """The residual stream [B, S, H] entering the layer -> the one leaving it."""
        return self.mix(self.input_layernorm(hidden), hidden, rope, attend)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE (half-split layout) to x [B, heads, S, D] with cos, sin [B, S, D]."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class StagedPass(NamedTuple):
    """Where a pass of the network's modules stages its keys and values, and what its tokens see."""

    lengths: Tensor  # [R] the number of pairs that were read
    seen: Tensor  # [R or 1, S, F] bool: the staged columns that each token sees, in addition to the row's own pairs
    before: int = 0  # columns of each row that earlier passes staged
    layout: RaggedLayout | None = None  # of concatenated rows
    layer: int = 0  # the slot cache's layer that is the network's first
    first: int = 0  # the first of a row's own pairs that is seen
    end: int | None = None  # the number of columns that are read, if fixed
    level: int = 0  # of the draft; the root's children are level 0
    sight: WindowView | None = None  # in a sliding window; None = all positions are seen


class WindowView(NamedTuple):
    """How far back the tokens of a pass see."""

    window: SlidingWindow
    positions: Tensor  # [R, S]
    first: Tensor  # [R, S or 1] the position of the first guess of the draft that each is of, or that follows it

    def of(self, columns: Tensor) -> Tensor:
        """[R, 1, S, n] bool: which of a row's columns [n], whose positions are their indices, it sees."""
        queries, first = (each[:, None, :, None] for each in (self.positions, self.first))
        return self.window.near(queries, columns, first)


class RecordedView(NamedTuple):
    """A recorded draft's view of the cache: the columns that its passes read, and how many of them are committed."""

    end: int
    lengths: Tensor  # [R]


def run_pass(
    cache: SlotCache,
    kind: Hashable,
    rows: range,
    inputs: Sequence[Tensor],
    compute: Compute,
    staged: int,
    layout: RaggedLayout | None = None,
    within: RecordedView | None = None,
) -> tuple[Tensor, ...]:
    """Run the modules up to column `staged` after each row's pairs: as a recorded pass if possible."""
    if within is not None:
        return compute(rows, *within, *inputs)
    if cache.graphs is not None and layout is None:
        done = cache.graphs.run(kind, cache, rows, staged, inputs, compute)
        if done is not None:
            return done
    return compute(rows, None, cache.device_lengths(rows), *inputs)


def staged_attention(cache: SlotCache, rows: range, stage: StagedPass) -> Attend:
    """Attention that stages its keys and values where `stage` says."""
    cache.reserve(cache.start(rows) + stage.seen.shape[2], stage.before)
    width = stage.seen.shape[2] - stage.before
    staging = cache.staging(rows, width, stage.before, stage.lengths, stage.end)
    columns = torch.arange(staging.end, device=stage.lengths.device)
    seen = columns_seen(stage.lengths, stage.seen, columns).unsqueeze(1)
    layout = stage.layout
    if stage.first:
        seen = seen & ((columns >= stage.first) | (columns >= stage.lengths.unsqueeze(1))).view(len(rows), 1, 1, -1)
    if stage.sight is not None:
        seen = seen & stage.sight.of(columns)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout is not None:
            q = layout.pad_heads(q)
            k = layout.pad_heads(k)
            v = layout.pad_heads(v)
        keys, values = cache.write(stage.layer + layer, k, v, staging)
        out = grouped_attention(q, keys, values, seen)  # [R, heads, S, Dv]
        return out if layout is None else layout.gather(out.transpose(1, 2)).transpose(1, 2)

    return attend
