"""Linear layers that run on the native kernels: float32 and bfloat16 weights, and packed weights of 4 and 8 bits.

Every output is summed over the inputs in a fixed order, in float32, whatever else is in the pass. So a token's result
is bit-identical alone and in a batch, in a plain pass and in a tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import byref
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.machine import clock, measured_once
from eyas.targets.linears import SAMPLED, PrepackedLinear, can_prepack
from eyas.targets.native.library import KINDS, MOST_TOGETHER, PANEL, Kernels, Linear, Way, kernels
from eyas.targets.native.packed import (
    GROUP,
    PIECE,
    WeightBlocks,
    WeightFormat,
    joint_panels,
    nearest4,
    nearest8,
    product,
    random_blocks,
)
from eyas.targets.native.panel_files import laid_out

_LOG = logging.getLogger("eyas")


def loaded_kernels() -> Kernels:
    """The kernels. Raises RuntimeError if there are none."""
    found = kernels()
    if found is None:
        raise RuntimeError("there are no native kernels on this machine")
    return found


_SHARE = 1 << 17
"""Multiplications that make a further thread worth synchronizing with between two steps of a pass."""


def threads_for(multiplications: int) -> int:
    """Number of threads for a product or layer with this many multiplications; small ones need no synchronization."""
    return max(1, min(_THREADS.get() or torch.get_num_threads(), multiplications // _SHARE))


_THREADS: ContextVar[int | None] = ContextVar("threads of native passes", default=None)


@contextmanager
def lone_torch() -> Iterator[None]:
    """Run torch on this thread alone in this context; the kernels keep using torch's previous number of threads.

    Next to native passes, torch has little to do, and its threads spin while they wait for each other, which would take
    cores from the kernels' threads.
    """
    threads = torch.get_num_threads()
    token = _THREADS.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _THREADS.reset(token)


@cache
def best_layout(device: torch.device, dtype: torch.dtype) -> type[PrepackedLinear] | None:
    """The fastest layout of weights on a device: native, oneDNN's or (None) PyTorch's own row-major layout.

    Measured once per machine, in about 100 ms: native weights are chosen unless oneDNN is more than 5% faster with 1, 4
    and 16 tokens, or more than 1.5 times as fast with a prompt's 256.
    """
    if device.type != "cpu" or dtype not in KINDS:
        return None
    prepacked, found = can_prepack(device, dtype), kernels()
    if found is None:
        return PrepackedLinear if prepacked else None
    if not prepacked:
        return NativeLinear
    name = f"layouts-{str(dtype).removeprefix('torch.')}-{found.name}"
    native, other = measured_once(name, lambda: _seconds((NativeLinear, PrepackedLinear), dtype))
    slower = sum(native[:3]) > 1.05 * sum(other[:3]) or native[3] > 1.5 * other[3]
    return PrepackedLinear if slower else NativeLinear


def _seconds(layouts: Sequence[type[PrepackedLinear]], dtype: torch.dtype) -> list[list[float]]:
    """Each layout's best times of multiplying 1, 4, 16 and 256 tokens by one of several 1024 x 1024 weights."""
    linears = _trial_linears(dtype)
    ways = [[layout(linear, False).multiply for linear in linears] for layout in layouts]
    found = [
        _best_seconds(ways, torch.ones(tokens, 1024, dtype=dtype), repeats)
        for tokens, repeats in ((1, 4), (4, 4), (16, 4), (256, 2))
    ]
    return [list(times) for times in zip(*found, strict=True)]


def _trial_linears(dtype: torch.dtype) -> list[nn.Linear]:
    return [nn.Linear(1024, 1024, bias=False, dtype=dtype).requires_grad_(False) for _ in range(6)]


def _best_seconds(ways: Sequence[Sequence[Callable[[Tensor], object]]], x: Tensor, repeats: int) -> list[float]:
    """The best time of each way of multiplying x, each with several weights.

    The ways take turns on one thread and are timed in its CPU time, so that load on the machine doesn't decide.
    """
    best = [float("inf")] * len(ways)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for each in list(zip(*ways, strict=True)) * repeats:
            for way, multiply in enumerate(each):
                began = clock()
                multiply(x)
                best[way] = min(best[way], clock() - began)
    finally:
        torch.set_num_threads(threads)
    return best


