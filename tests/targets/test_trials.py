"""What trials of whole passes refuse, of tokens that are routed to experts too, and how many of them are run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.targets import Target, trials
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear

from .. import tiny


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize("wrong", [None, "embedding", "attention", "norm"])
def test_native_passes_of_routed_tokens_are_refused_for_what_is_wrong(wrong: str | None) -> None:
    model = tiny.build_model("gptoss", head_dim=16).to(torch.bfloat16)
    prepack_linears(model, NativeLinear)
    replace_experts(model, NativeLinear, torch.bfloat16)
    native = transformers_decoder(model)
    assert native is not None
    if wrong == "embedding":
        native._struct.embedding_scale = -1.0
    elif wrong == "attention":
        native._struct.scale = 0.0
    elif wrong == "norm":  # after all layers
        native._struct.norm = native._vector(-torch.ones(tiny.HIDDEN))
    assert (Target(model, decoder=native).native is None) == (wrong is not None)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_trials_end_when_half_surely_agree(count: int) -> None:
    for outcomes in product((False, True), repeat=count):
        rest = iter(outcomes)
        assert trials.half_agree(rest, count) == (2 * sum(outcomes) >= count)
        agree = [*accumulate(outcomes)]
        sure = (n for n, right in enumerate(agree, 1) if 2 * right >= count or 2 * (n - right) > count)
        assert count - len([*rest]) == next(sure)


class Scripted:
    """A target whose passes differ from its own by known amounts in each trial; counts what is run."""

    def __init__(self, gaps: Tensor, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:  # [trials, 4], [trials]
        self.decoder: object = None
        self.ragged = False
        self.dtype = torch.float32
        self.layers = torch.nn.ModuleList()
        self.model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
        self.gaps = gaps
        self.noise = noise
        self.moves = False
        self.run = Counter[str]()
        monkeypatch.setattr(trials, "first_tokens", lambda _: [*range(len(gaps))])
        monkeypatch.setattr(trials, "perturbed_by_rounding", self.moved)
        monkeypatch.setattr(trials, "_trial", self.trial)

    def allocate(self, _slots: int) -> Any:
        return SimpleNamespace(graphs=None)

    @contextmanager
    def moved(self, *_: Any) -> Iterator[None]:
        self.moves = True
        yield
        self.moves = False

    def trial(self, _target: Any, _cache: Any, first: int) -> Tensor:
        way = "native" if self.decoder is not None else "moved" if self.moves else "own"
        self.run[way] += 1
        apart = {"native": self.gaps[first], "moved": self.noise[first].expand(4), "own": torch.zeros(4)}[way]
        return torch.stack([apart, torch.ones(4)], 1)  # [4, V]; the greatest logit is 1


@pytest.mark.parametrize("count", [1, 8])
def test_verdicts_are_those_of_all_trials(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule in one line, with the noise of all of them; and what is refused once doesn't spoil the next verdict."""
    draw = torch.Generator().manual_seed(0)
    seen = Counter[bool]()
    for _ in range(400):
        noise = 1e-3 * torch.rand(count, generator=draw)
        gaps = 5e-3 * torch.rand(2, count, 4, generator=draw) ** torch.rand(1, generator=draw).mul(2)
        target = Scripted(gaps[0], noise, monkeypatch)
        trial: Any = trials.PassTrial(target)  # type: ignore[arg-type]
        target.decoder = "another way"
        for each in gaps:
            target.gaps = each
            whole = bool(((each <= 1e-3 + 4 * noise.max()).float().mean(0) >= 0.5).all())
            assert trial.passed() == whole
            assert target.decoder == "another way"
            seen[whole] += 1
        assert target.run["own"] <= count
        assert target.run["moved"] <= count
    assert min(seen.values()) > 100


def test_passes_that_agree_are_tried_half_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roundings are measured only as far as they decide."""
    for gap, noise, run in (
        (0.0, 0.0, {"own": 4, "native": 4}),
        (2e-3, 1e-3, {"own": 4, "native": 4, "moved": 1}),
        (2e-3, 0.0, {"own": 8, "native": 8, "moved": 8}),
    ):
        target = Scripted(torch.full((8, 4), gap), torch.full((8,), noise), monkeypatch)
        trial: Any = trials.PassTrial(target)  # type: ignore[arg-type]
        target.decoder = "another way"
        assert trial.passed() == (len(run) < 3 or noise > 0)
        assert target.run == run


def test_own_passes_run_without_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later trials, too, compare with the attention and the modules that the model had at first."""
    seen = Counter[tuple[bool, bool, str]]()
    whole = trials._trial

    def noted(target: Target, cache: Any, first: int) -> Tensor:
        seen[target.decoder is not None, target.ragged, target.model.config._attn_implementation] += 1
        return whole(target, cache, first)

    monkeypatch.setattr(trials, "_trial", noted)
    target = Target(tiny.build_model("qwen3moe"))
    attention = target.model.config._attn_implementation
    assert target.ragged
    assert seen == {(False, False, "sdpa"): 4, (False, True, attention): 4}
    assert attention != "sdpa"
