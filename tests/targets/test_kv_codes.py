"""Keys and values in 8 bits: rounded once, the same everywhere; no token of plain decoding changes by speculation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import eyas
from eyas.bench.offline.certificate import own_modules
from eyas.drafters.loading import drafter_of
from eyas.drafters.weightless import METHODS as WEIGHTLESS
from eyas.engine import Engine, Limits, Speculation
from eyas.engine.controller.calibration import describe
from eyas.errors import UnsupportedModelError, UsageError
from eyas.targets import Target, load_target
from eyas.targets.loading import quantize_kv_cache
from eyas.targets.native.library import kernels
from eyas.targets.slots import dequantize_kv, quantize_kv
from eyas.tree import parse_tree

from .. import tiny
from ..pairs import save_target

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
_ALL = {"num_attention_heads": 4, "num_key_value_heads": 4}
NAMES: dict[str, dict[str, int]] = {"llama": {}, "gemma2": {"head_dim": 16}, "deepseek2": _ALL, "lfm2": {}}


def target(name: str, kind: str = "bfloat16") -> Target:
    """A native target whose caches hold codes."""
    made = copy.copy(tiny.as_loaded(name, kind, **NAMES[name]))
    assert made.native is not None
    made.kv_in_codes = True
    return made


def test_codes_are_the_nearest_and_what_is_no_number_stays_so() -> None:
    x = torch.randn(3, 5, 64) * torch.logspace(-6, 6, 5).unsqueeze(1)
    x[0, 0] = 0.0
    x[1, 1, 3] = float("nan")
    x[2, 2, 7] = float("inf")
    back = dequantize_kv(quantize_kv(x), torch.float32)
    whole = x.isfinite().all(-1)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((back - x).abs() <= 0.501 * step)[whole].all()
    assert back[~whole].isnan().all(-1).tolist() == [True, True]
    assert not back[0, 0].any()
    halves = torch.tensor([127.0, 0.5, 1.5, -2.5] * 4)
    assert dequantize_kv(quantize_kv(halves), torch.float32).tolist() == [127.0, 0.0, 2.0, -2.0] * 4


def cached(of: Target, prompt: list[int]) -> list[torch.Tensor]:
    slots = of.allocate(1)
    for _ in of.prefill(slots, range(1), [prompt], (), 4):
        pass
    return slots.copy_out(0, 0, len(prompt) - 1)


@pytest.mark.parametrize(("name", "kind"), tiny.sample([*NAMES], ["float32", "bfloat16"]))
def test_kernels_write_what_pytorch_does(name: str, kind: str) -> None:
    """The keys and values of the first layer that has any are the same with codes and without."""
    with_codes = target(name, kind)
    plain = tiny.as_loaded(name, kind, **NAMES[name])
    prompt = tiny.prompts(12)[0]
    for codes, floats in zip(cached(with_codes, prompt), cached(plain, prompt), strict=True):
        assert torch.equal(codes[0], quantize_kv(floats[0]))
        assert codes.shape[-1] == floats.shape[-1] + 4


@pytest.mark.parametrize("name", NAMES)
def test_native_passes_compute_what_modules_do(name: str) -> None:
    """Both attend to the codes: they differ less from each other than by what codes change."""
    native = target(name, "float32")
    modules = copy.copy(native)
    plain = tiny.as_loaded(name, "float32", **NAMES[name])
    modules.decoder = None
    logits = []
    for each in (native, modules, plain):
        slots = each.allocate(1)
        found, _ = each.prefill_to_end(slots, range(1), [tiny.prompts(20)[0]], ())
        logits.append(found.rows[0].float())
    changed = (logits[1] - logits[2]).abs().max()
    assert changed > 0
    assert (logits[0] - logits[1]).abs().max() < 0.1 * changed


def answers(of: Target, speculation: Speculation | None, limits: Limits) -> list[tuple[int, ...]]:
    prompts = [*tiny.prompts(5, 30, 12, 1, 9), tiny.prompts(70)[0], [*tiny.prompts(70)[0][:66], 5, 6, 7]]
    requests = [
        eyas.Request(tuple(prompt), eyas.SamplingParams(max_tokens=14, temperature=at % 2, seed=at, ignore_eos=True))
        for at, prompt in enumerate(prompts)
    ]
    engine = Engine(of, None, speculation, limits=limits)
    return [tuple(done.token_ids) for done in engine.generate(requests)]


@pytest.mark.parametrize("name", NAMES)
def test_speculation_gives_the_tokens_of_plain_decoding(name: str) -> None:
    """Greedily and seeded, with chains and trees, in batches, with prompts in chunks and prefixes that are shared."""
    with_codes = target(name)
    plain = answers(with_codes, None, Limits())
    shared = Limits(max_running=2, prefill_chunk=7, prefix_tokens=1000)
    assert answers(with_codes, None, shared) == plain
    for method, tree, limits in (
        ("suffix", "dynamic:4,3,8", Limits(max_running=4)),
        ("ngram", "chain:4", Limits()),
        ("ngram", "chain:3", shared),
    ):
        speculation = Speculation(WEIGHTLESS[method](with_codes), parse_tree(tree))
        assert answers(with_codes, speculation, limits) == plain, (method, tree)


def test_a_network_s_trees_give_the_tokens_of_plain_decoding() -> None:
    with_codes = target("llama")
    network = tiny.network("eagle1").to(torch.bfloat16)
    speculation = Speculation(
        drafter_of(network, network.config.default_taps(tiny.LAYERS)), parse_tree("dynamic:4,3,8")
    )
    assert answers(with_codes, speculation, Limits(max_running=4)) == answers(with_codes, None, Limits())


def test_they_take_half_the_memory_and_a_scale_a_head(tmp_path: Path) -> None:
    path = save_target(tmp_path / "model", hidden_size=64, head_dim=16)
    plain = load_target(path, dtype="bfloat16", device="cpu").allocate(1)
    target = load_target(path, dtype="bfloat16", device="cpu")
    quantize_kv_cache(target, "int8")
    codes = target.allocate(1)
    assert codes.column_bytes == plain.column_bytes // 32 * 20
    assert codes.nbytes() == plain.nbytes() // 32 * 20
    assert own_modules(str(path), target).allocate(1).in_codes


def test_costs_are_measured_for_them(tmp_path: Path) -> None:
    path = save_target(tmp_path / "model", hidden_size=64, head_dim=16)
    engines = [eyas.load(path, method="ngram", device="cpu", kv_cache_dtype=kind) for kind in ("auto", "int8")]
    described = [describe(each.target, each.speculation.drafter) for each in engines if each.speculation is not None]
    assert described[0] != described[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_cache_dtype": "fp8"}, "write auto or int8"),
        ({"kv_cache_dtype": "int8", "compiled": True}, "needs native passes"),
        ({"kv_cache_dtype": "int8", "attention": "eager"}, "needs native passes"),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, "needs native passes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        eyas.load(save_target(tmp_path / "model"), **({"device": "cpu"} | options))


def test_a_model_that_runs_its_modules_is_refused(tmp_path: Path) -> None:
    path = save_target(tmp_path / "model", "cohere")
    with pytest.raises(UnsupportedModelError, match="runs its modules"):
        eyas.load(path, device="cpu", kv_cache_dtype="int8")
