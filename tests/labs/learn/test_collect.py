"""Collecting: what is stored is what the target computed, of those who may be learned from, and serving never waits."""

from __future__ import annotations

import hashlib
import logging
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.data.store.layout import decode_states
from eyas.engine import Engine
from eyas.errors import StoreError
from eyas.labs.learn import collect
from eyas.labs.learn.collect import Collector, LearnRule
from eyas.labs.learn.traffic import TrafficRow, TrafficStore
from eyas.types import Owner, Request, SamplingParams

from ... import tiny
from .conftest import FINAL, TAPS, collector_of, learning_engine


def asked(count: int, seed: int = 0, shared: int = 0, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(seed)
    common = tuple(rng.randrange(2, tiny.VOCAB) for _ in range(shared))
    return [
        Request(
            (*common, *(rng.randrange(2, tiny.VOCAB) for _ in range(rng.randint(2, 50)))),
            SamplingParams(max_tokens=rng.randint(15, 90), temperature=temperature, seed=at),
        )
        for at in range(count)
    ]


def serve(
    traffic: TrafficStore, requests: list[Request], keys: list[str], collector: Collector | None = None
) -> Collector:
    """Serve requests of clients and write what was collected."""
    collector = collector or collector_of(traffic)
    engine, _ = learning_engine(tiny.quick_target(), tiny.eagle3_drafter(TAPS), collector)
    for request, key in zip(requests, keys, strict=True):
        engine.submit(request, queue_key=key)
    while not engine.idle:
        engine.step()
    collector.close()
    return collector


def collected(traffic: TrafficStore) -> list[TrafficRow]:
    return [row for shard in traffic.shards() for row in shard.rows(traffic.layout)]


@pytest.mark.parametrize(("shared", "temperature"), tiny.sample([0, 70], [0.0, 1.0]))
def test_states_are_those_that_the_target_computes(traffic: TrafficStore, shared: int, temperature: float) -> None:
    target = tiny.quick_target()
    requests = asked(9, shared=shared, temperature=temperature)
    serve(traffic, requests, ["c/"] * 9)
    rows = collected(traffic)
    assert len(rows) == 9
    longer = [  # a last round may accept more than was asked for, which is as good a lesson
        replace(one, params=one.params.model_copy(update={"max_tokens": one.params.max_tokens + 4})) for one in requests
    ]
    answers = {request.prompt: done for request, done in zip(requests, _plain(longer), strict=True)}
    for tokens, states in rows:
        (prompt,) = [p for p in answers if _holds(p, answers[p], tokens.tokens)]
        whole = np.array([*prompt, *answers[prompt]])
        first = _start(whole, tokens.tokens)
        assert first in (0, *range(32, shared)), "it begins where the shared prefix ends"
        traced = target.trace(torch.tensor(whole[None]), torch.tensor([len(whole)]), (*TAPS, FINAL))
        span = slice(first, first + len(tokens.tokens))
        assert tokens.loss_mask.tolist() == [at >= len(prompt) for at in range(len(whole))[span]]
        assert states.taps is not None
        assert states.final is not None
        torch.testing.assert_close(decode_states(states.taps, torch.float32), traced.taps[0, span, :3], **_FP8)
        taught = np.flatnonzero(tokens.loss_mask[1:]) + first
        torch.testing.assert_close(decode_states(states.final, torch.float32), traced.final[0, taught], **_FP8)


_FP8 = {"rtol": 2**-3, "atol": 0.05}


def _plain(requests: list[Request]) -> list[list[int]]:
    return [list(done.token_ids) for done in Engine(tiny.quick_target(), batch_size=8).generate(requests)]


def _start(whole: np.ndarray, part: np.ndarray) -> int:
    return next(at for at in range(len(whole)) if len(whole) >= at + 1 and (whole[at : at + len(part)] == part).all())


def _holds(prompt: tuple[int, ...], answer: list[int], part: np.ndarray) -> bool:
    whole = np.array([*prompt, *answer])
    return any(
        len(window := whole[at : at + len(part)]) == len(part) and (window == part).all()
        for at in range(len(whole) - len(part) + 1)
    )


def test_answers_end_at_their_end_token(traffic: TrafficStore) -> None:
    requests = asked(6)
    everything = collector_of(traffic)
    serve(traffic, requests, ["c/"] * 6, everything)
    before = collected(traffic)
    answer = before[0].tokens.tokens[before[0].tokens.loss_mask]
    end = int(answer[12])
    for shard in traffic.shards():
        shard.path.unlink()
    serve(traffic, requests, ["c/"] * 6, Collector(traffic, LearnRule(), (end,)))
    for tokens, states in collected(traffic):
        assert end not in tokens.tokens[tokens.loss_mask][:-1]
        assert states.taps is not None
        assert len(states.taps.values) == len(tokens.tokens)
    assert any(tokens.tokens[-1] == end for tokens, _ in collected(traffic))


def test_nothing_is_written_of_those_who_opted_out(traffic: TrafficStore, tmp_path: Path) -> None:
    """Not a token sequence of theirs is in any byte of the folder, not even for a moment."""
    everyone = [
        Owner("mallory/"),
        Owner("alice/"),
        Owner("alice/", private=True),
        Owner("bob/x", private=True),
        Owner("carol/"),
        Owner("carol/private"),  # a user may be called so
    ]
    owners = [everyone[at % 6] for at in range(24)]
    requests = [replace(one, private=owner.private) for one, owner in zip(asked(24, seed=4), owners, strict=True)]
    written: list[bytes] = []
    write = traffic.write

    def spy(client: str, split: object, rows: list[TrafficRow]) -> None:
        write(client, split, rows)  # type: ignore[arg-type]
        written.extend(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    traffic.write = spy  # type: ignore[method-assign]
    serve(
        traffic,
        requests,
        [owner.key for owner in owners],
        collector_of(traffic, LearnRule(excluded=frozenset({"mallory"}))),
    )
    for request, owner in zip(requests, owners, strict=True):
        needle = np.array(request.prompt, dtype="<i4").tobytes()
        found = any(needle in data for data in written)
        assert found == (owner in (Owner("alice/"), Owner("carol/"), Owner("carol/private"))), owner
    assert {shard.client for shard in traffic.shards()} == {_digest("alice"), _digest("carol")}


def _digest(client: str) -> str:
    return hashlib.blake2b(client.encode(), digest_size=8).hexdigest()


def test_rules() -> None:
    assert LearnRule().allows(Owner("a/"), 0.99)
    assert LearnRule().allows(Owner("a/private"), 0.99)
    assert not LearnRule().allows(Owner("a/", private=True), 0.0)
    assert not LearnRule(only=frozenset({"b"})).allows(Owner("a/user"), 0.0)
    assert LearnRule(only=frozenset({"a"})).allows(Owner("a/user"), 0.0)
    assert not LearnRule(share=0.5).allows(Owner("a/"), 0.6)
    assert not LearnRule(share=0.0).allows(Owner("a/"), 0.0)


def test_a_full_disk_ends_collecting_and_nothing_else(
    traffic: TrafficStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StoreError("can't write: no space left on device")

    monkeypatch.setattr(traffic, "write", full)
    monkeypatch.setattr(collect, "_TOGETHER", 1)
    requests = asked(12)
    collector = collector_of(traffic)
    engine, _ = learning_engine(tiny.quick_target(), tiny.eagle3_drafter(TAPS), collector)
    with caplog.at_level(logging.WARNING):
        answers = [list(done.token_ids) for done in engine.generate(requests)]
        collector.close()
    assert answers == _plain(requests)
    assert collector.stopped == "can't write: no space left on device"
    assert len([one for one in caplog.records if "nothing is collected" in one.message]) == 1
    assert not traffic.shards()


def test_a_slow_disk_loses_rows_and_keeps_nobody_waiting(
    traffic: TrafficStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collect, "_MAX_WAITING_BYTES", 3000)
    collector = collector_of(traffic)
    with caplog.at_level(logging.WARNING):
        serve(traffic, asked(12), ["c/"] * 12, collector)
    assert collector.counts["dropped"] >= 6
    assert collector.counts["rows"] + collector.counts["dropped"] <= 12
    assert len([one for one in caplog.records if "slower than the traffic" in one.message]) == 1


def test_cancelled_and_preempted_rows_leave_nothing_half(traffic: TrafficStore) -> None:
    collector = collector_of(traffic)
    engine, _ = learning_engine(tiny.quick_target(), tiny.eagle3_drafter(TAPS), collector)
    requests = asked(4)
    indices = [engine.submit(request) for request in requests]
    for _ in range(6):
        engine.step()
    engine.cancel(indices[0])
    while not engine.idle:
        engine.step()
    collector.close()
    rows = collected(traffic)
    assert len(rows) == 3
    assert not any(_holds(requests[0].prompt, [], tokens.tokens[~tokens.loss_mask]) for tokens, _ in rows)


def test_long_rows_are_cut(traffic: TrafficStore) -> None:
    serve(traffic, asked(5), ["c/"] * 5, collector_of(traffic, longest=40))
    assert max(len(tokens.tokens) for tokens, _ in collected(traffic)) == 40
