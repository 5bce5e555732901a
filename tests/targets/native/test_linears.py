"""Products of the native kernels: a chain of fused multiply-adds for each output, bit for bit, in every tail shape."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eyas.targets.linears import PrepackedLinear, can_prepack, prepack_linears
from eyas.targets.native import layouts, library, linears, microkernels, ops, products
from eyas.targets.native.layouts import best_layout
from eyas.targets.native.library import Microkernel, kernels, loaded_kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.noise import Draw, best_token, drawn_token, native_gumbel, native_rows
from eyas.targets.native.ops import multiplied, native_guesses
from eyas.targets.native.packed_linears import Int8Linear
from eyas.targets.native.products import describe_products
from eyas.verify.path import _gumbel, gumbel

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16)


def linear(out: int, width: int, dtype: torch.dtype, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, out, bias=bias, dtype=dtype).requires_grad_(False)


def rounded(value: Fraction) -> float:
    """A fraction as the nearest float32; exact halves between two are not met here."""
    return torch.tensor(float(value), dtype=torch.float64).float().item()


def chained(x: Tensor, weight: Tensor) -> Tensor:
    """[T, out] sums over the inputs in their order, each multiply-add exact but for one rounding.

    With weights of bfloat16 the second of each pair comes first.
    """
    if weight.dtype == torch.bfloat16:
        order = sorted(range(x.shape[1]), key=lambda i: (i // 2, -i))
        x, weight = x[:, order], weight[:, order]
    found = torch.empty(len(x), len(weight))
    for t, row in enumerate(x.double().tolist()):
        for o, factors in enumerate(weight.double().tolist()):
            total = 0.0
            for a, b in zip(row, factors, strict=True):
                total = rounded(Fraction(a) * Fraction(b) + Fraction(total))
            found[t, o] = total
    return found


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20), out=st.integers(1, 50), width=st.integers(1, 24), dtype=st.sampled_from(TYPES),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_is_a_chain_of_multiply_adds(
    tokens: int, out: int, width: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    plain = linear(out, width, dtype, bias, seed)
    x = torch.randn(tokens, width).to(dtype)
    expected = chained(x, plain.weight)
    if bias:
        expected = expected + plain.bias.float()
    assert torch.equal(NativeLinear(plain, False)(x), expected.to(dtype))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 14), out=st.integers(1, 20), width=st.integers(1, 24), seed=st.integers(0, 99),
)  # fmt: skip
def test_sums_of_bfloat16_take_the_second_of_each_pair_first(tokens: int, out: int, width: int, seed: int) -> None:
    """Before anything is rounded to bfloat16."""
    native = NativeLinear(linear(out, width, torch.bfloat16, False, seed), False)
    weight = loaded_kernels().unpack(native._prepacked, out)
    x = (
        torch.randn(tokens, width) * 2.0 ** torch.randint(-9, 9, (tokens, width))
    ).bfloat16()  # so that sums are rounded
    assert torch.equal(multiplied(native.struct(0, out, 0), x, False), chained(x, weight))


def each_token_alone(native: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of 40 tokens x [40, in] are the same bits whatever is beside them, and with several threads."""
    alone = torch.cat([native(row.unsqueeze(0)) for row in x])
    for count in range(1, 41):
        assert torch.equal(native(x[:count]), alone[:count])
        assert torch.equal(native(x[40 - count :]), alone[40 - count :])
    for threads in (2, 3):
        monkeypatch.setattr(ops, "threads_for", lambda _, threads=threads: threads)
        assert torch.equal(native(x), alone)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_s_product_does_not_depend_on_the_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    native = NativeLinear(linear(70, 48, dtype), False)
    x = torch.randn(40, 48).to(dtype)
    each_token_alone(native, x, monkeypatch)


