"""Recorded passes give what passes give that are run as they are, whatever the slots held when they were recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.targets import Target, load_target
from eyas.targets.graphs import Outputs, PassGraphs, Recording, filled_up, recurring_rows
from eyas.targets.shapes import recurring
from eyas.targets.slots import KVShape, SlotCache
from eyas.tree import parse_tree
from eyas.types import Completion, DraftRound, Request, SamplingParams
from eyas.verify import Sampler

from .. import recording, tiny
from ..toy.pair import TOY_TARGET

CPU = torch.device("cpu")
LENGTHS = (9, 4, 7, 13, 1, 8)


class Counted:
    """Records, and counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, compute: Callable[[], Outputs]) -> Recording:
        made = recording.record(compute)

        def replay() -> None:
            self.replays += 1
            made.replay()

        return Recording(replay, made.outputs)


def requests(temperature: float) -> list[Request]:
    """Answers of different lengths, so that rows come and go."""
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=10 + 5 * i, temperature=temperature, seed=i), trace=True)
        for i, prompt in enumerate(tiny.prompts(*LENGTHS))
    ]


def run(engine: Engine, wanted: list[Request]) -> tuple[list[list[int]], list[tuple[int, DraftRound | None]]]:
    """The answers, and all draft trees in the order of rounds."""
    for request in wanted:
        engine.submit(request)
    done: dict[int, Completion] = {}
    drafts = []
    while len(done) < len(wanted):
        for chunk in engine.step():
            drafts.append((chunk.index, chunk.draft))
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
    return [done[index].token_ids for index in sorted(done)], drafts


