"""Prompt lookup against a search by hand, and in the engine: it changes no token, and copies what is repeated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.tree import parse_tree
from eyas.types import NO_OWNER, Limits, Request, SamplingParams

from ... import tiny

CPU = torch.device("cpu")
LONGEST = 3


def by_hand(tokens: Sequence[int], depth: int) -> list[int]:
    """What followed the first earlier occurrence of the longest n-gram at the end."""
    for size in range(LONGEST, 0, -1):
        for end in range(size, len(tokens)):
            if list(tokens[end - size : end]) == list(tokens[len(tokens) - size :]):
                return list(tokens[end : end + depth])
    return []


def give(drafter: NgramDrafter, tokens: Sequence[int]) -> None:
    """Let slot 0 observe some more tokens."""
    drafter.observe(range(1), torch.tensor([list(tokens)]), torch.zeros(1, len(tokens), 0, 1), [len(tokens)])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 8))
def test_proposals_are_those_of_a_search_by_hand(tokens: list[int], depth: int, cut: int) -> None:
    drafter = NgramDrafter(CPU, LONGEST)
    drafter.pairs.resize(2)
    drafter.pairs.begin(0, tokens, NO_OWNER)
    for token in tokens[1:]:  # a draft in between must not change what is found later
        drafter.propose(0, 1, 1)
        give(drafter, [token])
    assert drafter.propose(0, depth, 1).tokens == by_hand(tokens, depth)
    kept = max(0, drafter.pairs.length(0) - cut)
    drafter.pairs.truncate(0, kept)
    if kept:
        give(drafter, [1, 2])
        tokens = [*tokens[: kept + 1], 1, 2]
        drafter.pairs.move(0, 1)
        assert drafter.propose(1, depth, 1).tokens == by_hand(tokens, depth)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="1 <= shortest <= longest"):
        NgramDrafter(CPU, 2, 3)


TREES = ["chain:5", "dynamic:4,1,4", "shared:4,1,9"]


@pytest.mark.parametrize(("temperature", "tree", "batch"), tiny.sample([0.0, 0.7, 1.0], TREES, [1, 4]))
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    target = tiny.quick_target()
    requests = [
        Request(prompt * 3, SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 4, 5, 7, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=batch).generate(requests)]
    speculation = Speculation(NgramDrafter(target.device), parse_tree(tree))
    engine = Engine(target, None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))
    for _ in range(2):  # the second time with prefixes from the cache
        done = engine.generate(requests)
        assert [one.token_ids for one in done] == plain
        engine.check_invariants()
    if temperature == 0.0:
        assert sum(one.stats.walked for one in done) > 0