@cache
def _ways() -> int:
    """How bfloat16 inputs and weights are multiplied on this machine, as the kernels take it.

    By tiles (AMX) if they exist and aren't slower; otherwise in pairs (`vdpbf16ps`) for the numbers of tokens, one bit
    each, with which pairs are faster. Measured once per machine, in about 100 ms. A processor whose sums aren't the
    documented ones gets chains.
    """
    found = kernels()
    if found is None or not found.ways:
        return 0
    faster = measured_once(f"ways-{found.name}", lambda: _measure_ways(found.ways))
    return Way.TILES if faster["tiles"] else sum(1 << tokens for tokens in faster["pairs"])


def _measure_ways(offered: Way) -> dict[str, Any]:
    """Whether tiles are faster, and the numbers of tokens with which pairs are."""
    linears = [NativeLinear(linear, False) for linear in _trial_linears(torch.bfloat16)]

    def way(bits: int) -> list[Callable[[Tensor], Tensor]]:
        return [partial(each.run, each.struct(0, each.out_features, bits), rounds=False) for each in linears]

    chains, pairs, tiles, documented = map(way, (0, (1 << 32) - 1, Way.TILES, Way.TILES_OF_VECTORS))
    inputs = [
        torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        for tokens in (*range(1, MOST_TOGETHER + 1), 16, 256)
    ]
    if _differ(chains[0], pairs[0], inputs):
        return {"tiles": False, "pairs": []}
    best = [_best_seconds((chains, pairs), x, 3) for x in inputs]
    faster = [len(x) for x, (chain, pair) in zip(inputs, best, strict=True) if pair < chain and len(x) <= MOST_TOGETHER]
    if Way.TILES not in offered or _differ(tiles[0], documented[0], inputs[::4]):
        return {"tiles": False, "pairs": faster}
    ratios = [_best_seconds((tiles,), x, 3)[0] / min(other) for x, other in zip(inputs, best, strict=True)]
    few, many = ratios[:-1], ratios[-1]
    return {"tiles": sum(few) < 1.1 * len(few) and many < 1.0, "pairs": faster}


def weight_formats(model: nn.Module) -> str | None:
    """The 4-bit and 8-bit formats of a model's packed weights, such as `Q4_1, Q8_0`; None if there are none."""
    found = {module.name for module in model.modules() if isinstance(module, PackedLinear)}
    return ", ".join(sorted(found)) or None


def _ways_of(model: nn.Module) -> int | None:
    """How most of a model's native products are computed, see `_ways`; None if it has none or they are in integers."""
    weights = {module.kind for module in model.modules() if isinstance(module, NativeLinear)} - set(WeightFormat)
    return None if not weights or _is_packed(model) else _ways() * (KINDS[torch.bfloat16] in weights)


def _is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def multiplies_by_vectors(model: nn.Module) -> bool:
    """Whether a model's products are native and without tiles, so that few tokens already make them compute-bound."""
    return _is_packed(model) or _ways_of(model) not in (None, Way.TILES)


def describe_products(model: nn.Module) -> str:
    """Whose kernels multiply the linear layers of a model here, and how, for the log."""
    if _is_packed(model):
        return "eyas's, in integers" + " (VNNI)" * loaded_kernels().vnni
    ways = _ways_of(model)
    if ways is None:
        return "oneDNN's" if any(isinstance(module, PrepackedLinear) for module in model.modules()) else "PyTorch's"
    if ways == Way.TILES:
        return "eyas's, by AMX tiles"
    tokens = [str(tokens) for tokens in range(1, MOST_TOGETHER + 1) if ways >> tokens & 1]
    return "eyas's" + f", in pairs (vdpbf16ps) where {', '.join(tokens)} tokens go together" * bool(tokens)


