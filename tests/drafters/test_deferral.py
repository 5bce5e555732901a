"""Deferred pairs: a drafter that reads them late drafts the same as one that read them at once; else only copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork
from eyas.tree import DraftTree, parse_tree
from eyas.types import SamplingParams
from eyas.verify import Sampler

from .. import tiny

SLOTS = 3
TREE = parse_tree("dynamic:3,3,8")
CPU = torch.device("cpu")


def draft(drafter: NetworkDrafter, rows: int, drafting: list[bool] | None = None) -> DraftTree:
    sampler = Sampler(SLOTS, tiny.VOCAB, CPU)
    for slot in range(rows):
        sampler.admit(slot, SamplingParams(), [3] * 8, ())
    return drafter.draft(range(rows), TREE, sampler.coupling(range(rows), False), drafting)


def same(ours: DraftTree, theirs: DraftTree) -> None:
    assert torch.equal(ours.valid, theirs.valid)
    for row, valid in enumerate(ours.valid):
        assert torch.equal(ours.tokens[row][valid], theirs.tokens[row][valid])
        assert torch.equal(ours.parents[row][valid], theirs.parents[row][valid])
        torch.testing.assert_close(ours.logprob[row][valid], theirs.logprob[row][valid], rtol=1e-5, atol=1e-5)


def pair(kind: str) -> tuple[NetworkDrafter, NetworkDrafter]:
    """Two drafters of the same weights, in float64: random feedback makes much of float32's rounding."""
    taps = tiny.drafter(kind).taps
    network = tiny.network(kind).double()
    late = drafter_of(network, taps)
    prompt = drafter_of(network, taps)
    for each in (late, prompt):
        each.pairs.resize(SLOTS)
    return late, prompt


def pairs(drafter: NetworkDrafter, counts: list[int], seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens and taps, padded with rubbish."""
    draw = torch.Generator().manual_seed(seed)
    width = max(1, *counts)
    tokens = torch.randint(tiny.VOCAB, (len(counts), width), generator=draw)
    taps = 2 * torch.randn(len(counts), width, len(drafter.taps), tiny.HIDDEN, generator=draw, dtype=torch.float64)
    for row, count in enumerate(counts):
        taps[row, count:] = torch.nan
    return tokens, taps, counts


COUNTS = st.lists(st.integers(0, 5), min_size=SLOTS, max_size=SLOTS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("defer"), COUNTS),
        st.tuples(st.just("observe"), COUNTS),
        st.tuples(st.just("prompt"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("draft"), st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)),
        st.tuples(st.just("catch up"), st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)),
        st.tuples(st.just("truncate"), st.integers(0, SLOTS - 1), st.integers(1, 9)),
        st.tuples(st.just("move"), st.permutations(range(SLOTS))),
    ),
    max_size=14,
)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mlp"])
@given(steps=STEPS)
@settings(max_examples=30)
def test_told_late_is_told_at_once(kind: str, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    late, prompt = pair(kind)
    for number, (what, *details) in enumerate([*steps, ("draft", [True] * SLOTS)]):
        if what in ("defer", "observe", "prompt"):
            counts = [40 * (slot == details[0]) for slot in range(SLOTS)] if what == "prompt" else details[0]
            rows = range(SLOTS)
            learned = pairs(late, counts, number)
            prompt.observe(rows, *learned)
            (late.observe if what == "observe" else late.defer)(rows, *learned)
        elif what == "draft" and any(details[0]):
            same(draft(late, SLOTS, details[0]), draft(prompt, SLOTS, details[0]))
        elif what == "catch up":
            late.catch_up(range(SLOTS), details[0])
            assert not any(late.pairs.unread(slot) for slot in range(SLOTS) if details[0][slot])
        elif what == "truncate":
            slot, length = details
            for each in (late, prompt):
                # the state that drafts is the last pair's: like the engine, read the last one anew
                shorter = each.pairs.length(slot) > length
                each.pairs.truncate(slot, length)
                if shorter:
                    each.observe(range(slot, slot + 1), *pairs(each, [1], 1000 + number))
        elif what == "move":
            for each in (late, prompt):
                each.pairs.move(*details[0][:2])
        assert all(late.pairs.length(slot) == prompt.pairs.length(slot) for slot in range(SLOTS))


def test_who_never_drafts_only_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    late, _ = pair("eagle3")
    monkeypatch.setattr(DraftNetwork, "fuse", None)
    monkeypatch.setattr(late.network, "step", None)
    for number in range(60):
        late.defer(range(2), *pairs(late, [3, 1], number))
    assert [late.pairs.length(slot) for slot in range(SLOTS)] == [180, 60, 0]
    late.pairs.move(0, 2)
    late.pairs.truncate(2, 100)
    assert [late.pairs.length(slot) for slot in range(SLOTS)] == [0, 60, 100]


def test_only_rows_that_may_draft_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    late, prompt = pair("eagle3")
    read: list[int] = []
    step = late.network.step

    def watched(tokens: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        read.append(tokens.numel())
        return step(tokens, *args)  # type: ignore[arg-type]

    learned = pairs(late, [70, 4, 5], 3)
    late.defer(range(3), *learned)
    prompt.observe(range(3), *learned)
    monkeypatch.setattr(late.network, "step", watched)
    same(draft(late, 3, [False, True, True]), draft(prompt, 3, [False, True, True]))
    assert read[0] == 9
    del read[:]
    same(draft(late, 3), draft(prompt, 3))
    assert read[0] == 70


def test_a_long_backlog_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    late, prompt = pair("eagle3")
    for number in range(3):
        learned = pairs(late, [50, 41, 0], number)
        late.defer(range(3), *learned)
        prompt.observe(range(3), *learned)
    monkeypatch.setattr("eyas.drafters.decoding._CHUNK", 64)
    sizes: list[int] = []
    step = late.network.step

    def watched(tokens: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        sizes.append(tokens.numel())
        return step(tokens, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(late.network, "step", watched)
    ours = draft(late, 3)
    monkeypatch.undo()
    same(ours, draft(prompt, 3))
    assert max(sizes) <= 64
    assert sum(sizes) >= 273


def test_slots_come_and_go_with_what_is_pending() -> None:
    late, prompt = pair("eagle3")
    learned = pairs(late, [4, 6, 2], 5)
    late.defer(range(3), *learned)
    prompt.observe(range(3), *learned)
    for slots in (5, 2, 3):
        for each in (late, prompt):
            each.pairs.reshape(slots, 256)
    assert [late.pairs.length(slot) for slot in range(3)] == [4, 6, 0]
    same(draft(late, 2), draft(prompt, 2))
