"""Decoding in a window against the bare network, which reads the pairs of the window alone, from position 0 on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.window.decoding import WindowPairs
from eyas.drafters.window.window import SINKS, Window
from eyas.errors import UsageError
from eyas.targets.linears import prepack_linears
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import DraftTree, parse_tree

from ... import tiny
from ..test_decoding import check, coupling, observe

W = 8
WINDOW = Window(W)
TREE = parse_tree("dynamic:4,4,14")
Row = tuple[Tensor, Tensor]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "yarn": (
        "eagle3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
            },
        },
    ),
    "eagle1": ("eagle1", {}),
    "mla": ("mla", {}),
    "mtp": ("mtp", {"zero_first": True}),
}  # fmt: skip


def windowed(name: str = "eagle3", pairs: int = W, native: bool = False, **settings: Any) -> NetworkDrafter:
    kind, own = KINDS[name]
    made = tiny.network(kind, **own, **settings)
    if native:
        prepack_linears(made, NativeLinear)
    drafter = drafter_of(made, made.config.taps_of(tiny.LAYERS), pairs)
    assert isinstance(drafter.pairs, WindowPairs)
    return drafter


def history(drafter: NetworkDrafter, *lengths: int, seed: int = 0) -> list[Row]:
    """Per row: tokens [n + 1] and taps [n, A, Ht] of n pairs."""
    draw = torch.Generator().manual_seed(seed)
    taps = drafter.network.config.tap_count
    return [
        (torch.randint(tiny.VOCAB, (n + 1,), generator=draw), 3 * torch.randn(n, taps, tiny.HIDDEN, generator=draw))
        for n in lengths
    ]


def seen(row: Row, window: Window = WINDOW) -> Row:
    """The pairs that a row of this length sees, as if there had never been others."""
    ids, taps = row
    count = len(taps)
    kept = [i for i in range(count) if i < window.sinks or i >= window.sinks + window.dropped(count)]
    return torch.cat((ids[:1], ids[1:][kept])), taps[kept]


def part(row: Row, begin: int, end: int) -> Row:
    return row[0][begin : end + 1], row[1][begin:end]


def draft(drafter: NetworkDrafter, rows: int) -> DraftTree:
    return drafter.draft(range(rows), TREE, coupling(rows))


def same(a: DraftTree, b: DraftTree) -> None:
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.parents, b.parents)
    torch.testing.assert_close(a.logprob, b.logprob, rtol=1e-4, atol=1e-4)


def slot_of(drafter: NetworkDrafter, rows: range, pairs: list[Row], deferred: bool = False) -> None:
    """Show rows their pairs, all of one length, or put them aside."""
    tokens = torch.stack([ids[1:] for ids, _ in pairs])
    taps = torch.stack([taps for _, taps in pairs])
    (drafter.defer if deferred else drafter.observe)(rows, tokens, taps, [tokens.shape[1]] * len(pairs))


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_sees_the_sinks_and_the_window(name: str) -> None:
    """Rows of all phases of a window's step, of fewer pairs than it holds, and of many more."""
    drafter = windowed(name)
    rows = history(drafter, 5, 12, 13, 14, 15, 16, 61)
    drafter.pairs.resize(len(rows))
    observe(drafter, range(len(rows)), rows)
    drafted = draft(drafter, len(rows))
    for at, row in enumerate(rows):
        assert drafter.pairs.length(at) == len(row[1])
        check(drafter, drafted, at, seen(row))


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_native_passes_draft_what_modules_do(kind: str) -> None:
    trees = []
    for native in (True, False):
        drafter = windowed(kind, native=native, head_dim=16)
        assert (drafter.proposer.decoder is not None) == native
        rows = history(drafter, 40, 17)
        drafter.pairs.resize(2)
        observe(drafter, range(2), rows)
        trees.append(draft(drafter, 2))
    same(*trees)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["eagle3", "3.1", "mla"])
