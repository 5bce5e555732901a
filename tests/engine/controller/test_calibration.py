"""Start-up calibration on a tiny pair: it measures what it says and leaves nothing behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.drafters.base import Drafter
from eyas.drafters.checkpoint import save_network
from eyas.drafters.loading import load_drafter
from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.drafters.weightless.lookahead import LookaheadDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine
from eyas.engine.controller import CostTable, Curve, calibration, costs_for, make_controller
from eyas.engine.controller.calibration import calibrate, describe, sensible
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.targets.backend import GraphsBackend, ModulesBackend, NativeBackend
from eyas.targets.linears import PrepackedLinear, prepack_linears
from eyas.targets.native.library import kernels
from eyas.types import Request, SamplingParams

from ... import tiny
from .simulation import Machine


def test_every_curve_is_measured_and_the_slots_are_empty_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_MAX_SLOWDOWN", math.inf)  # however a busy machine stalls
    target = tiny.target("llama")
    drafter = tiny.drafter("eagle3")
    table = calibrate(target, drafter, batch_size=3, widest=60, seconds=0.0)
    assert table.pass_by_tokens.sizes[:4] == (1, 2, 3, 4)
    assert table.pass_by_tokens.sizes[-1] == 64
    assert table.pass_by_rows.sizes == table.draft_by_rows.sizes == (1, 2, 3)
    assert table.level_by_positions.sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert table.observe_by_pairs.sizes[-1] == 256
    for curve in (table.pass_by_tokens, table.draft_by_rows, table.observe_by_pairs):
        assert min(curve.seconds) > 0.0
    assert "llama" in table.measured_on
    assert "float32" in table.measured_on
    assert drafter.pairs.slots == 0
    assert table.read_by_pairs is None  # observing reads the pairs


@pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
def test_a_saved_table_is_that_of_the_next_start_with_several_threads(tmp_path: Path) -> None:
    """Native passes have threads of their own and give PyTorch one, which says nothing about the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        target = tiny.quick_target()
        made = [costs_for(target, SuffixDrafter(target.device), 1, tmp_path / "costs.json") for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert "with 2 threads" in made[0].measured_on
    assert made[1] == made[0]


def test_reading_is_measured_in_a_draft_where_observing_only_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt costs a small LM as much as any model, and observing it nothing."""
    drafter = SmallLmDrafter(tiny.target("llama"))
    target = tiny.target("llama")
    table = calibrate(target, drafter, batch_size=2, widest=60, seconds=0.0)
    assert table.read_by_pairs is not None
    assert table.read_by_pairs.sizes == (1, 4, 16, 64)  # more don't fit the context
    bench = calibration._Bench(target, drafter, 2, 60)
    bench._resize(1, 100)
    read = list[int]()
    chunk = drafter.model.prefill_chunk
    monkeypatch.setattr(
        drafter.model,
        "prefill_chunk",
        lambda cache, rows, tokens, taps: read.append(len(tokens[0])) or chunk(cache, rows, tokens, taps),
    )
    for pairs in (1, 1, 16):  # the first one also reads what the slot began with
        bench._read_late(pairs)
    assert read[2] == read[1] + 15
    curve = bench._reading({1: 2.5, 4: 1.0, 16: 3.0}, {1: 2.0})
    assert curve == Curve(sizes=(1.0, 4.0, 16.0), seconds=(0.0, 0.0, 1.0))


@pytest.mark.parametrize(("rows", "largest"), [(1, 8), (16, 32)])
def test_passes_too_large_to_pay_are_left_out(rows: int, largest: int) -> None:
    """A pass takes as many seconds as it has tokens; sizes up to two tokens a row are measured whatever they take."""
    bench = object.__new__(calibration._Bench)
    bench._rows = [1, rows]
    bench._target = tiny.target("gpt2")
    sizes = {("tokens", n): (lambda n=n: float(n)) for n in (1, 2, 4, 8, 16, 32, 64)} | {("pairs", 64): lambda: 64.0}
    runs = bench._turns(dict(sizes), 0.0)
    assert list(runs) == [("tokens", n) for n in (1, 2, 4, 8, 16, 32, 64) if n <= largest] + [("pairs", 64)]
    assert {len(taken) for taken in runs.values()} == {3}  # the fewest, as there is no time left


def test_drafts_and_plain_passes_come_after_a_pass() -> None:
    """As in service: a draft that finds its own weights in the caches takes half as long."""
    bench = object.__new__(calibration._Bench)
    order = list[str]()
    bench._rows = [1]
    bench._target = SimpleNamespace(backend=NativeBackend())  # type: ignore[assignment]

    def timed(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    work = {("rows", 1): timed("pass", 1e-3), ("first", 1): timed("draft", 1e-3), ("level1", 1): timed("draft", 1e-3)}
    runs = bench._turns(dict(work), 1.0)
    assert all(before == "pass" for before, after in itertools.pairwise(order) if after == "draft")
    assert len({len(taken) for taken in runs.values()}) == 1  # the passes between aren't counted
    order.clear()
    bench._turns({**work, ("rows", 1): timed("pass", 1.0)}, 100.0)  # what caches hold doesn't matter there
    assert order.count("pass") < order.count("draft")


def test_trees_come_after_a_draft_and_plain_passes_after_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in service, where a draft has just filled the caches, or where all rounds are plain."""
    bench = object.__new__(calibration._Bench)
    order = list[str]()
    bench._rows = [1]
    bench._levels = 3
    bench._target = SimpleNamespace(backend=NativeBackend())  # type: ignore[assignment]
    monkeypatch.setattr(bench, "_draft", lambda *_: order.append("draft"))
    monkeypatch.setattr(bench, "_read", lambda *_: order.append("read"))

    def timed(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1e-3  # type: ignore[func-returns-value]

    bench._turns({("tokens", 1): timed("plain"), ("tokens", 4): timed("tree")}, 1.0)
    laps = order.count("tree")
    later = [*["plain"] * 21, "read", "draft", "tree"] * (laps - 1)
    assert order == ["plain", "read", "draft", "tree", *later]  # nothing comes before the first run


def test_noise_is_bounded_by_what_holds_on_any_machine() -> None:
    assert sensible({1: 10.0, 2: 4.0, 4: 5.0, 8: 90.0, 12: 11.0}) == {1: 4.0, 2: 4.0, 4: 5.0, 8: 10.0, 12: 11.0}
    assert sensible({1: 1.0, 3: 50.0}) == {1: 1.0, 3: 3.0}
    sound = {1: 3.0, 2: 3.5, 8: 4.0, 64: 9.0}
    assert sensible(sound) == sound


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_a_short_context_and_windows_are_no_obstacle(name: str) -> None:
    target = tiny.target(name)
    assert calibrate(target, tiny.drafter("eagle3"), 1, widest=4, seconds=0.0).pass_by_tokens.sizes[-1] <= 64


def test_an_engine_decodes_the_same_after_it() -> None:
    target = tiny.target("llama")
    request = Request(tuple(tiny.prompts(9)[0]), SamplingParams(max_tokens=12))
    engine = Engine(target)
    before = engine.generate([request])[0].token_ids
    calibrate(target, tiny.drafter("eagle3"), 2, widest=60, seconds=0.0)
    assert engine.generate([request])[0].token_ids == before


def test_costs_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target("llama")
    drafter = tiny.drafter("eagle3")
    path = tmp_path / "costs.json"
    measured = costs_for(target, drafter, 1, path)
    monkeypatch.setattr("eyas.engine.controller.calibration.calibrate", None)  # not called a second time
    assert costs_for(target, drafter, 1, path) == measured == CostTable.read(path, measured.measured_on)
    with pytest.raises(UsageError, match="were measured on"):
        costs_for(target, tiny.drafter("eagle3", num_aux_hidden_states=2, taps=[0, 3]), 1, path)


def test_a_file_says_which_drafter_it_is_for(tmp_path: Path) -> None:
    target = tiny.target("llama")
    path = tmp_path / "costs.json"
    small = Target(tiny.build_model("gpt2"))
    drafters = {
        "Eagle3Network": tiny.drafter("eagle3"),
        "MlpNetwork": tiny.drafter("mlp"),
        "GPT2LMHeadModel": SmallLmDrafter(small),
        "SuffixDrafter": SuffixDrafter(target.device),
        "LookaheadDrafter": LookaheadDrafter(target.device, tiny.VOCAB),
    }
    named = {word: describe(target, drafter) for word, drafter in drafters.items()}
    assert len(set(named.values())) == len(drafters)
    for word, text in named.items():
        assert f"drafted for by {word}" in text
    Machine().table().model_copy(update={"measured_on": named["SuffixDrafter"]}).save(path)
    with pytest.raises(UsageError, match=r"by SuffixDrafter.* but this is .*by Eagle3Network"):
        costs_for(target, tiny.drafter("eagle3"), 1, path)
    # the same taps, another size
    assert describe(target, tiny.drafter("eagle3", intermediate_size=64)) != describe(target, tiny.drafter("eagle3"))


def test_a_file_is_for_a_model_not_for_a_number_of_parameters() -> None:
    """Two targets with as many weights: one deeper, one wider; and one whose weights are packed for the kernels."""
    drafter = tiny.drafter("mlp")
    plain, more_heads = (Target(tiny.build_model("llama", **sizes)) for sizes in ({}, {"num_key_value_heads": 4}))
    renamed = Target(tiny.build_model("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4))
    narrower = Target(tiny.build_model("llama", num_attention_heads=4, num_key_value_heads=1, head_dim=8))
    found = {describe(each, drafter) for each in (plain, more_heads, renamed, narrower)}
    assert len(found) == 4
    whole = sum(weight.numel() for weight in plain.model.parameters())
    assert f"of {whole} parameters" in describe(plain, drafter)
    prepack_linears(plain.model, PrepackedLinear, plain.dtype)
    assert f"of {whole} parameters" in describe(plain, drafter)


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
def test_a_file_says_whether_the_drafter_is_in_8_bits(tmp_path: Path) -> None:
    target = tiny.target("llama")
    save_network(tiny.eagle3_module(), tmp_path)
    eight, exact = (describe(target, load_drafter(tmp_path, target, quantize=how)) for how in ("int8", "off"))
    assert "parameters in int8" in eight
    assert "int8" not in exact


def test_widths_fit_the_draft_vocabulary_and_chains_are_chains() -> None:
    target = tiny.target("llama")
    costs = costs_for(tiny.target("llama"), tiny.drafter("eagle3"), 1)
    small = tiny.drafter("eagle3", draft_vocab_size=3)
    assert make_controller(target, small, "auto", 1, costs).arm.gain.widths == (1, 2, 3)
    assert make_controller(target, small, "auto:chain", 1, costs).arm.gain.widths == (1,)


def test_a_pair_is_measured_at_its_first_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("eyas.machine._machine_is_busy", lambda: False)
    measured: list[tuple[int, int]] = []

    def measure(target: Target, drafter: Drafter, rows: int, widest: int) -> CostTable:
        measured.append((rows, widest))
        table = Machine(unit=0.01 * len(measured)).table()
        return table.model_copy(update={"measured_on": describe(target, drafter)})

    monkeypatch.setattr(calibration, "calibrate", measure)
    target = tiny.target("llama")
    first = costs_for(target, tiny.drafter("eagle3"), 1)
    assert costs_for(tiny.target("llama"), tiny.drafter("eagle3"), 1) == first
    assert len(measured) == 1
    others = [costs_for(target, tiny.drafter("eagle3"), 4), costs_for(target, tiny.drafter("mlp"), 1)]
    assert len(measured) == 3
    assert first not in others
    assert others[0] != others[1]


@pytest.mark.parametrize(("native", "runs"), [(True, 1), (False, 3)])
def test_long_runs_of_native_passes_are_not_repeated(native: bool, runs: int) -> None:
    """Other kernels are prepared in the first run of a size."""
    bench = object.__new__(calibration._Bench)
    bench._rows = [1]
    bench._target = SimpleNamespace(backend=NativeBackend() if native else ModulesBackend())  # type: ignore[assignment]
    taken = iter([0.5, 0.4, 0.4])
    found = bench._turns({("rows", 1): lambda: 0.001, ("rows", 64): lambda: next(taken)}, 4.0)
    assert [len(times) for times in found.values()] == [8, runs]


def test_a_size_measured_in_slow_moments_keeps_its_place() -> None:
    """Two of three runs of a size take twice as long; its cost is what it takes otherwise."""
    bench = object.__new__(calibration._Bench)
    bench._rows = [1]
    bench._target = SimpleNamespace(backend=NativeBackend())  # type: ignore[assignment]
    taken = iter([0.8, 0.4, 0.8])
    found = bench._turns({("rows", 1): lambda: 0.1, ("rows", 64): lambda: next(taken)}, 8.0)
    assert [calibration._lower_quartile(runs) for runs in found.values()] == [0.1, 0.4]


def test_runs_that_record_a_graph_do_not_count() -> None:
    bench = object.__new__(calibration._Bench)
    bench._rows = [1]
    bench._target = SimpleNamespace(backend=GraphsBackend())  # type: ignore[assignment]
    taken = iter([0.5, 9.0, 0.3, 0.2, 0.4])
    assert bench._turns({("tokens", 1): lambda: next(taken)}, 0.0) == {("tokens", 1): [0.3, 0.2, 0.4]}
