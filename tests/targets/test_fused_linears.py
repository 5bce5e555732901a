"""Linears with one input are one product: the same numbers, whoever calls them, however often and in what order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from eyas.targets import Target, load_target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.linears import WIDEST, FusedLinear, PrepackedLinear, can_prepack, fuse_linears, prepack_linears

from .. import tiny

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this CPU has no prepacked kernels")
TYPES = [t for t in (torch.float32, torch.bfloat16) if can_prepack(CPU, t)]


class Block(nn.Module):
    """Three linears with one input and one that reads something else."""

    def __init__(self, bias: bool = True, wide: int = 24) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32, bias), nn.Linear(16, 8, bias), nn.Linear(16, wide, bias)
        self.other = nn.Linear(32, 16, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.a(x)) + self.b(x).sum() + self.c(x).sum()


def pair(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Block, Block]:
    """The same block twice: with separate and with fused linears."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        block = Block(bias).to(dtype).requires_grad_(False)
        prepack_linears(block)
        made.append(block)
    x = torch.randn(2, 3, 16, dtype=dtype)
    assert fuse_linears(made[1], lambda: made[1](x)) == 3
    return made[0], made[1]


def fused(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, FusedLinear)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_fused_linears_multiply_and_read_alike(dtype: torch.dtype, bias: bool) -> None:
    apart, together = pair(dtype, bias)
    assert fused(together) == ["a", "b", "c"]
    assert fingerprint(apart) == fingerprint(together)
    for name in fused(together):
        one, other = getattr(apart, name), getattr(together, name)
        assert torch.equal(one.weight, other.weight)
        assert (one.in_features, one.out_features, one.tied) == (other.in_features, other.out_features, other.tied)
        assert (other.bias is not None) == bias
        assert not bias or torch.equal(one.bias, other.bias)
        for shape in ((16,), (1, 1, 16), (2, 5, 16), (1, 40, 16), (0, 16)):
            x = torch.randn(shape, dtype=dtype)
            torch.testing.assert_close(one(x), other(x), **({} if dtype == torch.float32 else {"rtol": 0, "atol": 0}))


@pytest.mark.skipif(torch.bfloat16 not in TYPES, reason="this CPU has no bfloat16 kernels")
def test_in_bfloat16_a_row_does_not_depend_on_its_neighbours_nor_on_fused_linears() -> None:
    apart, together = pair(torch.bfloat16)
    rows = torch.randn(70, 16).bfloat16()
    for count in (1, 2, 5, 16, 33, 70):
        x = rows[:count]
        for name in fused(together):
            assert torch.equal(getattr(together, name)(x), getattr(apart, name)(rows)[:count])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_part_is_handed_out_once_and_nothing_is_left(mode: Callable[[], torch.no_grad]) -> None:
    _, together = pair()
    with mode():
        x = torch.randn(4, 16)
        first = together.a(x)
        assert len(vars(x)) == 1
        assert together.b(x).untyped_storage().data_ptr() == first.untyped_storage().data_ptr()  # one product
        again = together.a(x).clone()
        together.a(x).zero_()  # a caller may write to what it got
        assert torch.equal(first, again)
        for part in (together.b, together.c):
            part(x)
        assert not vars(x)


def test_an_input_changed_or_another_one_gives_no_stale_result() -> None:
    apart, together = pair()
    with torch.inference_mode():
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        together.a(x)
        torch.testing.assert_close(together.b(y), apart.b(y))
        torch.testing.assert_close(together.b(x), apart.b(x))
        plain, joint = pair(bias=False)  # another layer that reads the same
        together.a(x)
        torch.testing.assert_close(joint.b(x), plain.b(x))
    x = torch.randn(4, 16)  # one with a version
    with torch.inference_mode():
        together.a(x)
        x.mul_(-2)
        torch.testing.assert_close(together.b(x), apart.b(x))
    found = together.c(x)
    assert not found.is_inference()  # made anew outside of inference mode


def test_threads_do_not_meet() -> None:
    apart, together = pair()
    shared, wrong = torch.randn(3, 16), []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(100):
                own = torch.randn(3, 16, generator=draw)
                for name in ("a", "b", "c"):
                    for x in (own, shared):
                        if not torch.allclose(getattr(together, name)(x), getattr(apart, name)(x), atol=1e-5):
                            wrong.append(name)

    threads = [Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients_pass_fused_linears() -> None:
    apart, together = pair()
    found, expected = (torch.ones(2, 16, requires_grad=True) for _ in range(2))
    for x, block in ((found, together), (expected, apart)):
        with torch.no_grad():
            block.c(x)  # leaves parts that know of no gradient
        (block.a(x).square().sum() + block.b(x).sum() + block.c(x).mean()).backward()
    torch.testing.assert_close(found.grad, expected.grad)


class Writes(Block):
    """Changes its input between two linears."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        a = self.a(x)
        x.add_(1e-5)  # too little for the trial's outcome to tell
        return self.other(a) + self.b(x).sum() + self.c(x).sum()


class Twice(Block):
    """Calls one twice and another one never."""

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.a(x) + self.a(x)) + self.b(x).sum()


class Flat(Block):
    """Wants an output that lies in one piece."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).view(-1).sum() + self.b(x).view(-1).sum() + self.c(x).sum()


class Refuses(Block):
    """Raises an error whenever it is run."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"not with {tuple(x.shape)}")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Block, ["a", "b", "c"]),
        (Writes, []),
        (Twice, []),
        (Flat, []),
        (Refuses, []),
        (lambda: Block(wide=WIDEST), []),
    ],
)
def test_only_linears_that_a_trial_gives_one_input_are_fused(made: Callable[[], Block], expected: list[str]) -> None:
    block = made().requires_grad_(False)
    before = block.a.weight.clone()
    prepack_linears(block)
    x = torch.randn(2, 3, 16)
    assert fuse_linears(block, lambda: block(x)) == len(expected)
    assert fused(block) == expected
    assert isinstance(block.a, PrepackedLinear)
    assert torch.equal(block.a.weight, before)
    assert not block.a._forward_pre_hooks


@pytest.mark.parametrize("tied", [True, False])
def test_a_bias_and_none_do_not_mix_and_a_tied_weight_stays(tied: bool) -> None:
    block = Block()
    block.a = nn.Linear(16, 32, bias=False)
    block.words = nn.Embedding(8, 16)
    if tied:
        block.words.weight = block.b.weight
    prepack_linears(block.requires_grad_(False))
    x = torch.randn(2, 3, 16)
    assert fuse_linears(block, lambda: block(x)) == (0 if tied else 2)
    assert block.b.tied == tied


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_loaded_target_of_any_architecture_says_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: PrepackedLinear)
    tiny.build_model(name).save_pretrained(tmp_path)
    plain, target = (load_target(tmp_path, device="cpu", prepacked=prepacked) for prepacked in (False, True))
    count = len(fused(target.model))
    if name == "llama":
        assert count == 5 * tiny.LAYERS  # q, k, v; gate, up
    assert fingerprint(plain.model) == fingerprint(target.model)
    prompt = tiny.prompts(9)[0]
    read = [
        next(iter(made.prefill(made.allocate(1), range(1), [prompt], (1, tiny.LAYERS)))) for made in (plain, target)
    ]
    torch.testing.assert_close(read[0].taps, read[1].taps, rtol=1e-3, atol=1e-3)
    assert isinstance(target, Target)