def test_keys_in_bf16_that_move_guess_the_same(name: str) -> None:
    """Every step of the window rotates a row's keys and rounds them again: at most doubling the error that bf16 has.

    Errors are those of log-probabilities, against the same weights and states in float32.
    """
    best = parse_tree("dynamic:1,40,40")
    kind, own = KINDS[name]
    network = tiny.network(kind, **own).to(torch.bfloat16)
    made = [drafter_of(each, each.config.taps_of(tiny.LAYERS), 64) for each in (deepcopy(network).float(), network)]
    exact, moved, unmoved = *made, drafter_of(deepcopy(network), made[0].taps, 64)
    window = Window(64)
    rows = [(ids, taps.bfloat16().float()) for ids, taps in history(exact, *range(150, 270, 5))]
    found = []
    for drafter, read in ((exact, rows), (moved, rows), (unmoved, [seen(row, window) for row in rows])):
        dtype = drafter.network.dtype
        drafter.pairs.resize(len(rows))
        for slot, (ids, taps) in enumerate(read):
            drafter.observe(range(slot, slot + 1), ids[None, 1:], taps[None].to(dtype), [len(taps)])
        tree = drafter.draft(range(len(rows)), best, coupling(len(rows)))
        found.append(torch.full((len(rows), tiny.VOCAB), torch.nan).scatter(1, tree.tokens, tree.logprob.float()))
    true, *others = found
    after_moving, without = ((each - true).square().nanmean().sqrt() for each in others)
    assert 0 < after_moving < 2 * without
    firsts = [each.nan_to_num(-torch.inf).argmax(1) for each in found]
    assert int((firsts[1] == firsts[0]).sum()) >= len(rows) - 1


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [(1,) * 45, (45,), (7, 3, 20, 1, 14)])
def test_what_is_read_together_changes_nothing(sizes: tuple[int, ...], layers: int) -> None:
    """Also in a network of two layers, where what a pair has seen stays in what others see of it."""
    drafter = windowed(num_hidden_layers=layers)
    rows = history(drafter, 45, 45)
    drafter.pairs.resize(2)
    begin = 0
    trees = []
    for size in sizes:
        slot_of(drafter, range(2), [part(row, begin, begin + size) for row in rows])
        begin += size
    trees.append(draft(drafter, 2))
    drafter.pairs.resize(2)
    observe(drafter, range(1, 2), [part(rows[1], 0, 45)])
    observe(drafter, range(1), [part(rows[0], 0, 45)])
    trees.append(draft(drafter, 2))
    same(*trees)
    if layers == 1:
        for at, row in enumerate(rows):
            check(drafter, trees[0], at, seen(row))


def test_no_position_is_larger_than_window_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = windowed()
    largest = 0
    rotary = drafter.network.rotary
    original = type(rotary).forward

    def spying(self: Any, x: Tensor, positions: Tensor) -> Any:
        nonlocal largest
        largest = max(largest, int(positions.max()))
        return original(self, x, positions)

    monkeypatch.setattr(type(rotary), "forward", spying)
    rows = history(drafter, 300)
    drafter.pairs.resize(1)
    observe(drafter, range(1), rows)
    draft(drafter, 1)
    assert WINDOW.limit - 1 <= largest <= SINKS + W + TREE.depth


def test_slots_move_and_are_truncated() -> None:
    drafter = windowed()
    rows = history(drafter, 30, 9)
    drafter.pairs.resize(2)
    observe(drafter, range(2), rows)
    with pytest.raises(UsageError, match="dropped"):
        drafter.pairs.truncate(0, 10)
    drafter.pairs.truncate(0, 29)
    observe(drafter, range(1), [part(rows[0], 29, 30)])
    check(drafter, draft(drafter, 2), 0, seen(rows[0]))
    drafter.pairs.truncate(1, 0)
    drafter.pairs.move(0, 1)
    assert (drafter.pairs.length(0), drafter.pairs.length(1)) == (0, 30)
    observe(drafter, range(1), [rows[1]])
    drafted = draft(drafter, 2)
    check(drafter, drafted, 0, rows[1])
    check(drafter, drafted, 1, seen(rows[0]))
    drafter.pairs.truncate(1, 2)
    assert drafter.pairs.length(1) == 2
    drafter.pairs.reshape(3, 300)
    observe(drafter, range(1, 2), [part(rows[0], 2, 30)])
    check(drafter, draft(drafter, 2), 1, seen(rows[0]))


@pytest.mark.parametrize("unread", [0, 3, 20])
@pytest.mark.parametrize("count", [2, 10, 33, 47])
def test_what_is_saved_and_loaded_drafts_the_same(count: int, unread: int) -> None:
    """In blocks that are saved while they are there, as the prefix cache does, the last pairs unread."""
    drafter = windowed()
    block = 5
    total = 47
    (row,) = history(drafter, total + 1)
    drafter.pairs.resize(2)
    saved = []
    for begin in range(0, total, block):
        end = min(begin + block, total)
        slot_of(drafter, range(1), [part(row, begin, end)], deferred=begin >= total - unread)
        saved.append(drafter.pairs.save(0, begin, end))
    assert all(drafter.pairs.whole(one) for one in saved)
    assert drafter.pairs.reusable(saved, count) == count
    done = 0
    for one in saved:
        if done < count:
            drafter.pairs.load(1, one, min(block, count - done))
            done = min(count, done + block)
    assert drafter.pairs.length(1) == count
    drafter.pairs.truncate(0, 0)
    pairs = part(row, 0, count + 1)
    slot_of(drafter, range(1), [pairs])
    slot_of(drafter, range(1, 2), [part(row, count, count + 1)])
    drafted = draft(drafter, 2)
    assert drafted.tokens[0].tolist() == drafted.tokens[1].tolist()
    for at in range(2):
        check(drafter, drafted, at, seen(pairs))


