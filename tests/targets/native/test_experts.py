"""Experts on the native kernels: what transformers' modules compute, each token bit for bit the same in any pass."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.fingerprint import fingerprint
from eyas.targets.native.experts import NativeExperts, NativeRouter, replace_experts
from eyas.targets.native.forms import RouterForm
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed_linears import Int8Linear

from ... import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
FAMILIES = ("mixtral", "qwen3moe", "olmoe", "qwen2moe", "glm4moe", "gptoss", "deepseek2", "deepseek3")
TYPES = (torch.float32, torch.bfloat16)


def block(name: str, dtype: torch.dtype) -> Any:
    """A layer's router and experts."""
    return tiny.build_model(name).to(dtype).model.layers[2].mlp


def router_of(mlp: Any) -> Any:
    """The module that chooses a layer's experts."""
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def output_of(mlp: Any, states: Tensor) -> Tensor:
    """What a layer's experts make of states [B, S, H]."""
    out: Any = mlp(states)
    return out[0] if isinstance(out, tuple) else out


def chosen(experts: Any, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """States, and some experts for each, with weights."""
    draw = torch.Generator().manual_seed(count)
    size = experts.num_experts, getattr(experts, "hidden_dim", None) or experts.hidden_size
    ids = torch.stack([torch.randperm(size[0], generator=draw)[:2] for _ in range(count)])
    return torch.randn(count, size[1], generator=draw).to(dtype), ids, torch.rand(count, 2, generator=draw).to(dtype)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_they_make_what_the_modules_make(name: str, dtype: torch.dtype) -> None:
    experts = block(name, dtype).experts
    native = NativeExperts(experts, NativeLinear)
    for count in (1, 7, 40):
        given = chosen(experts, count, dtype)
        wanted = experts(*given)
        found = native(*given)
        assert found.dtype == dtype
        close = float(wanted.abs().max()) * (1e-5 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(found, wanted, rtol=0, atol=close)


@pytest.mark.parametrize("layout", [NativeLinear, Int8Linear])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_s_result_does_not_depend_on_the_others(layout: type[NativeLinear], dtype: torch.dtype) -> None:
    native = NativeExperts(block("olmoe", dtype).experts, layout)
    states, ids, weights = chosen(native, 37, dtype)
    together = native(states, ids, weights)
    alone = torch.cat([native(states[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(37)])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert together.equal(alone)
    assert native(states[order], ids[order], weights[order]).equal(together[order])


def test_eight_bits_are_close() -> None:
    experts = block("mixtral", torch.float32).experts
    given = chosen(experts, 20, torch.float32)
    wanted = experts(*given)
    found = NativeExperts(experts, Int8Linear)(*given)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("name", FAMILIES)
def test_a_router_s_form_is_found_by_trying_it(name: str) -> None:
    router = router_of(block(name, torch.bfloat16))
    if name in ("glm4moe", "deepseek3"):
        router.e_score_correction_bias += torch.rand(4, generator=torch.Generator().manual_seed(1))
    form = RouterForm.of(router, torch.bfloat16)
    assert form.sigmoid == (name in ("glm4moe", "deepseek3"))
    assert form.renormalized == getattr(router, "norm_topk_prob", name in ("mixtral", "gptoss"))
    assert form.rounds_scores == (name not in ("glm4moe", "deepseek2", "deepseek3"))
    assert form.rounds_weights == (name in ("qwen3moe", "olmoe", "qwen2moe", "gptoss"))
    assert (form.offset is not None) == (name == "gptoss")
    assert form.scale == {"glm4moe": 1.5, "deepseek2": 2.0, "deepseek3": 2.5}.get(name, 1.0)
    groups = {"deepseek2": (3, 2, 1), "deepseek3": (2, 1, 2)}.get(name, (1, 1, 1))
    assert (form.groups, form.groups_used, form.summed) == groups


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_routers_choose_as_they_did(name: str, dtype: torch.dtype) -> None:
    mlp = block(name, dtype)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = router_of(mlp)(x)
    replace_experts(mlp, NativeLinear, dtype)
    assert isinstance(router_of(mlp), NativeRouter)
    found = router_of(mlp)(x)
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    same = (found[2].sort(1).values == wanted[2].sort(1).values).all(1)
    assert same.float().mean() > 0.9
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found[1].sort(1).values[same].float(), wanted[1].sort(1).values[same].float(), rtol=0, atol=atol
    )


def test_routers_that_choose_in_other_ways_are_refused() -> None:
    router = block("mixtral", torch.float32).gate
    forward = router.forward
    router.forward = lambda x: (*forward(x)[:2], forward(-x)[2])
    with pytest.raises(UnsupportedModelError, match="in another way"):
        RouterForm.of(router, torch.float32)
    with pytest.raises(UnsupportedModelError, match="scores, weights and indices"):
        RouterForm.of(nn.Linear(32, 4), torch.float32)

    class Temper(nn.Module):
        weight = nn.Parameter(torch.randn(4, 32), requires_grad=False)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            scores = (x @ self.weight.T).tanh()
            return scores, *scores.softmax(1).topk(2)

    with pytest.raises(UnsupportedModelError, match="by more than a product"):
        RouterForm.of(Temper(), torch.float32)

    class Biased(Temper):
        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return super().forward(x + bias)

    with pytest.raises(UnsupportedModelError, match=r"can't be tried: .*bias"):
        RouterForm.of(Biased(), torch.float32)


def test_experts_of_another_kind_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    clipped = block("mixtral", torch.float32)
    clipped.experts._apply_gate = lambda both: both.clamp(-9, 9)[..., :48] * both[..., 48:]
    with caplog.at_level(logging.INFO, "eyas"):
        assert replace_experts(clipped, NativeLinear, torch.float32) == 0
    assert "MixtralExperts isn't replaced: the native module gives other results" in caplog.text
    odd = block("gptoss", torch.float32)
    odd.experts._apply_gate = lambda both: both[..., ::2].sigmoid() * both[..., 1::2]
    assert replace_experts(odd, NativeLinear, torch.float32) == 0
    assert replace_experts(block("mixtral", torch.float32), NativeLinear, torch.bfloat16) == 0


@pytest.mark.parametrize("name", ["qwen2moe", "gptoss", "deepseek3"])
def test_replaced_experts_leave_the_fingerprint_as_it_was(name: str) -> None:
    model = tiny.build_model(name)
    layer = model.model.layers[2].mlp
    states = torch.randn(3, 5, 32)
    before = fingerprint(model)
    wanted = output_of(layer, states)
    assert replace_experts(model, NativeLinear, torch.float32) == (tiny.LAYERS if name == "gptoss" else 3)
    assert fingerprint(model) == before
    torch.testing.assert_close(output_of(layer, states), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    with pytest.raises(RuntimeError, match="no gradient"):
        layer.experts(states[0].requires_grad_(), *chosen(layer.experts, 5, torch.float32)[1:])
