"""The slot cache against a plain Python model: a list of committed tokens for every slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from eyas.errors import CacheMemoryError
from eyas.targets import KVShape, SlotCache, slots
from eyas.targets.slots import Reshaping, dense_columns

from ..test_mapped import resident

CPU = torch.device("cpu")
# two layers whose keys and values differ in shape, one whose don't
LAYERS = [(KVShape(2, 3), KVShape(2, 5)), (KVShape(1, 4), KVShape(1, 4)), (KVShape(2, 3), KVShape(2, 5))]


def make(slots: int, capacity: int = 4) -> SlotCache:
    return SlotCache(LAYERS, slots, torch.float32, CPU, capacity)


def stage(cache: SlotCache, rows: range, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Write `values` [R, Q]: layer i's keys hold value + i / 10, its values minus that."""
    cache.reserve(cache.start(rows) + values.shape[1])
    staging = cache.staging(rows, values.shape[1])
    views = []
    for layer, (key, value) in enumerate(LAYERS):
        at = values[:, None, :, None] + layer / 10
        full_key = at.expand(-1, key.heads, -1, key.size)
        full_value = -at.expand(-1, value.heads, -1, value.size)
        views.append(cache.write(layer, full_key, full_value, staging))
    return views


def held(cache: SlotCache, slot: int) -> list[int]:
    """The committed values of a slot, every layer, head and channel agreeing."""
    length = cache.lengths[slot]
    rows = range(slot, slot + 1)
    cache.reserve(cache.start(rows) + 1)
    found: list[list[float]] = []
    for layer, (key, value) in enumerate(LAYERS):
        blank = (torch.zeros(1, key.heads, 1, key.size), torch.zeros(1, value.heads, 1, value.size))
        k, v = (t[0, :, :length] for t in cache.write(layer, *blank, cache.staging(rows, 1)))
        assert (k == k[:1, :, :1]).all()
        assert (v == v[:1, :, :1]).all()
        found += [(k[0, :, 0] - layer / 10).tolist(), (-v[0, :, 0] - layer / 10).tolist()]
    whole = [[round(x) for x in each] for each in found]
    assert all(each == whole[0] for each in whole)
    return whole[0]


class SlotMachine(RuleBasedStateMachine):
    """Any order of passes, commits, truncations and moves keeps exactly what was committed."""

    @initialize(number=st.integers(1, 4))
    def begin(self, number: int) -> None:
        self.cache = make(number)
        self.model: list[list[int]] = [[] for _ in range(number)]
        self.counter = 0

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """One pass over some rows; each keeps some of its columns, in order."""
        first = data.draw(st.integers(0, len(self.model) - 1))
        rows = range(first, data.draw(st.integers(first + 1, len(self.model))))
        width = data.draw(st.integers(1, 7))
        paths = [sorted(data.draw(st.sets(st.integers(0, width - 1), max_size=width)), reverse=False) for _ in rows]
        values = torch.arange(self.counter, self.counter + len(rows) * width).view(len(rows), width).float()
        self.counter += values.numel()
        start = self.cache.start(rows)
        views = stage(self.cache, rows, values)
        for layer, (keys, _) in enumerate(views):
            assert keys.shape[2] == start + width
            for row, slot in enumerate(rows):
                own = self.cache.lengths[slot]
                assert torch.allclose(keys[row, 0, own : own + width, 0], values[row] + layer / 10)
        self.cache.commit(rows, paths)
        for row, (slot, path) in enumerate(zip(rows, paths, strict=True)):
            self.model[slot] += [int(values[row, column]) for column in path]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.model) - 1))
        length = data.draw(st.integers(0, 20))
        self.cache.truncate(slot, length)
        del self.model[slot][length:]

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        if len(self.model) > 1:
            source, target = data.draw(st.permutations(range(len(self.model))))[:2]
            self.cache.move(source, target)
            self.model[target] = self.model[source]
            self.model[source] = []

    @rule(columns=st.integers(0, 40))
    def reserve(self, columns: int) -> None:
        self.cache.reserve(columns)
        assert self.cache.capacity >= columns

    @invariant()
    def holds_what_was_committed(self) -> None:
        for slot, tokens in enumerate(getattr(self, "model", [])):
            assert self.cache.lengths[slot] == len(tokens)
            assert held(self.cache, slot) == tokens


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_what_a_pass_reads_is_a_view_not_a_copy() -> None:
    cache = make(3, capacity=16)
    views = stage(cache, range(1, 3), torch.ones(2, 2))
    staging = cache.staging(range(1, 3), 2)
    again = cache.write(0, torch.full((2, 2, 2, 3), 9.0), torch.full((2, 2, 2, 5), 9.0), staging)
    for before, now in zip(views[0], again, strict=True):
        assert before.data_ptr() == now.data_ptr()
        assert (before == 9.0).all()