def test_pairs_that_were_dropped_before_they_were_saved() -> None:
    drafter = windowed()
    block = 5
    (row,) = history(drafter, 45)
    drafter.pairs.resize(2)
    slot_of(drafter, range(1), [row])
    saved = [drafter.pairs.save(0, begin, begin + block) for begin in range(0, 45, block)]
    assert [drafter.pairs.whole(one) for one in saved] == [False] * 8 + [True]
    assert drafter.pairs.kept_from(0) == SINKS + WINDOW.dropped(45) - WINDOW.step == 36
    assert [drafter.pairs.reusable(saved, count) for count in (45, 44, 43)] == [45, 44, 43]
    assert [drafter.pairs.reusable(saved, count) for count in (42, 37, 20, 3)] == [SINKS, SINKS, SINKS, 3]
    for one in saved:
        drafter.pairs.load(1, one, block)
    same(*(drafter_tree(drafter, row, at) for at in range(2)))


def test_pairs_that_were_saved_unread_and_then_dropped() -> None:
    """Those read after them can't be loaded behind them."""
    drafter = windowed()
    (row,) = history(drafter, 45)
    drafter.pairs.resize(2)
    slot_of(drafter, range(1), [part(row, 0, 10)], deferred=True)
    saved = [drafter.pairs.save(0, 0, 5), drafter.pairs.save(0, 5, 10)]
    drafter.catch_up(range(1), [True])
    slot_of(drafter, range(1), [part(row, 10, 45)])
    saved += [drafter.pairs.save(0, begin, begin + 5) for begin in range(10, 45, 5)]
    assert [(one.unread, one.read) for one in saved[:3]] == [(5, 0), (5, 0), (0, 5)]
    assert [drafter.pairs.reusable(saved, count) for count in (45, 11, 10, 7)] == [10, 10, 10, 7]
    for one in saved[:2]:
        drafter.pairs.load(1, one, 5)
    assert (drafter.pairs.length(1), drafter.pairs.unread(1)) == (10, 10)


def drafter_tree(drafter: NetworkDrafter, row: Row, slot: int) -> DraftTree:
    """What a slot drafts after one more pair."""
    drafter.observe(range(slot, slot + 1), row[0][None, :1], row[1][None, :1], [1])
    return drafter.draft(range(slot, slot + 1), TREE, coupling(1))


def test_deferred_pairs_beyond_the_window_are_forgotten() -> None:
    drafter = windowed()
    row, other = history(drafter, 200, 200)
    drafter.pairs.resize(2)
    for begin in range(200):
        slot_of(drafter, range(2), [part(row, begin, begin + 1), part(other, begin, begin + 1)], deferred=True)
        assert drafter.pairs.unread(0) <= 2 * WINDOW.limit
    assert drafter.pairs.length(0) == 200
    drafted = draft(drafter, 2)
    check(drafter, drafted, 0, seen(row))
    check(drafter, drafted, 1, seen(other))
    two = windowed(num_hidden_layers=2)
    two.pairs.resize(1)
    slot_of(two, range(1), [history(two, 60)[0]], deferred=True)
    assert two.pairs.unread(0) == 60  # there, what others have seen matters
    draft(two, 1)
    assert (two.pairs.length(0), two.pairs.unread(0)) == (60, 0)


def test_the_cache_is_as_large_at_sixteen_thousand_as_at_one_thousand() -> None:
    drafter = windowed(pairs=256)
    sizes = []
    taps = torch.zeros(1, 512, 3, tiny.HIDDEN)
    drafter.pairs.resize(1)
    for chunk in range(1, 33):
        drafter.observe(range(1), torch.full((1, 512), 5), taps, [512])
        drafter.pairs.reshape(1, 512 * chunk + 512)  # as the engine does when the target's cache grows
        draft(drafter, 1)
        sizes.append(drafter.pairs.cache.nbytes())
    assert drafter.pairs.length(0) == 2**14
    assert len(set(sizes[1:])) == 1
    assert drafter.pairs.cache.capacity == drafter.pairs.cache.max_capacity
