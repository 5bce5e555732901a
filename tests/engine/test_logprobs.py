"""Log-probabilities are the target's own, whatever is drafted, sampled or forbidden."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.types import Completion, GrammarSpec, Limits, Request, SamplingParams
from eyas.verify import logprobs

from .. import pairs, tiny
from .test_grammar import engine as constrained_engine

PARAMS = (
    SamplingParams(max_tokens=13, logprobs=3),
    SamplingParams(max_tokens=13),
    SamplingParams(max_tokens=13, logprobs=0, temperature=1.2, top_k=9, seed=1, repetition_penalty=1.3),
    SamplingParams(max_tokens=13, logprobs=20, temperature=0.7, seed=2, logit_bias={5: 9.0}),
)


def asked() -> list[Request]:
    prompts = tiny.prompts(9, 1, 5, 12)
    return [Request(tuple(prompt), params) for prompt, params in zip(prompts, PARAMS, strict=True)]


def check(request: Request, done: Completion) -> None:
    """Against `transformers`' own pass over the finished sequence."""
    if request.params.logprobs is None:
        assert done.logprobs is None
        return
    assert done.logprobs is not None
    assert [each.token_id for each in done.logprobs] == done.token_ids
    sequence = [*request.prompt, *done.token_ids]
    raw = tiny.full_forward(tiny.quick_target().model, sequence).logits[0].log_softmax(-1)
    for place, each in enumerate(done.logprobs, len(request.prompt) - 1):
        assert each.logprob == pytest.approx(float(raw[place, each.token_id]), abs=1e-4)
        assert len(each.top) == request.params.logprobs
        best = raw[place].topk(max(1, request.params.logprobs))
        for (token, value), expected in zip(each.top, best.values.tolist(), strict=False):
            assert value == pytest.approx(expected, abs=1e-4)
            assert value == pytest.approx(float(raw[place, token]), abs=1e-4)


@pytest.mark.parametrize("tree", [None, "chain:3", "dynamic:4,3,8"])
@pytest.mark.parametrize("batch", [1, 4])
def test_equal_the_models_own(tree: str | None, batch: int) -> None:
    speculation = None if tree is None else Speculation(tiny.eagle3_drafter(), parse_tree(tree))
    done = Engine(tiny.quick_target(), None, speculation, batch_size=batch).generate(asked())
    for request, each in zip(asked(), done, strict=True):
        check(request, each)


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:4,3,8"])
def test_chunks_carry_them_aligned(tree: str) -> None:
    """Rounds that emit several tokens, and a last one that is cut."""
    plain = Engine(tiny.quick_target()).generate(asked())
    sequences = [[*r.prompt, *d.token_ids, 3, 4, 5] for r, d in zip(asked(), plain, strict=True)]
    oracle = tiny.OracleDrafter(sequences, (1, 2, 4), omit=0.05)
    made = Engine(tiny.quick_target(), None, Speculation(oracle, parse_tree(tree)), batch_size=2)
    parts: dict[int, list[int]] = {}
    longest = 0
    for chunk in made.stream(asked()):
        if PARAMS[chunk.index].logprobs is None:
            assert chunk.logprobs is None
            continue
        assert chunk.logprobs is not None
        assert tuple(each.token_id for each in chunk.logprobs) == chunk.token_ids
        longest = max(longest, len(chunk.token_ids))
        parts.setdefault(chunk.index, []).extend(each.token_id for each in chunk.logprobs)
        if chunk.completion is not None:
            check(asked()[chunk.index], chunk.completion)
            assert parts[chunk.index] == chunk.completion.token_ids
    assert longest > 2
    assert len(parts) == 3