OFTEN = ("dspark", "xpress", "peagle", "eagle3", "mla", "medusa")
"""Kinds of drafters whose passes differ."""


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "of", tiny.sample([(name, (0.0, 0.9)[at // 3 % 2]) for at, name in enumerate(tiny.ARCHITECTURES)]), ids=str
)
def test_answers_are_the_same_on_every_architecture(of: tuple[str, float]) -> None:
    name, temperature = of
    counted = Counted()
    model = tiny.build_model(name)
    plain = Target(model)
    recorded = Target(model, record=counted)
    assert recorded.record is not None
    wanted = requests(temperature)
    expected, _ = run(Engine(plain, batch_size=1), wanted)
    sequences = [[*r.prompt, *a] for r, a in zip(wanted, expected, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (0, 2, tiny.LAYERS))
    before = counted.replays
    assert run(Engine(recorded, batch_size=4), wanted)[0] == expected
    speculation = Speculation(oracle, parse_tree("dynamic:4,3,8"))
    assert run(Engine(recorded, None, speculation, batch_size=4), wanted)[0] == expected
    assert counted.replays > before + 20


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in tiny.KINDS]
)
def test_drafts_are_the_same_with_every_kind_of_drafter(kind: str) -> None:
    tree = ("dynamic:4,3,8", "chain:4")[[*tiny.KINDS].index(kind) % 2]
    target = tiny.target("llama")
    counted = Counted()
    found = []
    for record in (None, counted):
        drafter = tiny.drafter(kind)
        drafter.pairs.record = record
        found.append(run(Engine(target, None, Speculation(drafter, parse_tree(tree)), batch_size=3), requests(0.7)))
    assert found[0][0] == found[1][0]
    same_drafts(found[0][1], found[1][1])
    assert counted.replays > 50


def test_a_recorded_draft_reads_states_where_they_are() -> None:
    counted = Counted()
    found = []
    tree = parse_tree("chain:4")
    for record in (None, counted):
        drafter = tiny.drafter("eagle3")
        draw = torch.Generator().manual_seed(0)
        drafter.pairs.record = record
        drafter.pairs.resize(2)
        coupling = Sampler(2, tiny.VOCAB, tiny.DEVICE).coupling(range(2), False)
        for step in range(6):
            if step == 4:  # of the same size, but elsewhere
                drafter.pairs.reshape(2, drafter.pairs.cache.capacity)
            taps = torch.randn(2, 3, len(drafter.taps), tiny.HIDDEN, generator=draw)
            tokens = torch.randint(tiny.VOCAB, (2, 3), generator=draw)
            drafter.observe(range(2), tokens.to(tiny.DEVICE), taps.to(tiny.DEVICE), [3, 2])
            found.append(drafter.draft(range(2), tree, coupling).tokens.tolist())
    assert found[:6] == found[6:]
    assert len(drafter.pairs.cache.drafts) == 1


def test_drafts_of_a_language_model_are_the_same() -> None:
    target = tiny.target("llama")
    counted = Counted()
    small = tiny.build_model("llama", num_hidden_layers=2)
    found = []
    for record in (None, counted):
        drafter = SmallLmDrafter(Target(small, record=record))
        speculation = Speculation(drafter, parse_tree("dynamic:4,3,8"))
        found.append(run(Engine(target, None, speculation, batch_size=3), requests(0.7)))
    assert found[0][0] == found[1][0]
    same_drafts(found[0][1], found[1][1])
    assert counted.replays > 50


def same_drafts(expected: list[tuple[int, DraftRound | None]], found: list[tuple[int, DraftRound | None]]) -> None:
    assert sum(draft is not None for _, draft in expected) > 50
    for (index, left), (other, right) in zip(expected, found, strict=True):
        assert index == other
        if left is None or right is None:
            assert left is right
            continue
        assert (left.tokens, left.parents, left.path) == (right.tokens, right.parents, right.path)
        assert left.logprob == pytest.approx(right.logprob, rel=1e-3, abs=1e-3)


def test_a_model_that_asks_the_device_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _given, out: out * (1.0 + 0.0 * out.sum().item()))
    target = Target(model, record=recording.record)
    assert target.record is None
    assert "no CUDA graphs can be recorded" in caplog.text


def test_a_model_whose_passes_depend_on_the_host_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """What Python adds while a pass is recorded would be added to all that follow."""
    model = tiny.build_model("llama")
    added = [0.0]

    def record(compute: Callable[[], Outputs]) -> Recording:
        added[0] = 0.5
        made = recording.record(compute)
        added[0] = 0.0
        return made

    model.model.layers[1].mlp.register_forward_hook(lambda _module, _given, out: out + added[0])
    assert Target(model, record=record).record is None
    assert "different logits" in caplog.text


def test_failing_later_goes_on_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(tiny.build_model("llama"), record=recording.record)
    assert target.record is not None
    target.record = recording.refuse
    wanted = requests(0.0)
    engine = Engine(target, batch_size=4)
    assert run(engine, wanted)[0] == run(Engine(tiny.target("llama"), batch_size=4), wanted)[0]
    assert engine._core.runner.slots.cache.graphs.failure == "nothing is recorded here"
    assert "nothing is recorded here" in caplog.text


def test_a_moved_cache_is_recorded_anew() -> None:
    counted = Counted()
    graphs = PassGraphs(counted, uses=1)
    cache = SlotCache([(KVShape(1, 2), KVShape(1, 2))], 2, torch.float32, CPU)
    cache.graphs = graphs
    tokens = torch.zeros(1, 1)

    def compute(rows: range, end: int | None, lengths: Tensor, tokens: Tensor) -> tuple[Tensor]:
        staging = cache.staging(rows, 1, 0, lengths, end)
        key, _ = cache.write(
            0, tokens.view(1, 1, 1, 1).expand(1, 1, 1, 2), tokens.view(1, 1, 1, 1).expand(1, 1, 1, 2), staging
        )
        return (key.sum(dim=(1, 2, 3)),)

    assert graphs.run("sum", cache, range(1), 1, (tokens + 1,), compute) == (torch.tensor([2.0]),)
    assert graphs.run("sum", cache, range(1), 1, (tokens + 3,), compute) == (torch.tensor([6.0]),)
    assert (len(graphs), counted.replays) == (1, 1)
    cache.reshape(2, 512)
    assert graphs.run("sum", cache, range(1), 1, (tokens + 5,), compute) == (torch.tensor([10.0]),)
    assert (len(graphs), counted.replays) == (1, 1)


def test_the_latest_used_are_kept() -> None:
    graphs = PassGraphs(recording.record, uses=1)
    cache = SlotCache([], 1, torch.float32, CPU)
    for kind in range(200):
        for _ in range(2):
            (out,) = graphs.run(kind, cache, range(1), 1, (torch.ones(1, 1),), lambda _r, _e, _l, x: (x + 1,)) or ()
            assert out == 2.0
    assert len(graphs) == 128


@given(st.integers(1, 5000))
def test_sizes_recur(count: int) -> None:
    assert count <= recurring(count) <= max(count, count * 1.5)
    assert recurring(recurring(count)) == recurring(count)


def test_few_sizes_recur() -> None:
    assert sorted({recurring(count) for count in range(1, 33)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 40))
def test_rows_and_columns_recur_within_the_cache(lengths: list[int], count: int, staged: int) -> None:
    cache = SlotCache([], len(lengths), torch.float32, CPU, 768)
    cache.lengths[:] = lengths
    rows = range(min(count, len(lengths)))
    found = recurring_rows(cache, rows, staged)
    fits = cache.start(rows) + staged <= cache.capacity
    assert (found is not None) == fits
    if found is not None:
        assert found.rows.start == 0
        assert len(rows) <= len(found.rows) <= len(lengths)
        assert cache.start(found.rows) + staged <= found.end <= cache.capacity


def test_filling_up() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert filled_up(tensor, 2, 3) is tensor
    assert filled_up(tensor, 3).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    assert filled_up(tensor > 0, 2, 4).tolist() == [[False, True, True, False], [True, True, True, False]]


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(UsageError, match="`eager=`"):
        load_target(TOY_TARGET, device="cpu", eager=True)