@given(
    tokens=st.integers(1, 40), out=st.integers(1, 70), width=st.integers(1, 70), seed=st.integers(0, 99),
    tiny=st.booleans(),
)  # fmt: skip
def test_products_of_pairs_are_the_same_bits(tokens: int, out: int, width: int, seed: int, tiny: bool) -> None:
    """Also where a sum is subnormal, which counts as 0 in both."""
    if microkernels.chosen_microkernels() in (0, Microkernel.TILES):
        pytest.skip("this processor has no products of pairs, or they aren't used")
    plain = linear(out, width, torch.bfloat16, False, seed)
    if tiny:
        plain.weight.mul_(2.0**-110)
    native = NativeLinear(plain, False)
    x = torch.randn(tokens, width).bfloat16() * (2.0**-14 if tiny else 1)
    chains, pairs = (multiplied(native.struct(0, out, bits), x, False) for bits in (0, (1 << 32) - 1))
    assert torch.equal(chains, pairs)
    assert torch.equal(native.product(x, False), chains)


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """[T, out] sums as AMX documents them: of 32 inputs the even and the odd ones apart, from 0; then the rest."""
    whole = x.shape[1] // 32 * 32
    found = torch.zeros(len(x), len(weight))
    for first in range(0, whole, 32):
        even, odd = (
            chained(x[:, at : first + 32 : 2].float(), weight[:, at : first + 32 : 2].float())
            for at in (first, first + 1)
        )
        found = found + (even + odd)
    for i in range(whole, x.shape[1]):
        exact = x[:, i : i + 1].double() * weight[:, i].double() + found.double()  # of 16 and 24 bits: nearly always
        found = exact.float()
    return found


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 3), out=st.integers(1, 20), width=st.integers(1, 100), seed=st.integers(0, 99))
def test_tiles_have_the_sums_that_are_documented(tokens: int, out: int, width: int, seed: int) -> None:
    offered = loaded_kernels().microkernels
    if Microkernel.TILES_OF_VECTORS not in offered:
        pytest.skip("this processor has no products of pairs")
    plain = linear(out, width, torch.bfloat16, False, seed)
    x = torch.randn(tokens, width).bfloat16()
    expected = plain.weight.clone()
    native = NativeLinear(plain, False)
    for way in {
        Microkernel.TILES_OF_VECTORS,
        *([Microkernel.TILES] if microkernels.chosen_microkernels() == Microkernel.TILES else ()),
    }:
        assert torch.equal(multiplied(native.struct(0, out, way), x, False), tiled(x, expected))