def test_a_grammar_doesnt_show_in_them() -> None:
    """The alternatives are what the target would have liked, legal or not."""
    pytest.importorskip("llguidance")
    made = constrained_engine("dynamic:4,3,8")
    spec = GrammarSpec("choice", json.dumps(["return a", "return b"]))
    (done,) = made.generate([Request((5, 9), SamplingParams(logprobs=2), grammar=spec)])
    assert done.logprobs is not None
    raw = torch.tensor([*(5, 9), *done.token_ids])
    with torch.inference_mode():
        expected = made.target.model(raw.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    for place, each in enumerate(done.logprobs, 1):
        assert each.logprob == pytest.approx(float(expected[place, each.token_id]), abs=1e-4)
        assert each.top[0][0] == int(expected[place].argmax())
    assert any(each.top[0][0] != each.token_id for each in done.logprobs)
    assert done.as_dict()["logprobs"][0]["token_id"] == done.token_ids[0]
    assert pairs.tokenizer().eos_token_id == done.token_ids[-1]


def scored(prompts: list[list[int]], **params: Any) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(**{"prompt_logprobs": 3, "max_tokens": 4, **params}))
        for prompt in prompts
    ]


def check_prompt(request: Request, done: Completion) -> None:
    """Against `transformers`' own pass over the prompt."""
    assert done.prompt_logprobs is not None
    assert [each.token_id for each in done.prompt_logprobs] == list(request.prompt[1:])
    raw = tiny.full_forward(tiny.quick_target().model, list(request.prompt)).logits[0].log_softmax(-1)
    for place, each in enumerate(done.prompt_logprobs):
        assert each.logprob == pytest.approx(float(raw[place, each.token_id]), abs=1e-4)
        best = raw[place].topk(3)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert each.rank == 1 + int((raw[place] > raw[place, each.token_id]).sum())


@pytest.mark.parametrize("tree", [None, "chain:3"])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 512), (4, 3)])
def test_a_prompt_s_are_those_of_one_pass_over_it(
    tree: str | None, batch: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the prompt is cut, and however few positions' logits are computed together."""
    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 5 * tiny.quick_target().vocab_size)
    speculation = None if tree is None else Speculation(tiny.eagle3_drafter(), parse_tree(tree))
    requests = [*scored(tiny.prompts(9, 1, 5, 40)), *asked(), *scored(tiny.prompts(9, 1), max_tokens=0)]
    done = Engine(tiny.quick_target(), None, speculation, batch_size=batch, prefill_chunk=chunk).generate(requests)
    for request, each in zip(requests, done, strict=True):
        if request.params.prompt_logprobs is None:
            assert each.prompt_logprobs is None
            check(request, each)
        else:
            check_prompt(request, each)
    plain = Engine(tiny.quick_target()).generate(
        [Request(r.prompt, SamplingParams(max_tokens=4)) for r in requests[:4]]
    )
    assert [each.token_ids for each in done[:4]] == [each.token_ids for each in plain]
    assert [(each.token_ids, each.finish_reason) for each in done[-2:]] == [([], "length")] * 2


def test_a_prompt_s_are_complete_where_the_beginning_is_cached_and_where_it_is_read_twice() -> None:
    """The prefix cache has no logits, and a preempted sequence reads again."""
    limits = Limits(max_running=3, prefill_chunk=16, prefix_tokens=4096, max_cached_tokens=3 * 128)
    engine = Engine(tiny.quick_target(), limits=limits)
    (long,) = tiny.prompts(90)
    first = engine.generate(scored([long], max_tokens=20))[0]
    second = engine.generate(scored([long]))[0]
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.stats.reused_tokens == 0
    assert engine.generate([Request(tuple(long))])[0].stats.reused_tokens > 60
    requests = scored([long, long[:40], long[:50]], max_tokens=110)
    running = engine.stream(requests)
    done = [next(running).completion]
    engine._core.runner.slots.intact = False  # as after an interrupted step, while prompts are half read
    engine._core.scheduler.preempt(engine._core.scheduler.running.sequences)
    done += [chunk.completion for chunk in running]
    assert engine.state().preempted_total > 1
    for each, request in itertools.product(done, requests):
        if each is not None and len(each.prompt_logprobs or ()) == len(request.prompt) - 1:
            check_prompt(request, each)
    assert sum(each is not None for each in done) == 3


def test_a_prompt_s_come_once_with_the_first_chunk() -> None:
    chunks = list(Engine(tiny.quick_target(), batch_size=2).stream(scored(tiny.prompts(9, 5))))
    for index in range(2):
        first, *later = [chunk for chunk in chunks if chunk.index == index]
        assert first.prompt_logprobs is not None
        assert first.token_ids
        assert all(chunk.prompt_logprobs is None for chunk in later)
