"""The rectangle covers what is asked, stays within its limit, and doesn't grow at every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.scheduler import PassSizeLimits
from eyas.targets.slots import CacheRoom

wishes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400), st.integers(0, 12)), max_size=30)


@given(st.integers(1, 12), st.none() | st.integers(1, 2000), st.sampled_from([0, 70]), wishes)
def test_it_covers_and_keeps_the_limit(
    most: int, limit: int | None, state_columns: int, wishes: list[tuple[int, int, int]]
) -> None:
    """With and without recurrent states beside the columns of each row."""
    room = CacheRoom(most, limit)
    room.state_columns = state_columns
    for slots, columns, expected in wishes:
        slots = min(slots, most)
        if not room.fits([columns] * slots):
            assert limit is not None
            assert slots * (columns + state_columns) > limit
            continue
        before = (room.slots, room.columns)
        changed = room.cover([columns] * slots, expected)
        assert changed == (slots > before[0] or columns > before[1])
        assert room.slots >= slots
        assert room.columns >= columns
        assert room.slots <= max(most, slots)
        assert room.fits([room.columns] * room.slots)
        assert room.tokens == room.slots * (room.columns + state_columns) <= room.max_tokens(room.slots)


def test_growing_column_by_column_changes_it_a_few_times() -> None:
    room = CacheRoom(8, None)
    assert sum(room.cover([columns] * 8) for columns in range(1, 5000)) < 9


def test_a_long_sequence_that_grows_leaves_little_unused() -> None:
    """It took a rectangle twice as long as the sequence, for every slot."""
    room = CacheRoom(16, None)
    room.cover([16_400] * 16)
    room.cover([16_500] * 16)
    assert room.columns <= 16_500 + 4096
    assert sum(room.cover([columns] * 16) for columns in range(16_500, 33_000)) < 6


def test_slots_that_are_expected_are_made_at_once() -> None:
    room = CacheRoom(8, 1000)
    room.cover([100], expected=20)
    assert (room.slots, room.columns) == (1, 128)  # eight of these would pass the limit
    free = CacheRoom(8, None)
    free.cover([100], expected=20)
    assert free.slots == 8


def test_where_memory_ended_is_remembered_until_all_is_quiet() -> None:
    room = CacheRoom(8, None)
    room.cover([256] * 4)
    room.exhausted()
    assert not room.fits([256] * 4)
    assert room.fits([256] * 2)
    assert room.fits([10**6])
    room.shrink()
    assert room.fits([256] * 4)


def test_after_a_while_without_failure_larger_passes_are_tried() -> None:
    passes = PassSizeLimits(CacheRoom(64, None), 64, 512)
    assert (passes.rows, passes.prefill_chunk, passes.fits(10**6)) == (64, 512, True)
    passes.exhausted(100)
    assert (passes.rows, passes.prefill_chunk, passes.fits(50), passes.fits(51)) == (50, 50, True, False)
    passes.exhausted(100)  # it was larger than it may be
    assert passes.rows == 25
    for rows in (50, 64):
        for _ in range(256):
            assert passes.rows < rows
            passes.succeeded()
        assert passes.rows == rows
    for _ in range(256):
        passes.succeeded()
    assert passes.fits(10**6)
    for _ in range(9):
        passes.exhausted(1)
    assert passes.rows == passes.prefill_chunk == 1
    passes.restore()
    assert passes.rows == 64
    assert PassSizeLimits(CacheRoom(4, None), 4, None).prefill_chunk is None


rows = st.lists(st.integers(1, 400), min_size=1, max_size=9)


@given(st.none() | st.integers(1, 2000), st.lists(st.tuples(rows, st.integers(0, 12)), max_size=30))
def test_rows_of_a_wide_rectangle_take_what_they_hold(limit: int | None, wishes: list[tuple[list[int], int]]) -> None:
    room = CacheRoom(9, limit, dense=100)
    for wish, expected in wishes:
        if not room.fits(wish):
            continue
        room.cover(wish, expected)
        assert room.slots >= len(wish)
        assert room.columns >= max(wish)
        if limit is not None:
            assert room.tokens <= limit
            if room.columns > 100:
                assert room.tokens == sum(wish)


def test_one_long_row_leaves_room_for_short_ones() -> None:
    mixed = [16_000, *[300] * 15]
    assert CacheRoom(16, 24_000, dense=4096).fits(mixed)
    assert not CacheRoom(16, 24_000).fits(mixed)
    assert not CacheRoom(16, 20_000, dense=4096).fits(mixed)
    assert not CacheRoom(16, 24_000, dense=16_000).fits(mixed)