@pytest.mark.parametrize("width", [31, 32, 48, 101])
def test_a_token_s_product_by_tiles_does_not_depend_on_the_others(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if Microkernel.TILES_OF_VECTORS not in loaded_kernels().microkernels:
        pytest.skip("this processor has no products of pairs")
    for way in (Microkernel.TILES_OF_VECTORS, Microkernel.TILES):
        if way not in loaded_kernels().microkernels:
            continue
        monkeypatch.setattr(linears, "chosen_microkernels", lambda way=way: way)
        native = NativeLinear(linear(150, width, torch.bfloat16), False)
        x = torch.randn(40, width).bfloat16()
        alone = torch.cat([native(row.unsqueeze(0)) for row in x])
        expected = x.float() @ native.weight.float().T + native.bias.float()
        torch.testing.assert_close(alone.float(), expected, rtol=2e-2, atol=2e-2)
        for count in range(1, 41):
            assert torch.equal(native(x[:count]), alone[:count])
        for threads in (2, 3):
            monkeypatch.setattr(ops, "threads_for", lambda _, threads=threads: threads)
            assert torch.equal(native(x), alone)


class FakeKernels:
    """A processor that has made-up times, and sums in its own order where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], odd: int | None = None) -> None:
        def run(struct: library.Linear, *_: Tensor, rounds: bool) -> Tensor:
            assert not rounds
            return torch.tensor(float(struct.microkernels == odd))

        def best(taken: list[list[partial[Tensor]]], x: Tensor, repeats: int) -> list[float]:
            assert repeats
            return [len(x) * seconds[way[0].args[0].microkernels] for way in taken]

        monkeypatch.setattr(microkernels, "multiplied", run)
        monkeypatch.setattr(microkernels, "best_seconds", best)


ALL = Microkernel.PAIRS | Microkernel.TILES | Microkernel.TILES_OF_VECTORS
PAIRED = (1 << 32) - 1


def test_the_fastest_way_to_multiply_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernels(monkeypatch, {0: 1.0, PAIRED: 0.9, Microkernel.TILES: 0.5})
    assert microkernels._measure_microkernels(ALL) == {"tiles": True, "pairs": list(range(1, 13))}
    assert not microkernels._measure_microkernels(ALL & ~Microkernel.TILES)["tiles"]
    FakeKernels(monkeypatch, {0: 0.4, PAIRED: 0.9, Microkernel.TILES: 0.5})
    assert microkernels._measure_microkernels(ALL) == {"tiles": False, "pairs": []}


def test_how_products_are_made_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*layouts: type[PrepackedLinear], dtype: torch.dtype = torch.float32) -> str:
        return describe_products(nn.Sequential(*(layout(linear(16, 16, dtype), False) for layout in layouts)))

    assert describe_products(nn.Sequential(linear(16, 16, torch.float32))) == "PyTorch's"
    if can_prepack(CPU, torch.float32):
        assert of(PrepackedLinear) == "oneDNN's"
    assert of(NativeLinear) == "eyas's"
    monkeypatch.setattr(products, "chosen_microkernels", lambda: 0b1100)
    assert of(NativeLinear, dtype=torch.bfloat16) == "eyas's, in pairs (vdpbf16ps) where 2, 3 tokens go together"
    monkeypatch.setattr(products, "chosen_microkernels", lambda: Microkernel.TILES)
    assert of(NativeLinear, dtype=torch.bfloat16) == "eyas's, by AMX tiles"
    assert of(NativeLinear, Int8Linear).startswith("eyas's, in integers")


def test_instructions_that_sum_in_an_order_of_their_own_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeKernels(monkeypatch, {0: 1.0, PAIRED: 0.9, Microkernel.TILES: 0.5}, odd=PAIRED)
    assert microkernels._measure_microkernels(ALL) == {"tiles": False, "pairs": []}
    assert "an undocumented order" in caplog.text
    FakeKernels(monkeypatch, {0: 1.0, PAIRED: 0.9, Microkernel.TILES: 0.5}, odd=Microkernel.TILES)
    assert microkernels._measure_microkernels(ALL) == {"tiles": False, "pairs": list(range(1, 13))}


def test_inputs_that_are_not_bfloat16_are_only_multiplied_by_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(linears, "multiplied", lambda struct, *_: used.append(struct.microkernels))
    monkeypatch.setattr(linears, "chosen_microkernels", lambda: 6)
    native = NativeLinear(linear(16, 16, torch.bfloat16), False)
    native.product(torch.ones(1, 16), False)
    native.product(torch.ones(1, 16, dtype=torch.bfloat16), False)
    assert used == [0, 6]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (16, 16), (17, 5), (100, 33)])
def test_the_weight_can_be_read_and_trained_below(dtype: torch.dtype, out: int, width: int) -> None:
    plain = linear(out, width, dtype)
    weight = plain.weight.clone()
    native = NativeLinear(plain, False)
    assert torch.equal(native.weight, weight)
    assert torch.equal(native.first(7), weight.flatten()[:7])
    x = torch.randn(2, 3, width).to(dtype).requires_grad_()
    native(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3, -1), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="load the model with that device or dtype"):
        native.to(torch.float64)


class QuantizedWeight(Tensor):
    """As torchao's: a tensor that says it is float32 and isn't a plain one."""


def test_every_linear_but_quantized_ones_is_replaced() -> None:
    quantized = linear(8, 8, torch.float32)
    quantized.weight = nn.Parameter(quantized.weight.detach().as_subclass(QuantizedWeight), requires_grad=False)
    block = nn.Sequential(linear(8, 8, torch.float32), nn.Linear(8, 8, dtype=torch.float64), quantized)
    assert prepack_linears(block, NativeLinear) == 1
    assert isinstance(block[0], NativeLinear)
    assert [type(part) for part in block[1:]] == [nn.Linear] * 2


def test_layouts_are_measured_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other processes keep the cores busy, threads that wait for each other would decide."""
    seen = []
    monkeypatch.setattr(NativeLinear, "multiply", lambda _, x: seen.append((len(x), torch.get_num_threads())))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert len(layouts._seconds((NativeLinear,), torch.float32)[0]) == 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {(1, 1), (4, 1), (16, 1), (256, 1)}


def test_the_fastest_layout_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_prepack(CPU, torch.float32):
        pytest.skip("this torch has no oneDNN")
    seconds = {NativeLinear: [1.0, 1.0, 1.0, 1.0], PrepackedLinear: [1.0, 1.0, 1.0, 1.0]}
    monkeypatch.setattr(layouts, "_seconds", lambda tried, _: [seconds[layout] for layout in tried])
    monkeypatch.setattr(layouts, "measured_once", lambda _, measure: measure())
    for native, chosen in (
        ([1.4, 1.4, 1.5, 2.9], NativeLinear),
        ([1.4, 1.4, 1.9, 1.0], PrepackedLinear),
        ([1.0, 1.0, 1.0, 3.1], PrepackedLinear),
    ):
        seconds[NativeLinear] = native
        assert best_layout.__wrapped__(CPU, torch.float32) is chosen
    assert best_layout.__wrapped__(CPU, torch.float16) is None
    assert best_layout.__wrapped__(torch.device("meta"), torch.float32) is None


def test_without_kernels_pytorch_s_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.DISABLE, "0")
    assert kernels.__wrapped__() is None
    monkeypatch.delenv(library.DISABLE)
    monkeypatch.setenv("PATH", "")
    assert kernels.__wrapped__() is None
    monkeypatch.setattr(library, "processor_flags", frozenset)
    assert kernels.__wrapped__() is None
    for module in (library, layouts):
        monkeypatch.setattr(module, "kernels", lambda: None)
    assert best_layout.__wrapped__(CPU, torch.float32) in (PrepackedLinear, None)
    with pytest.raises(RuntimeError, match="no native kernels"):
        loaded_kernels()


