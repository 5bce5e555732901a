"""Prefix blocks against a plain list of every sequence that was inserted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.prefix_cache import BLOCK, PrefixStore

Text = list[int]


def put(store: PrefixStore[Text], tokens: Text, tail: bool = True) -> None:
    """Insert `tokens`, each block's payload being its own tokens."""
    store.insert(tokens, lambda start, stop: tokens[start:stop], lambda payload, *_: payload, tail)


def found(store: PrefixStore[Text], tokens: Text) -> Text:
    """What a lookup gives, put together."""
    out: Text = []
    for start, count, payload in store.match(tokens):
        assert start == len(out)
        out += payload[:count]
    return out


def common(a: Text, b: Text) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# few symbols and repeated runs, so that sequences share beginnings of any length
sequences = st.lists(st.integers(0, 2), max_size=6).flatmap(
    lambda runs: st.integers(1, 40).map(lambda size: [value for value in runs for _ in range(size)])
)


@given(st.lists(st.tuples(sequences, st.booleans()), max_size=12), sequences)
def test_with_room_for_all_the_longest_shared_prefix_is_found(inserted: list[tuple[Text, bool]], asked: Text) -> None:
    store: PrefixStore[Text] = PrefixStore(10**6)
    for tokens, tail in inserted:
        put(store, tokens, tail)
        store.check()
    held = [tokens if tail else tokens[: len(tokens) // BLOCK * BLOCK] for tokens, tail in inserted]
    best = max((common(tokens, asked) for tokens in held), default=0)
    assert found(store, asked) == asked[:best]


@settings(max_examples=60)
@given(st.integers(1, 6 * BLOCK), st.lists(st.tuples(sequences, st.booleans()), max_size=25))
def test_with_little_room_what_is_found_is_true(limit: int, inserted: list[tuple[Text, bool]]) -> None:
    store: PrefixStore[Text] = PrefixStore(limit)
    for tokens, tail in inserted:
        put(store, tokens, tail)
        store.check()
        assert store.size <= limit
        assert found(store, tokens) == tokens[: len(found(store, tokens))]
        if len(tokens) <= limit and tail:
            assert found(store, tokens) == tokens  # what was used last is evicted last


def test_the_longest_unused_leaf_goes_first() -> None:
    store: PrefixStore[Text] = PrefixStore(4 * BLOCK)
    stem, one, two, three = ([i] * BLOCK for i in range(4))
    put(store, stem + one)
    put(store, stem + two)
    assert found(store, stem + one) == stem + one
    put(store, three + three)
    assert found(store, stem + two) == stem
    assert found(store, stem + one) == stem + one
    assert found(store, three) == three


def test_a_longer_ending_takes_the_place_of_a_shorter() -> None:
    store: PrefixStore[Text] = PrefixStore(1000)
    for size in (3, 9, 20, 20, 5, BLOCK, 50):
        put(store, list(range(size)))
        store.check()
    assert store.size == 50


def test_salts_have_prefixes_of_their_own() -> None:
    store: PrefixStore[Text] = PrefixStore(3 * BLOCK)
    tokens = [7] * (2 * BLOCK)
    store.insert(tokens, lambda start, stop: tokens[start:stop], lambda payload, *_: payload, salt="one")
    assert not store.match(tokens)
    assert not store.match(tokens, "two")
    assert len(store.match(tokens, "one")) == 2
    put(store, tokens)  # evicts one's
    store.check()
    assert len(store.match(tokens)) == 2
    assert len(store.match(tokens, "one")) == 1


def test_payloads_are_renewed_on_the_way() -> None:
    store: PrefixStore[str] = PrefixStore(1000)
    tokens = list(range(2 * BLOCK))
    store.insert(tokens, lambda *_: "old", lambda payload, *_: payload)
    renewed = []
    store.insert(tokens, lambda *_: "new", lambda payload, start, stop: renewed.append((start, stop)) or f"{payload}er")
    assert renewed == [(0, BLOCK), (BLOCK, 2 * BLOCK)]
    assert [payload for _, _, payload in store.match(tokens)] == ["older", "older"]


@pytest.mark.parametrize("turns", [300])
def test_nothing_piles_up_over_many_turns(turns: int) -> None:
    store: PrefixStore[Text] = PrefixStore(10**6)
    for size in range(turns):
        put(store, [7] * size)
    assert len(store._leaves) <= 64 + 4 * (turns // BLOCK + 1)
    store.check()
