"""A trainer can't tell where a batch came from: stored, computed, or both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eyas.data.features import FeatureBatch, OnlineSource, taught
from eyas.data.store import FeatureStore, HybridSource, StoreSource
from eyas.data.store.layout import encode_states
from eyas.data.tokens.batches import ChatBatches
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import RequestError, StoreError
from eyas.targets import Target

from ... import tiny
from .conftest import Made, rows, token_row

ALONE = {"batch_tokens": 1}
"""Every row goes through the target alone, in training as in capture: so the bits are the same."""


def batches(store: FeatureStore | None = None, budget: int = 60, longest: int = 100) -> ChatBatches:
    return ChatBatches(rows().rows["train"] if store is None else store.rows("train"), budget, longest, seed=4)


def same(a: FeatureBatch, b: FeatureBatch) -> bool:
    pairs = [(a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.taps, b.taps), (a.final, b.final)]
    assert (a.top is None) == (b.top is None)
    pairs += zip(a.top or (), b.top or (), strict=True)
    return all((x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs)


def test_rows_come_back_in_the_order_of_the_chats(store: Made) -> None:
    made = store()
    for split, members in rows().rows.items():
        read = made.rows(split)
        assert [r.tokens.tolist() for r in read] == [r.tokens.tolist() for r in members]
        assert [r.loss_mask.tolist() for r in read] == [r.loss_mask.tolist() for r in members]
    with pytest.raises(StoreError, match="no split 'test', only train, validation"):
        made.rows("test")


@pytest.mark.parametrize("final", ["answers", "all"])
def test_a_float32_store_gives_the_online_batches_bit_for_bit(final: str, store: Made) -> None:
    made = store(states="float32", final=final, **ALONE)
    for taps in ((1, 2, 4), (4, 1), *([(5,), (2, 5)] if final == "all" else [])):
        offline = StoreSource(made, batches(made, budget=1), taps)
        online = OnlineSource(tiny.target(), batches(budget=1), taps)
        for number in range(30):  # more than an epoch
            assert same(offline(number), online(number))


def test_a_bf16_store_of_a_bf16_target_does_too(tmp_path: Any) -> None:
    from eyas.data.capture.capture import Capture, CaptureConfig

    target = Target(tiny.build_model("qwen3").to(torch.bfloat16))
    config = CaptureConfig(taps=(1, 3), states="bf16", shard_bytes=20_000, **ALONE)
    prepared = Capture(target, rows(), config, tmp_path, name="t", chats="c")
    with prepared.begun():
        prepared.run()
    made = FeatureStore.open(tmp_path)
    offline = StoreSource(made, batches(made, budget=1), (1, 3))
    online = OnlineSource(target, batches(budget=1), (1, 3))
    assert offline(0).taps.dtype == torch.bfloat16
    assert all(same(offline(n), online(n)) for n in range(24))


def test_batches_of_several_rows_agree_to_rounding(store: Made) -> None:
    made = store(states="float32")
    offline = StoreSource(made, batches(made), (1, 2, 4))
    online = OnlineSource(tiny.target(), batches(), (1, 2, 4))
    for number in range(batches().per_epoch):
        a = offline(number)
        b = online(number)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.loss_mask, b.loss_mask)
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.final, b.final, rtol=1e-4, atol=1e-4)
        assert a.final is not None
        assert bool((a.final[taught(a.loss_mask)] != 0).any(-1).all())
        assert not a.final[~taught(a.loss_mask)].any()


def test_fp8_batches_are_as_near_as_fp8_allows(store: Made) -> None:
    made = store()
    offline = StoreSource(made, batches(made), (1, 2, 4))
    online = OnlineSource(tiny.target(), batches(), (1, 2, 4))
    worst = 0.0
    for number in range(batches().per_epoch):
        a = offline(number)
        b = online(number)
        assert a.final is not None
        assert b.final is not None
        for stored, exact in ((a.taps, b.taps), (a.final, b.final)):
            exponents = encode_states(exact, "fp8").exponents
            assert exponents is not None
            scale = torch.exp2(exponents.float()).unsqueeze(-1)
            bound = torch.maximum(exact.abs() * 2**-4, scale * 2**-10)
            assert ((stored - exact).abs() <= bound * 1.001 + 1e-4).all()
            worst = max(worst, ((stored - exact).abs() / exact.abs().clamp_min(1e-3)).max().item())
    assert worst > 0.04  # it is fp8


def test_top_tokens_are_those_of_the_teacher(store: Made) -> None:
    made = store(states="float32", final="top", top=5, **ALONE)
    offline = StoreSource(made, batches(made, budget=1), (1, 2, 4))
    online = OnlineSource(tiny.target(), batches(budget=1), (1, 2, 4))
    for number in range(24):
        a = offline(number)
        b = online(number)
        assert a.final is None
        assert a.top is not None
        assert b.final is not None
        where = taught(a.loss_mask)
        full = tiny.target().head(b.final[where]).log_softmax(-1)
        best = full.topk(5)
        assert torch.equal(a.top.ids[where], best.indices)
        torch.testing.assert_close(a.top.logprobs[where], best.values, rtol=2**-11, atol=2**-11)
        torch.testing.assert_close(a.top.tail[where], 1 - best.values.exp().sum(-1), rtol=1e-4, atol=1e-5)
        assert not a.top.ids[~where].any()
        assert 0.0 < a.top.tail[where].max() < 1.0


@pytest.mark.parametrize("options", [{"states": "float32"}, {"states": "float32", "final": "top", "top": 4}], ids=str)
def test_hybrid_reads_what_is_there_and_computes_the_rest(options: dict[str, Any], store: Made) -> None:
    made = store(**options)
    known = made.rows("train")
    new = [token_row(8 + i, 500 + i) for i in range(12)]
    mixed = [row for pair in zip(known, new, strict=False) for row in pair]
    both = ChatBatches(mixed, 90, 100, seed=2)
    hybrid = HybridSource(made, tiny.target(), both, (1, 2, 4))
    online = OnlineSource(tiny.target(), both, (1, 2, 4))
    kinds = set()
    for number in range(both.per_epoch):
        members = both.members(number)
        kinds |= {(any(i % 2 for i in members), any(i % 2 == 0 for i in members))}
        a = hybrid(number)
        b = online(number)
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-4, atol=1e-4)
        if a.final is not None:
            torch.testing.assert_close(a.final, b.final, rtol=1e-4, atol=1e-4)
        else:
            assert a.top is not None
            assert (a.top.logprobs[taught(a.loss_mask)][:, 0] < 0).all()
    assert (True, True) in kinds  # batches of stored and computed rows
    with pytest.raises(StoreError, match=r"lacks 12 of the rows .* row 1 first: it holds 29.*hybrid source"):
        StoreSource(made, both, (1, 2, 4))


def test_a_store_of_longer_rows_serves_shorter_ones(store: Made) -> None:
    made = store(states="float32", **ALONE)
    short = ChatBatches(made.rows("train"), 1, 12, seed=1)
    offline = StoreSource(made, short, (1, 2, 4))
    online = OnlineSource(tiny.target(), short, (1, 2, 4))
    for number in range(short.per_epoch):
        a = offline(number)
        b = online(number)
        assert a.tokens.shape == b.tokens.shape
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.final, b.final, rtol=1e-4, atol=1e-4)


def test_rows_cut_shorter_than_asked_are_not_there(store: Made) -> None:
    made = store(longest=16)
    assert max(len(row.tokens) for row in made.rows("train")) == 16
    long = ChatBatches(rows().rows["train"], 60, 100, seed=1)
    with pytest.raises(StoreError, match="cut to 16 tokens"):
        StoreSource(made, long, (1, 2, 4))
    StoreSource(made, ChatBatches(rows().rows["train"], 60, 16, seed=1), (1, 2, 4))(0)


def test_taps_and_targets_it_was_not_captured_for(store: Made) -> None:
    made = store()
    with pytest.raises(StoreError, match=r"holds taps \[1, 2, 4\], not \[3\]: capture it again with `taps=1,3`"):
        StoreSource(made, batches(made), (1, 3))
    with pytest.raises(StoreError, match=r"not \[5\]: capture it again with `final=all`, or train"):
        StoreSource(made, batches(made), (5,))
    other = Target(tiny.build_model("llama", seed=9))
    with pytest.raises(StoreError, match="captured from another target: tiny, 4 layers, fingerprint"):
        HybridSource(made, other, batches(made), (1, 2, 4))
    made.check_target(tiny.target())
    with pytest.raises(RequestError, match="boundaries"):
        HybridSource(store(taps=(1, 2, 4)), tiny.target(), batches(made), (1, 1))


def test_a_row_is_known_by_tokens_and_mask(store: Made) -> None:
    made = store()
    row = rows().rows["train"][3]
    assert made.find(row, 100) == 3
    flipped = TokenRow(row.tokens, ~row.loss_mask)
    changed = TokenRow(np.where(np.arange(len(row.tokens)) == 4, 5, row.tokens), row.loss_mask)
    assert made.find(flipped, 100) is None
    assert made.find(changed, 100) is None
