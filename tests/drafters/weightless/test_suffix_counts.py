"""Drafts from suffix counts against counting by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.drafters.weightless.suffix import SuffixIndex, SuffixLimits
from eyas.errors import UsageError
from eyas.tree.draft_tree import Proposal

MIN_PROBABILITY = 0.1234567  # no ratio of small numbers
Texts = Sequence[Sequence[int]]
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=3)


def occurrences(within: Texts, pattern: Sequence[int]) -> list[tuple[int, int]]:
    """The text and the index after each occurrence of a pattern."""
    size = len(pattern)
    return [
        (number, end)
        for number, text in enumerate(within)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(pattern)
    ]


def continuations(within: Texts, suffix: Sequence[int], depth: int) -> dict[tuple[int, ...], float]:
    """The probability of each path of at most `depth` tokens after a suffix: m / (m + n) is that of n after m."""
    match = len(suffix)
    total = len(occurrences(within, suffix))
    found: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        paths = [(*path, token) for path in paths for token in range(3)]
        counts = {path: len(occurrences(within, [*suffix, *path])) for path in paths}
        paths = [path for path in paths if counts[path]]
        worth = {path: counts[path] / total * match / (match + len(path)) for path in paths}
        found |= {path: probability for path, probability in worth.items() if probability >= MIN_PROBABILITY}
    return found


def path_by_hand(within: Texts, suffix: Sequence[int], nodes: int) -> list[int]:
    """The most frequent token again and again, of equals the one that came last."""
    path: list[int] = []
    total = len(occurrences(within, suffix))
    while len(path) < nodes:
        found = {token: occurrences(within, [*suffix, *path, token]) for token in range(3)}
        token = max(found, key=lambda each: (len(found[each]), max(found[each], default=(-1, -1))))
        if len(found[token]) / total * len(suffix) / (len(suffix) + len(path) + 1) < MIN_PROBABILITY:
            break
        path.append(token)
    return path


def suffixes(within: Texts, context: Sequence[int], limits: SuffixLimits) -> dict[int, list[int]]:
    """The suffixes of a context that occur, by their lengths."""
    sizes = range(1, min(limits.longest, len(context)) + 1)
    found = {size: list(context[len(context) - size :]) for size in sizes}
    return {size: suffix for size, suffix in found.items() if occurrences(within, suffix)}


def paths_of(proposal: Proposal) -> dict[tuple[int, ...], float]:
    """Every path of a proposal, and its probability."""
    found: list[tuple[tuple[int, ...], float]] = []
    for token, parent, logprob in zip(proposal.tokens, proposal.parents, proposal.logprobs, strict=True):
        above, total = found[parent] if parent >= 0 else ((), 0.0)
        found.append(((*above, token), total + logprob))
    return {path: math.exp(total) for path, total in found}


def index_of(within: Texts, limits: SuffixLimits) -> SuffixIndex:
    index = SuffixIndex(limits)
    for number, text in enumerate(within):
        if number:
            index.end_text()
        for start in range(0, len(text), 3):
            index.append(text[start : start + 3])
    return index


settings = st.builds(
    SuffixLimits,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.5, 1.0]),
    st.just(MIN_PROBABILITY),
    st.integers(1, 5),
    st.just(64),
)


@example(
    [[0, 0, 0, 2, 0, 0]], [], SuffixLimits(1.0, 0.5, MIN_PROBABILITY, 2), 2
)  # a path's next token is less likely than another
@given(texts, st.lists(st.integers(0, 2), max_size=8), settings, st.integers(1, 4))
def test_trees_are_the_most_probable_paths(
    within: list[list[int]], context: list[int], limits: SuffixLimits, depth: int
) -> None:
    index = index_of(within, limits)
    for tokens in (context, within[-1]):  # another text's, and this one's, whose end is an occurrence too
        draft = index.draft(tokens, depth, 3)
        scores = {0.0}
        matching = suffixes(within, tokens, limits)
        for size, suffix in matching.items():
            ranked = sorted(continuations(within, suffix, depth).values(), reverse=True)
            scores.add(sum(ranked[: limits.nodes(size)]))
        assert draft.score == pytest.approx(max(scores))
        found = paths_of(draft.proposal)
        assert sum(found.values()) == pytest.approx(draft.score)
        assert not found or any(
            len(found) <= limits.nodes(size)
            and found == pytest.approx({path: continuations(within, suffix, depth).get(path) for path in found})
            for size, suffix in matching.items()
        )
        for siblings in draft.proposal.children():
            assert siblings == sorted(siblings, key=lambda node: -draft.proposal.logprobs[node])


@given(texts, settings, st.integers(1, 6))
def test_chains_are_the_most_frequent_tokens(within: list[list[int]], limits: SuffixLimits, depth: int) -> None:
    context = within[-1]
    draft = index_of(within, limits).draft(context, depth, 1)
    best = []
    score = 0.0
    for size, suffix in sorted(suffixes(within, context, limits).items(), reverse=True):
        path = path_by_hand(within, suffix, min(limits.nodes(size), depth))
        known = continuations(within, suffix, depth)
        worth = sum(known[tuple(path[: level + 1])] for level in range(len(path)))
        if worth > score + 1e-9:
            best, score = path, worth
    assert draft.proposal.tokens == best
    assert draft.proposal.parents == list(range(-1, len(best) - 1))


@given(st.lists(st.integers(0, 2), max_size=700), st.data())
def test_cut_texts_are_like_new_ones(text: list[int], data: st.DataObject) -> None:
    limits = SuffixLimits(longest=4)
    index = index_of([text], limits)
    stop = data.draw(st.integers(0, len(text)))
    start = data.draw(st.integers(0, stop))
    index.truncate(stop)
    index.drop(start)
    index.append([1, 2])
    left = [*text[start:stop], 1, 2]
    assert len(index) == len(left)
    assert index.draft(left, 4, 3) == index_of([left], limits).draft(left, 4, 3)


def test_many_occurrences_are_counted_like_few() -> None:
    """More of them than are compared at once."""
    text = [0, 1, 2, 0, 1, 3, 0, 1, 3] * 300
    draft = SuffixIndex(SuffixLimits(longest=2))
    draft.append(text)
    (token,), (parent,), (logprob,), *_ = *vars(draft.draft([5, 1], 1, 1).proposal).values(), None
    assert (token, parent) == (3, -1)
    assert math.exp(logprob) == pytest.approx(2 / 3 * 1 / 2)
    assert draft.draft([9, 0, 1], 2, 2).proposal.tokens[0] == 3


def test_nothing_known_drafts_nothing() -> None:
    index = SuffixIndex()
    assert index.draft([], 8, 8).proposal.tokens == index.draft([1], 8, 8).proposal.tokens == []
    index.append([1])
    assert index.draft([1], 8, 8).proposal.tokens == index.draft([2], 8, 8).proposal.tokens == []


@pytest.mark.parametrize(
    "limits",
    [
        {"factor": -1.0},
        {"min_probability": 0.0},
        {"longest": 0},
        {"factor": 0.0},
        {"offset": -140.0},
        {"max_tokens": 0},
    ],
)
def test_limits_without_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"suffix: factor .* write factor >= 0"):
        SuffixIndex(SuffixLimits(**limits))  # type: ignore[arg-type]
