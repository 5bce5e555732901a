"""Bad words: what `transformers` rules out, along any path; nothing that is drafted gets around them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import Sampler

from .. import tiny
from .emulation import CPU, admit_all

VOCAB = 6
WORDS = st.lists(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)
START = (VOCAB - 1,) * 4
"""Of the same length as the longest word, whose tokens it doesn't have: `transformers` looks at prompts, too."""


def by_transformers(words: tuple[tuple[int, ...], ...], answer: list[int], logits: torch.Tensor) -> torch.Tensor:
    if not words:
        return logits
    made = NoBadWordsLogitsProcessor([list(word) for word in words])(torch.tensor([[*START, *answer]]), logits)
    assert isinstance(made, torch.Tensor)
    return made


@given(st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 2**31))
def test_equals_transformers_along_paths_commits_and_moves(words: list[tuple[tuple[int, ...], ...]], seed: int) -> None:
    rows = len(words)
    generator = torch.Generator().manual_seed(seed)
    sampler = admit_all([SamplingParams(bad_words_ids=each) for each in words], VOCAB)
    answers: list[list[int]] = [[] for _ in words]
    for _ in range(5):
        path = sampler.path(range(rows), steps=3)
        ahead = [list(answer) for answer in answers]
        chosen = torch.randint(VOCAB, (rows, 3), generator=generator)
        for step in range(3):
            logits = torch.randn(rows, VOCAB, generator=generator)
            warped = path.warped(logits)
            for row in range(rows):
                expected = by_transformers(words[row], ahead[row], logits[row : row + 1])
                assert torch.equal(warped[row : row + 1], expected)
                ahead[row].append(int(chosen[row, step]))
            path.advance(chosen[:, step])
        counts = torch.randint(1, 4, (rows,), generator=generator)
        sampler.commit(range(rows), chosen, counts)
        for row in range(rows):
            answers[row] += chosen[row, : counts[row]].tolist()
    resumed = Sampler(2, VOCAB, CPU)
    resumed.admit(0, SamplingParams(bad_words_ids=words[0]), START, (), answers[0])
    resumed.admit(1, SamplingParams(bad_words_ids=((0, 1, 2, 3, 4),)), START, (), [3])  # makes the tables wider
    logits = torch.randn(1, VOCAB, generator=generator)
    expected = by_transformers(words[0], answers[0], logits)
    assert torch.equal(resumed.path(range(1)).warped(logits), expected)
    resumed.move(0, 1)
    assert torch.equal(resumed.path(range(1, 2)).warped(logits), expected)
    resumed.admit(0, SamplingParams(), START, ())
    assert torch.equal(resumed.path(range(2)).warped(logits)[:1], logits)


def bad(answer: list[int]) -> tuple[tuple[int, ...], ...]:
    """Words that the answer has: of one token, two and three."""
    return (tuple(answer[9:10]), tuple(answer[2:4]), tuple(answer[5:8]))


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("tree", "batch"), [("chain:4", 1), ("dynamic:4,4,12", 4)])
def test_speculation_changes_nothing_and_the_words_stay_out(tree: str, batch: int, temperature: float) -> None:
    """The oracle drafts what would come without bad words, so they are drafted and have to be refused."""
    target = tiny.target("qwen3")
    prompts = tiny.prompts(13, 1, 20, 5)
    params = [SamplingParams(max_tokens=14, seed=i, temperature=temperature) for i in range(4)]
    free = [
        done.token_ids
        for done in Engine(target).generate([Request(tuple(p), s) for p, s in zip(prompts, params, strict=True)])
    ]
    requests = [
        Request(tuple(prompt), each.model_copy(update={"bad_words_ids": bad(answer)}))
        for prompt, each, answer in zip(prompts, params, free, strict=True)
    ]
    plain = [done.token_ids for done in Engine(target, batch_size=2).generate(requests)]
    sequences = [[*p, *answer] for answers in (free, plain) for p, answer in zip(prompts, answers, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (1,), strict=False)
    for drafter in (oracle, tiny.eagle3_drafter()):
        engine = Engine(target, None, Speculation(drafter, parse_tree(tree)), batch_size=batch)
        assert [done.token_ids for done in engine.generate(requests)] == plain
    assert plain != free
    for request, answer in zip(requests, plain, strict=True):
        for word in request.params.bad_words_ids:
            windows = zip(*(answer[i:] for i in range(len(word))), strict=False)
            assert word not in list(windows)
    if not temperature:
        for request, answer in zip(requests, plain, strict=True):
            words = [list(word) for word in request.params.bad_words_ids]
            assert answer == tiny.continuation(target.model, request.prompt, 14, bad_words_ids=words)