def _differ(way: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether two ways of multiplying that should give the same bits don't; logs a warning if so."""
    same = all(torch.equal(way(x), other(x)) for x in inputs)
    if not same:
        _LOG.warning("this processor sums bfloat16 products in an undocumented order: its instructions aren't used")
    return not same


def as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with a weight [out, in] and a bias [out], or with concatenated stacks [E, ...] of them."""
    rows = weight.detach().reshape(-1, weight.shape[-1])
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().flatten(), requires_grad=False)
    return linear


class NativeLinear(PrepackedLinear):
    """A frozen replacement for `nn.Linear` with its weight in panels of 16 outputs."""

    def _pack(self, weight: Tensor) -> Tensor:
        self._widen_bias()
        return loaded_kernels().pack(weight)

    def _widen_bias(self) -> None:
        self._wide_bias = None if self.bias is None else self.bias.float().contiguous()

    def exact(self) -> Tensor:
        """The row-major weight [out, in] by which this layer multiplies, in a dtype that rounds it at most once."""
        return loaded_kernels().unpack(self._prepacked, self.out_features)

    def restored(self) -> Tensor:
        return self.exact().to(self._dtype)

    def rows(self, first: int, outputs: int) -> Linear:
        """Some outputs of this layer as the kernels take them; valid as long as this module lives.

        If its inputs aren't bfloat16 values, `ways` must be set to 0. Raises UnsupportedModelError if the first output
        doesn't begin a panel.
        """
        return self.struct(first, outputs, self._way_of(torch.bfloat16))

    def _way_of(self, inputs: torch.dtype) -> int:
        """How inputs of a dtype are multiplied, as the kernels take it."""
        return _ways() if inputs == self._prepacked.dtype == torch.bfloat16 else 0

    @property
    def kind(self) -> int:
        """The kernels' number for this kind of weights."""
        return KINDS[self._prepacked.dtype]

    def struct(self, first: int, outputs: int, ways: int) -> Linear:
        """As `rows`, multiplied in the given `ways`."""
        if first % PANEL:
            raise UnsupportedModelError(f"output {first} doesn't begin a panel of {PANEL}")
        weight, bias = self._prepacked, address(self._wide_bias)  # no tensor operations here
        return Linear(
            weight.data_ptr() + first // PANEL * weight.stride(0) * weight.element_size(),
            bias and bias + 4 * first, outputs, self.in_features, self.kind, ways,
        )  # fmt: skip

    def multiply(self, x: Tensor) -> Tensor:
        return self.product(x, self._dtype == torch.bfloat16).to(self._dtype).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor, rounds: bool) -> Tensor:
        """Multiply x [..., in] -> [T, out] in float32; `rounds`: round the result to bfloat16."""
        return self.run(self.struct(0, self.out_features, self._way_of(x.dtype)), x, rounds)

    def run(self, struct: Linear, x: Tensor, rounds: bool) -> Tensor:
        """As `product`, for a `struct` of the whole layer."""
        flat = x.reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(flat), self.out_features)
        loaded_kernels().linear(
            byref(struct), flat.data_ptr(), len(flat), out.data_ptr(), rounds,
            threads_for(out.numel() * self.in_features),
        )  # fmt: skip
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:  # noqa: ARG002  # it has no children
        if fn(torch.empty(0)).device.type != "cpu" or fn(torch.empty(0, dtype=self._dtype)).dtype != self._dtype:
            raise RuntimeError("prepacked weights can't be moved or cast: load the model with that device or dtype")
        return self