def test_rows_of_any_length_stage_behind_what_they_hold() -> None:
    """A short row's pass writes nothing beyond its own columns, and a chain lies where it is committed."""
    cache = make(3, capacity=16)
    stage(cache, range(1), torch.arange(9.0)[None])
    cache.commit(range(1), [range(9)])
    views = stage(cache, range(3), torch.tensor([[20.0, 21], [30, 31], [40, 41]]))
    for keys, _ in views:
        assert not keys[1:, :, 2:].any()
    cache.commit(range(3), [[0], [0, 1], []])
    assert [held(cache, slot) for slot in range(3)] == [[*range(9), 20], [30, 31], []]
    views = stage(cache, range(1, 3), torch.tensor([[50.0], [60]]))
    assert [round(float(views[0][0][row, 0, at, 0])) for row, at in ((0, 2), (1, 0))] == [50, 60]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_what_was_copied_ahead_follows_the_slots(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Slots are shortened, moved and filled while their columns are copied to a larger cache, in three pieces."""
    monkeypatch.setattr(slots, "_MIN_COPIED_COLUMNS", 0)
    cache = make(4, capacity=16)
    stage(cache, range(4), torch.arange(20.0).view(4, 5))
    cache.commit(range(4), [range(5)] * 4)
    reshaping = cache.reshaping = Reshaping(cache, 6, 32, layers=2)
    assert [reshaping.catch_up(cache.lengths, 0.0) for _ in range(ahead)] == [False] * ahead
    assert ahead < 3 or reshaping.catch_up(cache.lengths, 10.0)
    cache.truncate(0, 2)
    cache.move(3, 1)
    stage(cache, range(4), torch.arange(50.0, 58.0).view(4, 2))
    cache.commit(range(4), [[1], [0, 1], [], [0]])
    if ahead == 3:
        assert reshaping.catch_up(cache.lengths, 10.0)
        assert all(copied == cache.lengths for *_, copied in reshaping._pieces)
    cache.reshape(6, 32)
    assert (cache.slots, cache.capacity, cache.reshaping) == (6, 32, None)
    assert [held(cache, slot) for slot in range(4)] == [
        [0, 1, 51], [*range(15, 20), 52, 53], [*range(10, 15)], [56]
    ]  # fmt: skip


def test_commit_reads_all_sources_before_it_writes() -> None:
    """Columns 1, 2, 3 move one to the left: each target is another one's source."""
    cache = make(1, capacity=16)
    stage(cache, range(1), torch.tensor([[10.0, 11, 12, 13]]))
    cache.commit(range(1), [[1, 2, 3]])
    assert held(cache, 0) == [11, 12, 13]


def test_a_short_row_is_compacted_next_to_a_long_one() -> None:
    cache = make(2, capacity=16)
    stage(cache, range(1), torch.arange(6.0)[None])
    cache.commit(range(1), [range(6)])
    stage(cache, range(2), torch.tensor([[20.0, 21, 22], [30, 31, 32]]))
    cache.commit(range(2), [[0, 2], [0, 1]])
    assert held(cache, 0) == [0, 1, 2, 3, 4, 5, 20, 22]
    assert held(cache, 1) == [30, 31]


def test_growth_doubles_and_keeps_everything() -> None:
    cache = make(2, capacity=256)
    size = cache.nbytes()
    stage(cache, range(2), torch.arange(400.0).view(2, 200))
    cache.commit(range(2), [range(200), range(150)])
    cache.reserve(257)
    assert cache.capacity == 512
    assert cache.nbytes() == 2 * size
    assert held(cache, 0) == list(range(200))
    assert held(cache, 1) == list(range(200, 350))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_no_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    cache = make(2)

    def fail(*_args: object, **_kwargs: object) -> Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(CacheMemoryError, match=r"2 slots x 512 tokens .* smaller `batch_size="):
        cache.reserve(300)
    assert cache.capacity == 4


def test_other_errors_are_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> Tensor:
        raise RuntimeError("device is gone")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(RuntimeError, match="device is gone"):
        make(2)


def test_growth_keeps_what_is_staged() -> None:
    """A draft stages level after level; the cache may have to grow between two of them."""
    shape = KVShape(1, 2)
    cache = SlotCache([(shape, shape)], 1, torch.float32, torch.device("cpu"), capacity=4)
    first = torch.randn(1, 1, 4, 2)
    second = torch.randn(1, 1, 3, 2)
    cache.write(0, first, first, cache.staging(range(1), 4))
    cache.reserve(7, 4)
    keys, values = cache.write(0, second, second, cache.staging(range(1), 3, 4))
    assert torch.equal(keys, torch.cat((first, second), dim=2))
    assert torch.equal(values, keys)


@pytest.mark.skipif(dense_columns(CPU) is None, reason="rows have no pages of their own here")
def test_an_emptied_slot_of_a_wide_cache_gives_its_pages_back() -> None:
    """Those of its neighbors are untouched, and a slot that a sequence was moved out of gives its own back too."""
    shape = KVShape(2, 16)
    columns = dense_columns(CPU) * 2  # type: ignore[operator]
    cache = SlotCache([(shape, shape)] * 3, 3, torch.float32, CPU, columns)
    ones = torch.ones(3, shape.heads, columns - 1, shape.size)
    before = resident()
    for layer in range(3):
        cache.write(layer, ones, ones, cache.staging(range(3), columns - 1))
    cache.commit(range(3), [range(columns - 1)] * 3)
    full = resident() - before
    assert full > 15  # MiB: 3 slots of 6 MiB
    cache.truncate(1, 0)
    assert resident() - before < full - 4
    cache.move(2, 1)
    assert resident() - before < full - 4
    assert [bool(cache.copy_out(slot, 0, length)[0].all()) for slot, length in enumerate(cache.lengths[:2])] == [
        True,
        True,
    ]
    assert cache.lengths == [columns - 1, columns - 1, 0]
