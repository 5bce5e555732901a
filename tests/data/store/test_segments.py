"""Long chats in segments: every answer token once, the states of the whole chat, from a store as from the target."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.data.features import FeatureBatch, OnlineSource, taught
from eyas.data.store import FeatureStore, HybridSource, StoreSource
from eyas.data.tokens.batches import ChatBatches, SegmentConfig
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError

from ... import tiny
from .conftest import Made, rows

CUT = SegmentConfig(length=7, context=3)
TAPS = (1, 2, 4)


def batches(members: list[TokenRow], segments: SegmentConfig | None = CUT, budget: int = 1) -> ChatBatches:
    return ChatBatches(members, budget, 100, seed=4, segments=segments)


def test_every_answer_token_counts_in_one_segment() -> None:
    members = rows().rows["train"]
    made = batches(members)
    counted = [np.zeros(len(row.tokens), dtype=int) for row in members]
    for i, part in enumerate(made.segments):
        batch = made.of([i])
        assert batch.starts.tolist() == [part.start]
        assert batch.tokens[0].tolist() == members[part.chat].tokens[part.start : part.stop].tolist()
        assert part.stop - part.start <= 7 + 3
        assert part.counted - part.start in (0, 3)
        counted[part.chat][part.start : part.stop] += batch.loss_mask[0].numpy()
    for row, times in zip(members, counted, strict=True):
        assert times.tolist() == row.loss_mask.astype(int).tolist()
    assert any(part.start for part in made.segments)


def test_short_chats_are_rows_as_before() -> None:
    members = rows().rows["train"]
    plain = batches(members, None, 60)
    wide = batches(members, SegmentConfig(length=100), 60)
    for number in range(plain.per_epoch):
        assert plain.members(number) == wide.members(number)
        assert all(torch.equal(a, b) for a, b in zip(plain.batch(number), wide.batch(number), strict=True))


def close(a: FeatureBatch, b: FeatureBatch) -> bool:
    pairs = [(a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.starts, b.starts), (a.taps, b.taps)]
    pairs += [(a.final, b.final), *zip(a.top or (), b.top or (), strict=True)]
    assert [x is None for x, _ in pairs] == [y is None for _, y in pairs]
    return all(torch.allclose(x, y, atol=1e-3) for x, y in pairs if x is not None and y is not None)


@pytest.mark.parametrize("final", ["answers", "all"])
def test_a_store_made_without_segments_serves_them(final: str, store: Made) -> None:
    made = store(states="float32", final=final, batch_tokens=1)
    parts = batches(made.rows("train"), budget=40)
    offline = StoreSource(made, parts, TAPS)
    online = OnlineSource(tiny.target(), parts, TAPS)
    assert all(close(offline(n), online(n)) for n in range(parts.per_epoch))


def test_stored_top_tokens_are_those_of_the_segment(store: Made) -> None:
    made = store(states="float32", final="top", top=4, batch_tokens=1)
    whole, parts = (batches(made.rows("train"), segments, budget=40) for segments in (None, CUT))
    there = {}
    for number in range(whole.per_epoch):
        batch = StoreSource(made, whole, TAPS)(number)
        for b, i in enumerate(whole.members(number)):
            there[i] = batch, b
    source = StoreSource(made, parts, TAPS)
    for number in range(parts.per_epoch):
        batch = source(number)
        for b, i in enumerate(parts.members(number)):
            chat, start, stop, _ = parts.segments[i]
            other, at = there[chat]
            assert torch.equal(batch.taps[b, : stop - start], other.taps[at, start:stop])
            teaches = taught(batch.loss_mask)[b, : stop - start]
            assert batch.top is not None
            assert other.top is not None
            for mine, theirs in zip(batch.top, other.top, strict=True):
                assert torch.equal(mine[b, : stop - start][teaches], theirs[at, start:stop][teaches])


def test_segments_have_the_states_of_the_whole_chat() -> None:
    """Those of the target after everything before, not those of the segment alone."""
    members = rows().rows["train"]
    made = batches(members)
    target = tiny.target()
    source = OnlineSource(tiny.target(), made, TAPS)
    for number in range(made.per_epoch):
        batch = source(number)
        for b, i in enumerate(made.members(number)):
            chat, start, stop, _ = made.segments[i]
            tokens = torch.from_numpy(members[chat].tokens).unsqueeze(0)
            alone = target.trace(tokens, torch.tensor([tokens.shape[1]]), TAPS)
            assert torch.allclose(batch.taps[b, : stop - start], alone.taps[0, start:stop], atol=1e-3)


def test_chats_that_a_store_lacks_are_computed_or_named(store: Made) -> None:
    made = store(states="float32", batch_tokens=1)
    more = [*made.rows("train"), TokenRow(np.arange(3, 33), np.arange(30) >= 9)]
    parts = batches(more, budget=40)
    assert all(close(*(source(n) for source in sources(made, parts))) for n in range(parts.per_epoch))
    with pytest.raises(StoreError, match="lacks 1 of the rows"):
        StoreSource(made, parts, TAPS)


def sources(made: FeatureStore, parts: ChatBatches) -> tuple[HybridSource, OnlineSource]:
    return HybridSource(made, tiny.target(), parts, TAPS), OnlineSource(tiny.target(), parts, TAPS)
