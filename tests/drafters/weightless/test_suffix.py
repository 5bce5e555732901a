"""Suffix decoding: what a slot and an owner know, and that no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.drafters.weightless import suffix
from eyas.drafters.weightless.suffix import FinishedAnswers, SuffixDrafter, SuffixIndex, SuffixLimits
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.targets.native.library import kernels
from eyas.tree import parse_tree
from eyas.types import NO_OWNER, Limits, Owner, Request, SamplingParams
from eyas.verify import Sampler

from ... import tiny

CPU = torch.device("cpu")
LIMITS = SuffixLimits(factor=1.0, longest=4)


def drafter(slots: int = 2) -> SuffixDrafter:
    made = SuffixDrafter(CPU, LIMITS)
    made.pairs.resize(slots)
    return made


def give(drafter: SuffixDrafter, tokens: Sequence[int], slot: int = 0) -> None:
    """Let a slot observe some more tokens."""
    drafter.observe(range(slot, slot + 1), torch.tensor([tokens]), torch.zeros(1, len(tokens), 0, 1), [len(tokens)])


def answered(drafter: SuffixDrafter, owner: str, prompt: Sequence[int], answer: Sequence[int], slot: int = 0) -> None:
    """Run a sequence in a slot from its start to its end."""
    drafter.pairs.begin(slot, prompt, Owner(owner))
    give(drafter, [*prompt[1:], *answer], slot)
    drafter.finish(slot)
    drafter.pairs.truncate(slot, 0)


def proposed(drafter: SuffixDrafter, slot: int, depth: int = 4) -> list[int]:
    return drafter.propose(slot, depth, 64).tokens


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 8))
def test_a_slot_knows_its_tokens_whatever_happened(tokens: list[int], depth: int, cut: int) -> None:
    made = drafter()

    def fresh() -> list[int]:
        index = SuffixIndex(LIMITS)
        index.append(tokens)
        return index.draft(tokens, depth, 64).proposal.tokens

    made.pairs.begin(0, tokens, Owner(""))
    for token in tokens[1:]:  # a draft in between must not change what is found later
        proposed(made, 0, 1)
        give(made, [token])
    assert proposed(made, 0, depth) == fresh()
    kept = max(0, made.pairs.length(0) - cut)
    made.pairs.truncate(0, kept)
    if kept:
        give(made, [1, 2])
        tokens = [*tokens[: kept + 1], 1, 2]
        made.pairs.move(0, 1)
        made.pairs.reshape(3, 8)
        assert proposed(made, 1, depth) == fresh()


@pytest.mark.skipif(kernels() is None, reason="needs the native kernels")
@given(
    limits=st.builds(
        SuffixLimits,
        factor=st.sampled_from([0.5, 1.0, 2.0]),
        offset=st.sampled_from([0.0, 0.4, 2.0]),
        min_probability=st.sampled_from([0.01, 0.1, 0.3]),
        longest=st.sampled_from([2, 3, 16]),
        max_tokens=st.sampled_from([3, 64]),
    ),
    texts=st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=3),
    context=st.lists(st.integers(0, 3), max_size=18) | st.none(),
    depth=st.integers(1, 12),
    fanout=st.sampled_from([1, 2, 64]),
    floor=st.sampled_from([0.0, 0.5, 2.0]),
    dropped=st.integers(0, 70),
)
@example(
    SuffixLimits(2.0, 2.0, 0.01, 2), [[9, 1, 4, 9, 1, 5, 9, 2, 6, 9, 2, 7]], [9], 12, 64, 0.0, 24
)  # many are equal
@example(SuffixLimits(2.0, 0.5, 0.1, 1), [[1, 3, 1, 0, 3, 1]], None, 4, 64, 0.0, 0)  # one path overtakes another
def test_a_kernel_drafts_what_numpy_drafts(
    limits: SuffixLimits,
    texts: list[list[int]],
    context: list[int] | None,
    depth: int,
    fanout: int,
    floor: float,
    dropped: int,
) -> None:
    index = SuffixIndex(limits)
    for text in texts:
        index.append(text * 3)  # more than it has room for at first, and often repeated
        index.end_text()
    index.drop(min(dropped, len(index)))
    context = texts[-1] if context is None else context
    drafted = index.draft(context, depth, fanout, floor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "kernels", lambda: None)
        assert index.draft(context, depth, fanout, floor) == drafted


def test_an_empty_history_drafts_nothing() -> None:
    made = drafter()
    made.pairs.begin(0, [7], Owner("me"))
    assert proposed(made, 0) == []
    assert made.draft(range(1), parse_tree(made.fixed_tree), Sampler(1, 9, CPU).coupling(range(1), True)).size == 0


def test_answers_serve_their_owner_alone() -> None:
    made = drafter()
    answered(made, "one", [1, 2], [5, 6, 7, 8, 9])
    for owner, expected in (("one", [7, 8]), ("two", []), ("", [])):
        made.pairs.begin(0, [3, 5], Owner(owner))
        give(made, [5, 6])
        assert proposed(made, 0) == expected
        made.pairs.truncate(0, 0)


def test_only_answers_that_finished_are_kept() -> None:
    made = drafter()
    made.pairs.begin(0, [1, 2, 3, 4], Owner("one"))  # a prompt isn't part of them
    give(made, [2, 3, 4, 5, 6, 7])
    made.pairs.begin(1, [1, 5], Owner("one"))
    give(made, [5, 6], 1)
    assert proposed(made, 1) == []  # it runs on
    made.finish(0)
    assert proposed(made, 1) == [7]
    made.pairs.truncate(1, 0)
    made.pairs.begin(1, [2, 3], Owner("one"))
    give(made, [3], 1)
    assert proposed(made, 1) == []
    answered(made, "", [1], [8, 9])
    assert made.answers.index(NO_OWNER) is None


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 30)), max_size=40))
def test_memory_is_bounded(finished: list[tuple[str, int]]) -> None:
    answers = FinishedAnswers(LIMITS, per_owner=20, total=50, owners=3)
    kept: dict[str, list[list[int]]] = {}
    for number, (owner, size) in enumerate(finished):
        answer = [number] * size
        answers.add(Owner(owner), answer)
        kept[owner] = [*kept.pop(owner, []), answer[-19:]]
        while sum(len(each) + 1 for each in kept[owner]) > 20:
            kept[owner].pop(0)
        while len(kept) > 3 or sum(len(each) + 1 for of in kept.values() for each in of) > 50:
            del kept[next(iter(kept))]
        indexes = {name: answers.index(Owner(name)) for name in "abcde"}
        for name, index in indexes.items():
            expected = SuffixIndex(LIMITS)
            for each in kept.get(name, []):
                expected.append(each)
                expected.end_text()
            assert (index is not None) == (name in kept)
            assert index is None or list(index._text[: len(index)]) == list(expected._text[: len(expected)])
        assert len(answers) == sum(len(index) for index in indexes.values() if index is not None) <= 50
        assert all(index.nbytes <= 4 * (64 + 2 * 5) for index in indexes.values() if index is not None)


def test_limits_are_checked_at_once() -> None:
    with pytest.raises(UsageError, match="suffix: factor"):
        SuffixDrafter(CPU, SuffixLimits(min_probability=2.0))


TREES = ["chain:5", "dynamic:8,4,8", "shared:4,2,9"]


@pytest.mark.parametrize(("temperature", "tree", "batch"), tiny.sample([0.0, 0.7, 1.0], TREES, [1, 4]))
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    target = tiny.quick_target()
    requests = [
        Request(prompt * 3, SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(tiny.prompts(1, 4, 5, 7, 6))
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=batch).generate(requests)]
    made = SuffixDrafter(target.device)
    limits = Limits(max_running=batch, prefix_tokens=256)
    engine = Engine(target, None, Speculation(made, parse_tree(tree)), limits=limits)
    walked = []
    for _ in range(2):  # the second time with prefixes from the cache, and with the answers known
        indices = [engine.submit(request, queue_key="one") for request in requests]
        ended = {}
        while not engine.idle:
            ended |= {chunk.index: chunk.completion for chunk in engine.step() if chunk.completion is not None}
            engine.check_invariants()
        assert [ended[index].token_ids for index in indices] == plain
        walked.append(sum(one.stats.walked for one in ended.values()))
    assert walked[1] >= 5 * 10  # the same answers with the same seeds: they are copied
    assert walked[1] > walked[0]


def test_a_prediction_is_drafted_from_its_start_and_found_again_after_a_change() -> None:
    made = drafter()
    prediction = [20, 21, 22, 23, 24, 25]
    made.pairs.begin(0, [1, 2, 3], Owner(""), prediction)
    made.pairs.begin(1, [1, 2, 3], Owner(""))
    for slot in range(2):
        give(made, [2, 3], slot)
    assert made.propose(0, 8, 1).tokens == prediction[:3]  # as many as tokens of the prompt match
    assert made.propose(0, 8, 1).predicted
    assert proposed(made, 1) == []
    give(made, [20, 9, 22])  # 9 for 21
    assert made.propose(0, 8, 1).tokens == [23]
    assert made.pairs[0].tokens == [1, 2, 3, 20, 9, 22]
    made.finish(0)
    made.pairs.truncate(0, 0)
    made.pairs.begin(0, [1, 2, 3], Owner(""))  # another request's prediction isn't known
    give(made, [2, 3])
    assert proposed(made, 0) == []


def test_of_equal_drafts_the_prediction_s_counts() -> None:
    """Else a file that is in the prompt and in the prediction would count as no accepted prediction."""
    made = SuffixDrafter(CPU, LIMITS)
    made.pairs.resize(1)
    made.pairs.begin(0, [1, 2, 3, 4], NO_OWNER, prediction=[9, 1, 2, 3, 4])
    give(made, [2, 3, 4, 9, 1, 2])
    found = made.pairs[0].following(2, 1).proposal
    assert (found.tokens, found.predicted) == ([3, 4], True)
    give(made, [8, 3, 8])
    own = made.pairs[0].following(2, 1).proposal
    assert (own.tokens[:1], own.predicted) == ([3], False)


@pytest.mark.parametrize(
    ("forced", "depth", "tokens"),
    [
        ([], 4, [3, 4, 9]),
        ([3, 4], 4, [3, 4, 9]),  # the copy begins with what is forced, and goes on
        ([3, 5], 4, [3, 5]),
        ([7], 4, [7]),
        ([3, 5, 6], 2, [3, 5]),
    ],
)
def test_what_a_grammar_forces_comes_first_and_is_certain(forced: list[int], depth: int, tokens: list[int]) -> None:
    made = SuffixDrafter(CPU, LIMITS._replace(factor=2.0))
    made.pairs.resize(1)
    made.pairs.begin(0, [1], NO_OWNER)
    give(made, [2, 3, 4, 9, 1, 2])
    coupling: Any = SimpleNamespace(forced=lambda _row: forced)
    [found] = made.proposals(range(1), depth, 1, coupling, None)
    assert found.tokens[: len(tokens)] == tokens
    if forced:
        sure = [exp(logprob) for logprob in found.logprobs[: len(forced)]]
        assert sure == pytest.approx([64 / 65] * len(sure))
        assert len(found.tokens) == len(tokens) or found.logprobs[len(forced)] < found.logprobs[0]
    assert made.proposals(range(1), depth, 1, coupling, [False])[0].tokens == []
