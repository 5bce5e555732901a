"""Multi-head latent attention (DeepSeek-V2 and its successors) as the kernels take it; see `kernels/latent.h`.

Shapes: T tokens, L size of a latent, P features with RoPE, D = N + P size of a query, V size of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import logits_agree
from eyas.targets.native.forms import NormForm
from eyas.targets.native.library import MAX_ROTATED, PANEL, Latent, Linear, kernels
from eyas.targets.native.linears import NativeLinear, as_linear
from eyas.targets.transformers_names import cache_kwargs

_INPUTS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
PARTS = ({"q_proj", *_INPUTS}, {"q_a_proj", "q_a_layernorm", "q_b_proj", *_INPUTS})
"""The modules of latent attention: one linear makes the queries, or two with a norm between them."""


class LatentHeads(NamedTuple):
    """Sizes and RoPE form of latent attention; all but the last in the order of the kernels' `Decoder`."""

    rank: int = 0
    """L; 0 = attention isn't latent."""
    query_rank: int = 0
    """Inputs of the second linear that makes queries; 0 = there is only one linear."""
    value_size: int = 0
    pairs: bool = False
    """Whether RoPE rotates neighboring features, not corresponding features of two halves."""
    exact_rope: bool = False
    """Whether RoPE's tables and products are float32, and only its result is rounded."""
    eps: float = 0.0
    rotated: int = 0
    """P."""


class _Recorder:
    """Acts as an attention module's cache and records what it is given."""

    latents: Tensor  # [1, 1, T, L]
    keys: Tensor  # [1, 1, T, P]

    def update(self, latents: Tensor, keys: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.latents = latents
        self.keys = keys
        return latents, keys


@torch.inference_mode()
def latent_heads(attention: Any, rotary: Any, dtype: torch.dtype) -> tuple[LatentHeads, Callable[[Tensor], Any]]:
    """Sizes and RoPE tables of latent attention, found by looking at what it caches in a trial.

    Raises UnsupportedModelError if that isn't the normed latent and one key with RoPE for all heads.
    """
    name = type(attention).__name__
    down = attention.kv_a_proj_with_mqa
    norm = attention.kv_a_layernorm
    x = torch.linspace(-3, 5, 4 * down.in_features).view(1, 4, -1).cos().to(dtype)
    positions = torch.arange(3, 7).unsqueeze(0)
    probe = torch.empty(0, dtype=dtype)
    seen = _Recorder()
    turns = rotary(probe, positions)
    attention(hidden_states=x, position_embeddings=turns, attention_mask=None, **cache_kwargs(attention, seen))
    exact = not isinstance(turns, tuple)
    tables = partial(_of_turns, rotary, probe) if exact else partial(rotary, probe)
    rank = len(norm.weight)
    latents, keys = down(x).split([rank, down.out_features - rank], dim=-1)  # [1, T, L], [1, T, P]
    cosines, sines = tables(positions)
    shapes = [part.unsqueeze(1).shape for part in (latents, keys)]
    if [seen.latents.shape, seen.keys.shape] != shapes or not torch.allclose(seen.latents[0], norm(latents)):
        raise UnsupportedModelError(f"{name} caches something other than latents and keys")
    if cosines.shape != keys.shape:
        raise UnsupportedModelError(f"{name} has RoPE tables of {cosines.shape[2]} for {keys.shape[2]} features")
    compressed = getattr(attention, "q_a_proj", None)
    form = NormForm.of(norm, dtype)
    if form.shift is not None:
        raise UnsupportedModelError(f"{name} applies a LayerNorm to its latents")
    query_rank = 0 if compressed is None else compressed.out_features
    for pairs in (False, True):
        left, right = _halves(keys.float(), pairs)
        turned = torch.cat((left, right), dim=-1) * cosines + torch.cat((-right, left), dim=-1) * sines
        found = [seen.keys[0], torch.cat(_halves(seen.keys[0], True), dim=-1)]  # pairs stay in place or move to halves
        if any(logits_agree(turned, written, dtype) for written in found[: 1 + pairs]):
            return LatentHeads(rank, query_rank, attention.v_head_dim, pairs, exact, form.eps, keys.shape[2]), tables
    raise UnsupportedModelError(f"{name} rotates keys in another way than RoPE")


def _of_turns(rotary: Any, probe: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of a rotary embedding that outputs complex numbers."""
    turns = rotary(probe, positions)
    return torch.cat((turns.real, turns.real), dim=-1), torch.cat((turns.imag, turns.imag), dim=-1)


def _halves(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Split features into the two parts that RoPE rotates with each other."""
    if pairs:
        return x[..., ::2], x[..., 1::2]
    left, right = x.chunk(2, dim=-1)
    return left, right


def latent_parts(
    attention: Any,
    sizes: LatentHeads,
    heads: int,
    size: int,
    hidden: int,
    rounds_twice: bool,
    linear: Callable[[nn.Module, int, int], Linear],
    vector: Callable[[Tensor], int],
) -> tuple[list[Linear], Latent]:
    """The linears of a layer's input, [q, k, v], and the other parts of its attention.

    `linear(module, outputs, inputs)` and `vector(values)` convert to what the kernels take and keep it alive. Raises
    UnsupportedModelError for sizes that don't fit.
    """
    up = attention.kv_b_proj
    keys = size - sizes.rotated
    found = kernels()
    lanes = PANEL if found is None else found.lanes
    whole = (keys, sizes.rank, sizes.value_size, sizes.query_rank)
    if any(part % PANEL for part in whole) or sizes.rotated % lanes or sizes.rotated > MAX_ROTATED:
        raise UnsupportedModelError(f"the sizes {whole}, {sizes.rotated} of latent attention don't fit the vectors")
    expand = linear(up, heads * (keys + sizes.value_size), sizes.rank)
    if up.bias is not None:
        raise UnsupportedModelError("the linear that expands latents to keys and values has a bias")
    # in float32 if weights are packed: scales are per output, which is an input of the transposed weight
    weight = up.exact().view(heads, -1, sizes.rank)[:, :keys].transpose(1, 2).reshape(-1, keys)
    absorb = linear(NativeLinear(as_linear(weight), False), heads * sizes.rank, keys)

    def norm(module: nn.Module) -> int:
        form = NormForm.of(module, up.first(1).dtype)
        if (form.eps, form.rounds_twice, form.shift) != (sizes.eps, rounds_twice, None):
            raise UnsupportedModelError("norms differ in epsilon or rounding")
        return vector(form.factors)

    of_keys = linear(attention.kv_a_proj_with_mqa, sizes.rank + sizes.rotated, hidden)
    if not sizes.query_rank:
        of_queries = linear(attention.q_proj, heads * size, hidden)
        query = Linear()
        query_norm = None
    else:
        of_queries = linear(attention.q_a_proj, sizes.query_rank, hidden)
        query = linear(attention.q_b_proj, heads * size, sizes.query_rank)
        query_norm = norm(attention.q_a_layernorm)
    parts = Latent(query, query_norm, norm(attention.kv_a_layernorm), absorb, expand)
    return [of_queries, of_keys, Linear()], parts