class PackedLinear(NativeLinear):
    """A `NativeLinear` with 4-bit or 8-bit weights; it quantizes its inputs to 8 bits and multiplies in integers."""

    name: str
    """Name of the format of the weights, as users know it."""
    _kind: WeightFormat
    _tied = False
    as_floats = False
    """Whether inputs aren't quantized, as trials need it: codes that rounding changes would hide other errors."""

    @classmethod
    def of_blocks(
        cls, pieces: Iterable[WeightBlocks], name: str, dtype: torch.dtype, shape: tuple[int, ...],
        bias: Tensor | None = None,
    ) -> PackedLinear:  # fmt: skip
        """As `of_panels`, of a weight that comes in `pieces` (`joint_panels`)."""
        return cls.of_panels(*joint_panels(pieces, prod(shape[:-1])), name, dtype, shape, bias)

    @classmethod
    def of_panels(
        cls, kind: WeightFormat, panels: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...],
        bias: Tensor | None = None, tied: bool = False,
    ) -> PackedLinear:  # fmt: skip
        """Make a layer in `dtype` of a weight in panels [P, bytes of 16 outputs], in the format called `name`.

        Its `shape` is [out, in], or [E, out, in] for a stack of weights.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.stacked, made._shared, made.transposed = shape if len(shape) == 3 else None, None, False
        made.out_features, made.in_features, made._dtype = prod(shape[:-1]), shape[-1], dtype
        made.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        made._widen_bias()
        made.name, made._tied = name, tied
        made._kind, made._prepacked = kind, panels
        first = made.blocks(-(-SAMPLED // made.in_features)).floats(made.in_features)
        made._first = first.to(dtype).flatten()[:SAMPLED]
        return made

    @property
    def kind(self) -> int:
        return self._kind

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [out, in]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def tied(self) -> bool:
        return self._tied or super().tied

    def untie(self) -> None:
        """Drop the embedding's own weight: from now on, the embedding looks up this one."""
        self._shared, self._tied = None, True

    def _way_of(self, inputs: torch.dtype) -> int:  # noqa: ARG002  # any dtype is quantized
        return Way.AS_FLOATS if self.as_floats else 0

    def blocks(self, outputs: int | None = None) -> WeightBlocks:
        """The weight in its original blocks, or only its first `outputs`."""
        count = self.out_features if outputs is None else min(outputs, self.out_features)
        return WeightBlocks.of_panels(self._kind, self._prepacked[: -(-count // PANEL)], count, self.in_features)

    def exact(self) -> Tensor:
        return self.blocks().floats(self.in_features)

    def chosen(self, ids: Tensor) -> PackedLinear:
        """A layer with only the outputs `ids`."""
        bias = None if self.bias is None else self.bias[ids]
        rows, shape = self.blocks().rows(ids), (len(ids), self.in_features)
        return self.of_blocks([rows], self.name, self._dtype, shape, bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` [...] -> [..., in], in this layer's dtype."""
        flat = ids.reshape(-1).contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.out_features:
            raise IndexError(f"a token has no embedding: ids must be from 0 to {self.out_features - 1}")
        out = torch.empty(len(flat), self.in_features)
        loaded_kernels().rows(
            self._prepacked.data_ptr(), self.kind, self.in_features, flat.data_ptr(), len(flat), out.data_ptr(),
            threads_for(out.numel()),
        )  # fmt: skip
        return out.to(self._dtype).view(*ids.shape, self.in_features)


class Int8Linear(PackedLinear):
    """A `PackedLinear` that quantizes its weight to 8 bits."""

    name = "int8"
    _nearest = staticmethod(nearest8)

    def _pack(self, weight: Tensor) -> Tensor:
        self._widen_bias()
        pieces = (self._nearest(weight[first : first + PIECE]) for first in range(0, len(weight), PIECE))
        self._kind, panels = laid_out(partial(joint_panels, pieces, len(weight)), len(weight))
        return panels


class Int4Linear(Int8Linear):
    """A `PackedLinear` that quantizes its weight to 4 bits."""

    name = "int4"
    _nearest = staticmethod(nearest4)


@cache
def sums_codes() -> bool:
    """Whether this processor's products of packed weights equal `packed.product`; logs a warning if they don't."""
    x = torch.randn(5, 9 * GROUP, generator=torch.Generator().manual_seed(0))
    for kind in WeightFormat:
        blocks = random_blocks(kind, 40, x.shape[1])
        found = PackedLinear.of_blocks([blocks], kind.name, torch.float32, (40, x.shape[1]))(x)
        expected = product(blocks, x)
        if not torch.allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max())):
            _LOG.warning("this processor sums integer products incorrectly: weights in 4 and 8 bits are dequantized")
            return False
    return True


class PackedEmbedding(nn.Module):
    """A frozen replacement for `nn.Embedding` that looks up rows of a packed weight, which may be the head's."""

    def __init__(self, table: PackedLinear) -> None:
        super().__init__()
        self._kept = (table,)  # not a child module: the head may have it as one

    @property
    def table(self) -> PackedLinear:
        """The packed weight [tokens, H] whose rows are looked up."""
        return self._kept[0]

    @property
    def weight(self) -> Tensor:
        """The row-major weight [tokens, H], restored on demand."""
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens [...]."""
        return self.table.lookup(ids)


def matrix_of(module: Any) -> Tensor | PackedLinear:
    """The weight of an embedding or a head, row-major or packed."""
    if isinstance(module, PackedEmbedding):
        return module.table
    if isinstance(module, PackedLinear):
        return module
    weight: Tensor = module.weight.detach()
    return weight


def native_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor | None:
    """Attention [R, Q, heads, Dv] of query [R, heads, Q, D] over key and value [R, kv_heads, K, D / Dv].

    `mask` [R or 1, 1, Q, K], bool or additive, says which keys a query sees. The others don't affect its sums, not even
    their order. Returns None if the kernels don't take such tensors.
    """
    found, kinds = kernels(), (torch.float32, torch.bfloat16)
    rows, heads, columns, size = query.shape
    if found is None or query.device.type != "cpu" or query.dtype not in kinds or key.dtype != query.dtype:
        return None
    if size % found.lanes or value.shape[3] % found.lanes:
        return None
    key, value = (held if held.stride()[2:] == (held.shape[3], 1) else held.contiguous() for held in (key, value))
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    wide, seen = query.float().contiguous(), seen.expand(rows, -1, -1).contiguous()
    out = torch.empty(rows, columns, heads, value.shape[3])
    sizes = torch.tensor([rows, heads, columns, size, key.shape[1], key.shape[2], value.shape[3]])
    strides = torch.tensor([*key.stride()[:2], *value.stride()[:2]])
    found.attention(
        wide.data_ptr(), key.data_ptr(), value.data_ptr(), seen.data_ptr(), out.data_ptr(), sizes.data_ptr(),
        strides.data_ptr(), size**-0.5 if scale is None else scale, query.dtype == torch.bfloat16,
        threads_for(query.numel() * key.shape[2]),
    )  # fmt: skip
    return out.to(query.dtype)


def native_guesses(logits: Tensor, count: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` greatest log-probabilities of each row of logits [..., V], best first, and their tokens in `ids` [V].

    Both are [..., count], in float32 and int64; equal ones are in the order of their logits.
    """
    logits, shape = logits.contiguous(), (*logits.shape[:-1], count)
    scores, found = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    size = logits.shape[-1]
    loaded_kernels().guess(
        logits.data_ptr(), logits.numel() // size, size, logits.dtype == torch.bfloat16, ids.data_ptr(), count,
        scores.data_ptr(), found.data_ptr(), threads_for(logits.numel()),
    )  # fmt: skip
    return scores, found


def best_token(logits: Tensor, row: int) -> int:
    """The token with the highest logit in a row of logits [T, V] on the host; of equal logits, the first."""
    if not native_rows(logits):
        return int(logits[row].max(dim=-1).indices)
    token: int = loaded_kernels().best(*_row(logits, row))
    return token


_NOISE_COST = 32
"""Multiplications that take as long as drawing one value of Gumbel noise."""


class Draw(NamedTuple):
    """How a token is drawn from logits that aren't processed otherwise."""

    divisor: float
    scale: float
    """Scale of the noise."""
    seed: int
    position: int


def native_rows(logits: Tensor) -> bool:
    """Whether the kernels can read single rows of logits [T, V]."""
    here = logits.device.type == "cpu" and logits.is_contiguous() and logits.dtype in KINDS
    return here and kernels() is not None


def drawn_token(logits: Tensor, row: int, draw: Draw, ahead: int) -> int:
    """The token drawn from a row of logits [T, V] that are `native_rows`, `ahead` positions after the draw's own.

    It is `(logits / divisor + scale * noise).argmax()` in float32, without holding the noise of all tokens in memory.
    """
    draw, threads = draw._replace(position=draw.position + ahead), threads_for(_NOISE_COST * logits.shape[1])
    token: int = loaded_kernels().draw(*_row(logits, row), *draw, threads)
    return token


def _row(logits: Tensor, row: int) -> tuple[int, int, bool]:
    """A row of logits [T, V] as the kernels take it: its address, V, and whether it is in bfloat16."""
    size = logits.shape[1]
    return logits.data_ptr() + row * size * logits.element_size(), size, logits.dtype == torch.bfloat16


def native_gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor | None:
    """Gumbel noise [B, P, V] for `seeds` [B], `positions` [B, P] and `ids` [V]; None if there are no kernels."""
    found = kernels()
    if found is None or seeds.device.type != "cpu":
        return None
    seeds, positions, ids = seeds.contiguous(), positions.contiguous(), ids.contiguous()
    out = torch.empty(*positions.shape, len(ids))
    found.gumbel(
        seeds.data_ptr(), positions.data_ptr(), *positions.shape, ids.data_ptr(), len(ids), out.data_ptr(),
        threads_for(_NOISE_COST * out.numel()),
    )  # fmt: skip
    return out


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's values as the kernels take it; None is null."""
    return None if tensor is None else tensor.data_ptr()