@pytest.mark.parametrize("size", [1, 3, 1024, 5000])
def test_native_noise_is_the_noise_of_pytorch(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (3,), generator=draw)
    positions = torch.randint(10**6, (3, 2), generator=draw)
    ids = torch.randint(200_000, (size,), generator=draw)
    found = native_gumbel(seeds, positions, ids)
    assert found is not None
    assert torch.equal(found, _gumbel(seeds, positions, ids))


@given(
    st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=70), st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1000),
)  # fmt: skip
def test_native_guesses_are_the_greatest_log_probabilities(
    values: list[float], count: int, dtype: torch.dtype, first: int
) -> None:
    """Of several rows, with ties, in every tail of the vectors."""
    count = min(count, len(values))
    logits = torch.tensor([values, values[::-1]], dtype=dtype).unsqueeze(0)
    ids = torch.arange(first, first + len(values)) * 3
    scores, found = native_guesses(logits, count, ids)
    expected = logits.float().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]  # the first of equals first
    assert torch.equal(found, ids[order])
    torch.testing.assert_close(scores, expected.gather(2, order), rtol=1e-5, atol=1e-5)


def test_passes_of_vectors_are_bound_by_arithmetic_and_those_of_tiles_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    assert not products.multiplies_by_vectors(model)  # PyTorch's products
    plain = model[0].bfloat16()
    model[0] = NativeLinear(plain, False)
    monkeypatch.setattr(products, "chosen_microkernels", lambda: 0)
    assert products.multiplies_by_vectors(model)
    monkeypatch.setattr(products, "chosen_microkernels", lambda: Microkernel.TILES)
    assert not products.multiplies_by_vectors(model)
    model[0] = Int8Linear(plain, False)
    assert products.multiplies_by_vectors(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.randn(40, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [7, 100, 332]] = 9.0
    logits[2, [300, 332]] = 9.0
    logits[3] = float("-inf")
    logits[4, 332] = 9.0
    logits[5, 0] = 9.0
    expected = logits.max(dim=-1).indices.tolist()
    assert expected[1:6] == [7, 300, 0, 332, 0]
    assert [best_token(logits, row) for row in range(40)] == expected
    assert [best_token(logits.T.contiguous().T, row) for row in range(40)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [77, 3000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
def test_a_drawn_token_is_the_best_of_logits_with_noise(dtype: torch.dtype, size: int, spread: float) -> None:
    """In the kernels' pieces as in PyTorch's operations, whether most tokens may win or few; without noise the best."""
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(80, size, generator=generator)).to(dtype)
    logits[20:40, torch.rand(size, generator=generator) < 0.9] = -torch.inf
    logits[60:] += 1e6  # so that sums with noise are rounded, and many are equal
    seeds = torch.arange(80)
    positions = torch.arange(100, 180)
    ids = torch.arange(size)
    assert native_rows(logits)
    for divisor, scale in ((1.0, 1.0), (0.7, 1.0), (1.3, 0.0)):
        noise = gumbel(seeds, positions.unsqueeze(1) + 2, ids)[:, 0]
        expected = torch.addcmul(logits.float() / divisor, noise, torch.tensor(scale)).argmax(dim=-1).tolist()
        draws = [
            Draw(divisor, scale, seed, position) for seed, position in zip(range(80), range(100, 180), strict=True)
        ]
        assert [drawn_token(logits, row, draw, 2) for row, draw in enumerate(draws)] == expected
        if scale or spread:  # else all tokens are equal
            assert len(set(expected)) > 20
