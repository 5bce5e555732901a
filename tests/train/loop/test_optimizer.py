"""Muon moves weights as torch's does, whatever precision it orthogonalizes in, and shares its states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from eyas.train.loop import optimizer
from eyas.train.loop.optimizer import (
    Muon,
    OptimizerConfig,
    ResolvedOptimizer,
    build_optimizers,
    computes_in_bf16,
    orthogonalized,
)

SHAPES = [(8, 8), (12, 6), (6, 12), (8, 8), (12, 6), (8, 8)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def weights(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def steps(made: torch.optim.Optimizer, parameters: list[nn.Parameter], numbers: range) -> list[torch.Tensor]:
    """The weights after a step for each of `numbers`, which seed the gradients; the fifth never has one."""
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        for i, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = None if i == 4 else gradient
        made.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    dtype: torch.dtype = request.param
    monkeypatch.setattr(optimizer, "computes_in_bf16", lambda _: dtype == torch.bfloat16)
    return dtype


@pytest.mark.usefixtures("precision")
def test_it_moves_weights_as_torch_does() -> None:
    """Where bfloat16 is what differs: torch rounds to it in every product."""
    ours = weights()
    theirs = weights()
    moved = steps(Muon(ours, lr=0.1), ours, range(3))
    expected = steps(torch.optim.Muon(theirs, lr=0.1), theirs, range(3))
    for weight, other, start in zip(moved, expected, weights(), strict=True):
        update, right = weight - start, other - start
        assert (update - right).norm() <= 0.05 * right.norm()
    assert torch.equal(moved[4], weights()[4])
    assert not torch.equal(moved[0], weights()[0])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "eps": 10.0},
    ],
    ids=["defaults", "plain momentum", "as AdamW", "iteration"],
)
def test_all_but_the_precision_is_torchs(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    def in_float32(
        grad: torch.Tensor, coefficients: tuple[float, float, float], count: int, eps: float
    ) -> torch.Tensor:
        return orthogonalized(grad, coefficients, count, eps, torch.float32)

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float32)
    monkeypatch.setattr(optimizer, "computes_in_bf16", lambda _: False)
    ours = weights()
    theirs = weights()
    moved = steps(Muon(ours, lr=0.1, **settings), ours, range(3))
    expected = steps(torch.optim.Muon(theirs, lr=0.1, **settings), theirs, range(3))
    for weight, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


def test_its_defaults_are_torchs() -> None:
    assert Muon(weights()).defaults == torch.optim.Muon(weights()).defaults


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("writer", [Muon, torch.optim.Muon])
def test_states_are_torchs(writer: type[torch.optim.Muon]) -> None:
    reader = torch.optim.Muon if writer is Muon else Muon
    whole = weights()
    halves = weights()
    expected = steps(writer(whole, lr=0.1), whole, range(4))
    first = writer(halves, lr=0.1)
    steps(first, halves, range(2))
    second = reader(halves, lr=0.7)  # what was saved decides
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for weight, other in zip(steps(second, halves, range(2, 4)), expected, strict=True):
        assert (weight - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_singular_values_come_near_one_batched_or_not(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    done = orthogonalized(matrices, COEFFICIENTS, 5, 1e-7, torch.float32)
    sizes = torch.linalg.svdvals(done)
    assert sizes.shape == (3, min(shape))
    assert sizes.min() > 0.3
    assert sizes.max() < 1.3
    for matrix, batched in zip(matrices, done, strict=True):
        torch.testing.assert_close(orthogonalized(matrix, COEFFICIENTS, 5, 1e-7, torch.float32), batched)


def test_large_matrices_go_alone_and_small_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(matrices: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tuple(matrices.shape))
        return orthogonalized(matrices, *rest)

    monkeypatch.setattr(optimizer, "orthogonalized", watched)
    monkeypatch.setattr(optimizer, "_BATCHED", 64)
    steps(Muon(weights()), weights(), range(0))
    parameters = weights()
    steps(Muon(parameters), parameters, range(1))
    assert sorted(seen) == [(3, 8, 8), (6, 12), (12, 6)]


def test_a_gpu_computes_in_bf16_and_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes_in_bf16(torch.device("cuda"))
    for answer in (True, False):
        monkeypatch.setattr(optimizer, "cpu_trains_in", lambda _, answer=answer: answer)
        assert computes_in_bf16(torch.device("cpu")) is answer


def test_matrices_inside_layers_are_muons() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "inner": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)})
    adamw, muon = build_optimizers(model, ResolvedOptimizer(kind="muon", matrix_lr=0.3))
    assert isinstance(muon, Muon)
    assert [id(p) for g in muon.param_groups for p in g["params"]] == [id(model["inner"].weight)]
    assert sum(len(g["params"]) for g in adamw.param_groups) == 4
    assert muon.param_groups[0]["peak_lr"] == 0.3


@pytest.mark.parametrize(
    ("width", "sharded", "expected"),
    [
        (256, False, ("muon", 1e-3, 0.08)),
        (576, False, ("muon", 1e-3, 0.04)),
        (4096, False, ("muon", 1.5e-4, 0.0056)),
        (16_384, False, ("muon", 1e-4, 0.0014)),
        (576, True, ("adamw", 1e-4, 0.04)),
    ],
)
def test_rates_follow_the_width(width: int, sharded: bool, expected: tuple[str, float, float]) -> None:
    found = OptimizerConfig(kind="auto", lr="auto", matrix_lr="auto", clip=0.5).resolved(width, sharded)
    assert (found.kind, found.lr, found.matrix_lr, found.clip) == (*expected, 0.5)


def test_given_rates_are_kept() -> None:
    given = OptimizerConfig(kind="adamw", lr=1.234e-3, matrix_lr=0.3456, betas=(0.8, 0.9))
    assert given.resolved(576, sharded=False).model_dump() == given.model_dump()
