"""The live store: bounded, fair, whole after any kill, and readable as any store is."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.data.store.layout import encode_states
from eyas.data.store.manifest import CapturedTarget, StoredRow
from eyas.data.tokens.tokenize import TokenRow
from eyas.labs.learn.traffic import TrafficRow, TrafficStore, split_of, stored_rows, write_store

from ... import tiny
from .conftest import LAYOUT

TARGET = CapturedTarget(name="tiny", fingerprint="f", ends="e", dtype="float32", layers=tiny.LAYERS)


def row(seed: int, length: int = 40) -> TrafficRow:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, tiny.VOCAB, (length,), generator=generator).numpy()
    mask = np.arange(length) >= length // 2
    taps = encode_states(torch.randn(length, 3, tiny.HIDDEN, generator=generator), "fp8")
    final = encode_states(torch.randn(int(mask[1:].sum()), tiny.HIDDEN, generator=generator), "fp8")
    return TrafficRow(TokenRow(tokens, mask), StoredRow(torch.from_numpy(tokens).int(), taps, final, None))


def test_what_is_written_is_read(traffic: TrafficStore) -> None:
    rows = [row(seed, 20 + seed) for seed in range(5)]
    traffic.write("a", "train", rows)
    (shard,) = traffic.shards()
    assert (shard.client, shard.split) == ("a", "train")
    for (tokens, states), (wanted, held) in zip(shard.rows(LAYOUT), rows, strict=True):
        assert tokens.tokens.tolist() == wanted.tokens.tolist()
        assert tokens.loss_mask.tolist() == wanted.loss_mask.tolist()
        for one, other in ((states.taps, held.taps), (states.final, held.final)):
            assert one is not None
            assert other is not None
            assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    assert traffic.count("train") == 5
    assert traffic.count("held") == 0
    assert traffic.count("train", after=shard.path.name) == 0


def test_one_client_does_not_push_others_out(traffic: TrafficStore) -> None:
    traffic.write("quiet", "train", [row(0)])
    size = traffic.shards()[0].path.stat().st_size
    traffic.limit = 10 * size
    for seed in range(1, 60):
        traffic.write("loud", "train", [row(seed)])
    held = [shard.client for shard in traffic.shards()]
    assert sum(shard.path.stat().st_size for shard in traffic.shards()) <= traffic.limit
    assert held.count("quiet") == 1
    newest = [tuple(one.tokens.tokens) for one in traffic.newest("train", 9)]
    assert newest == [tuple(row(seed).tokens.tokens) for seed in (*range(59, 51, -1), 0)], "the newest of each client"


def test_a_cycle_gets_as_much_of_a_quiet_client_as_of_a_loud_one(traffic: TrafficStore) -> None:
    traffic.write("quiet", "train", [row(seed, 10) for seed in range(5)])
    for first in range(100, 200, 10):
        traffic.write("loud", "train", [row(seed, 10) for seed in range(first, first + 10)])
    traffic.write("quiet", "held", [row(300)])
    rows = [tuple(one.tokens.tokens) for one in traffic.newest("train", 23)]
    assert len(rows) == 23
    assert {tuple(row(seed, 10).tokens.tokens) for seed in range(5)} < set(rows)
    assert len(traffic.newest("train", 1000)) == 105
    assert traffic.newest("train", 0) == []


def test_rows_dropped_while_they_are_read_are_left_out(traffic: TrafficStore) -> None:
    traffic.write("a", "train", [row(0)])
    traffic.write("a", "train", [row(1)])
    gone, kept = traffic.shards()
    gone.path.unlink()
    assert gone.rows(LAYOUT) == []
    assert len(kept.rows(LAYOUT)) == 1


def test_leftovers_of_a_killed_writer_are_no_shards(traffic: TrafficStore) -> None:
    traffic.write("a", "train", [row(0)])
    name = traffic.shards()[0].path.name
    folder = traffic.folder / f".{name}.tmp"
    folder.mkdir()
    (folder / name).write_bytes(b"half")
    assert len(traffic.shards()) == 1
    assert len(traffic.newest("train", 10)) == 1


def test_a_question_asked_again_stays_on_its_side() -> None:
    rng = random.Random(0)
    sides = []
    for _ in range(800):
        prompt = np.array([rng.randrange(90) for _ in range(64)])
        one, other = (TokenRow(np.append(prompt, [end]), np.ones(65, dtype=bool)) for end in (1, 2))
        assert split_of(one) == split_of(other)
        sides.append(split_of(one))
    assert 60 < sides.count("held") < 140


@pytest.mark.parametrize("final", ["answers", "all"])
def test_stores_hold_copies_and_give_rows_back(tmp_path: Path, final: str) -> None:
    rows = [row(seed, 30) for seed in range(6)]
    if final == "all":
        rows = [
            TrafficRow(one.tokens, one.states._replace(final=encode_states(torch.randn(30, tiny.HIDDEN), "fp8")))
            for one in rows
        ]
    layout = LAYOUT.model_copy(update={"final": final})
    store = write_store(tmp_path / "store", TARGET, layout, {"train": rows[:4], "held": rows[4:], "none": []}, "x")
    assert list(store.verify()) == []
    assert [one.tokens.tolist() for one in store.rows("held")] == [one.tokens.tokens.tolist() for one in rows[4:]]
    narrow = LAYOUT.model_copy(update={"taps": (4, 1)})
    found = list(stored_rows(store, "held", narrow, 10))
    assert len(found) == 2
    for one in found:
        (held,) = [each for each in rows if each.tokens.tokens.tolist() == one.tokens.tokens.tolist()]
        assert one.states.taps is not None
        assert held.states.taps is not None
        assert held.states.final is not None
        assert one.states.final is not None
        wanted = held.states.taps.values.view(torch.uint8)[:, [2, 0]]
        assert torch.equal(one.states.taps.values.view(torch.uint8), wanted)
        taught = np.flatnonzero(one.tokens.loss_mask[1:]) if final == "all" else slice(None)
        assert torch.equal(
            one.states.final.values.view(torch.uint8), held.states.final.values.view(torch.uint8)[taught]
        )


def test_copies_are_made_of_small_shards(tmp_path: Path) -> None:
    rows = [row(seed, 10) for seed in range(130)]
    store = write_store(tmp_path / "store", TARGET, LAYOUT, {"train": rows}, "x")
    assert [shard.rows for shard in store.manifest.shards] == [64, 64, 2]
    found = {tuple(one.tokens.tokens) for one in stored_rows(store, "train", LAYOUT, 200)}
    assert found == {tuple(one.tokens.tokens) for one in rows}
