"""What surrounds the rounds: limits, stops, slots, streams, statistics, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.engine import Engine, Speculation
from eyas.errors import RequestError, UsageError
from eyas.targets import Target
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams, Stats
from eyas.verify import TypicalWalk

from .. import tiny

LENGTHS = (13, 1, 20, 5, 9, 3)


def oracle(name: str, tokens: int, prompts: list[list[int]], omit: float = 0.15) -> tiny.OracleDrafter:
    model = tiny.target(name).model
    return tiny.OracleDrafter([p + tiny.continuation(model, p, tokens) for p in prompts], (1, 2, 4), omit)


def engine(tree: str | None = "dynamic:4,3,8", *, batch: int = 1, name: str = "llama", drafter: Any = None) -> Engine:
    speculation = None if tree is None else Speculation(drafter or tiny.eagle3_drafter(), parse_tree(tree))
    return Engine(tiny.target(name), None, speculation, batch_size=batch)


def requests(prompts: list[list[int]], **params: Any) -> list[Request]:
    return [Request(tuple(p), SamplingParams(**params), id=f"r{i}") for i, p in enumerate(prompts)]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stop_id_ends_the_answer_and_is_its_last_token(batch: int) -> None:
    prompts = tiny.prompts(13, 20)
    reference = [tiny.continuation(tiny.target().model, p, 20) for p in prompts]
    stops = tuple({reference[0][6], reference[1][3]})
    done = engine(drafter=oracle("llama", 20, prompts, 0.0), tree="chain:5", batch=batch).generate(
        requests(prompts, max_tokens=20, stop_token_ids=stops)
    )
    for completion, tokens in zip(done, reference, strict=True):
        cut = min(tokens.index(s) for s in stops if s in tokens) + 1
        assert completion.token_ids == tokens[:cut]
        assert completion.finish_reason == "stop"
        assert completion.stats.tokens == cut


def test_eos_is_a_stop_unless_ignored() -> None:
    prompt = tiny.prompts(13)[0]
    tokens = tiny.continuation(tiny.target().model, prompt, 20)
    model = tiny.build_model("llama")
    model.generation_config.eos_token_id = [tokens[4], 96]
    spec = Speculation(tiny.eagle3_drafter(), parse_tree("chain:3"))
    run = Engine(Target(model), None, spec)
    assert run.eos_ids == tuple(sorted((tokens[4], 96)))
    stopped, ignored = (run.generate(requests([prompt], max_tokens=20, ignore_eos=flag))[0] for flag in (False, True))
    assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert stopped.finish_reason == "stop"
    assert ignored.token_ids == tokens
    assert ignored.finish_reason == "length"
    assert tiny.continuation(model, prompt, 20) == stopped.token_ids


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens_cuts_exactly(limit: int) -> None:
    """Also in the middle of an accepted path."""
    prompts = tiny.prompts(*LENGTHS)
    done = engine("chain:5", batch=4, drafter=oracle("llama", 20, prompts, 0.0)).generate(
        requests(prompts, max_tokens=limit)
    )
    for completion, prompt in zip(done, prompts, strict=True):
        assert completion.token_ids == tiny.continuation(tiny.target().model, prompt, limit)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("tree", [None, "chain:5", "dynamic:4,3,8", "static:eagle1"])
def test_generation_up_to_the_last_learned_position(tree: str | None) -> None:
    """Trees reach over the context's end; what is emitted on this side of it is transformers'."""
    target = Target(tiny.build_model("gpt2", max_position_embeddings=32))
    assert target.max_length == 32
    prompts = tiny.prompts(13, 25, 31, 1)
    spec = None
    if tree is not None:
        full = [p + tiny.continuation(target.model, p, 32 - len(p)) for p in prompts]
        spec = Speculation(tiny.OracleDrafter(full, (0, 2)), parse_tree(tree))
    done = Engine(target, None, spec, batch_size=3).generate(requests(prompts, max_tokens=100))
    for completion, prompt in zip(done, prompts, strict=True):
        assert completion.token_ids == tiny.continuation(target.model, prompt, 32 - len(prompt))
        assert len(prompt) + len(completion.token_ids) == 32
        assert completion.finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    run = Engine(Target(tiny.build_model("gpt2", max_position_embeddings=32)))
    with pytest.raises(RequestError, match="the prompt has 32 tokens, the model's context holds 32"):
        run.generate(requests(tiny.prompts(32)))


@pytest.mark.parametrize("prompt", [(), (3, tiny.VOCAB), (-1, 3)])
def test_bad_prompts_are_refused_before_anything_runs(prompt: tuple[int, ...]) -> None:
    run = engine()
    with pytest.raises(RequestError):
        run.generate([Request((3, 4, 5)), Request(prompt)])
    assert list(run.stream([])) == []


def test_impossible_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="batch size"):
        Engine(tiny.target(), batch_size=0)
    with pytest.raises(UsageError, match="prefill chunk"):
        Engine(tiny.target(), prefill_chunk=0)


@pytest.mark.every(3)
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_batch_does_not_change_the_output(batch: int, temperature: float) -> None:
    """Slots are refilled and moved in another order every time."""
    prompts = tiny.prompts(*LENGTHS, 17, 4)
    limits = (9, 3, 14, 1, 6, 20, 5, 2)
    asked = [
        Request(tuple(p), SamplingParams(max_tokens=n, temperature=temperature, seed=i))
        for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    alone = [engine().generate([r])[0].token_ids for r in asked]
    assert [len(a) for a in alone] == list(limits)
    assert [c.token_ids for c in engine(batch=batch).generate(asked)] == alone
    assert [c.token_ids for c in engine(batch=batch).generate(asked[::-1])] == alone[::-1]


def test_the_cache_grows_while_sequences_move() -> None:
    """Beyond the first 256 columns, with a slot being taken over afterwards."""
    target = Target(tiny.build_model("llama", max_position_embeddings=400))
    prompts = tiny.prompts(250, 240, 255, 3)
    limits = (10, 30, 10, 12)
    spec = Speculation(tiny.eagle3_drafter(), parse_tree("chain:3"))
    asked = [Request(tuple(p), SamplingParams(max_tokens=n)) for p, n in zip(prompts, limits, strict=True)]
    done = Engine(target, None, spec, batch_size=2, prefill_chunk=100).generate(asked)
    for completion, prompt, limit in zip(done, prompts, limits, strict=True):
        assert completion.token_ids == tiny.continuation(target.model, prompt, limit)


def test_sampler_tables_made_in_one_round_serve_the_next_request() -> None:
    prompts = tiny.prompts(5, 6, 7)
    asked = requests(prompts, max_tokens=6, presence_penalty=1.5)
    assert [c.token_ids for c in engine().generate(asked)] == [c.token_ids for c in engine(None).generate(asked)]


def test_an_abandoned_stream_leaves_the_engine_usable() -> None:
    prompts = tiny.prompts(*LENGTHS)
    run = engine(batch=3)
    asked = requests(prompts, max_tokens=8)
    fresh = [c.token_ids for c in run.generate(asked)]
    stream = run.stream(asked[::-1])
    next(stream)
    next(stream)
    stream.close()
    assert [c.token_ids for c in run.generate(asked)] == fresh
    other = run.stream(asked)
    next(other)  # left open
    assert [c.token_ids for c in run.generate(asked)] == fresh


def test_two_engines_share_a_target() -> None:
    prompts = tiny.prompts(*LENGTHS)
    asked = requests(prompts, max_tokens=8)
    wide = engine(batch=4)
    narrow = engine(None, batch=1)
    first = [c.token_ids for c in wide.generate(asked)]
    assert [c.token_ids for c in narrow.generate(asked)] == first
    assert [c.token_ids for c in wide.generate(asked)] == first


def test_chunks_add_up_to_the_completions() -> None:
    prompts = tiny.prompts(*LENGTHS)
    run = engine("chain:5", batch=4, drafter=oracle("llama", 20, prompts))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    accepted = dict.fromkeys(tokens, 0)
    done: dict[int, Completion] = {}
    for chunk in run.stream(requests(prompts, max_tokens=11)):
        assert chunk.index not in done
        assert 0 <= chunk.accepted <= len(chunk.token_ids)
        tokens[chunk.index] += chunk.token_ids
        accepted[chunk.index] += chunk.accepted
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
    for index, completion in done.items():
        assert completion.token_ids == tokens[index]
        assert completion.id == f"r{index}"
        assert accepted[index] <= completion.stats.walked
    assert sorted(done) == sorted(tokens)


@pytest.mark.parametrize("tree", [None, "chain:5", "dynamic:4,3,8"])
def test_statistics_agree_with_each_other(tree: str | None) -> None:
    prompts = tiny.prompts(*LENGTHS)
    drafter = None if tree is None else oracle("llama", 24, prompts)
    total = Stats()
    done = engine(tree, batch=4, drafter=drafter).generate(requests(prompts, max_tokens=15))
    for prompt, completion in zip(prompts, done, strict=True):
        # a lone token has nothing to prefill
        stats = completion.stats
        first = int(len(prompt) > 1)
        assert stats.tokens == len(completion.token_ids) == 15
        assert sum(stats.accepted_histogram) == stats.target_passes
        assert sum(i * n for i, n in enumerate(stats.accepted_histogram)) == stats.walked
        assert stats.drafted_depth == sum(stats.offered_by_depth)
        assert stats.accept_length == 1 + stats.walked / stats.target_passes
        assert stats.prefill_tokens == first
        emitted = stats.prefill_tokens + stats.walked + stats.target_passes  # before the last round's cut
        assert 0 <= emitted - stats.tokens <= len(stats.offered_by_depth)
        assert stats.prefill_seconds >= 0
        assert stats.decode_seconds > 0
        assert stats.tokens_per_second == pytest.approx((15 - first) / stats.decode_seconds)
        assert (0 < stats.draft_share < 1) if tree is not None else stats.draft_seconds == 0
        if tree is None:
            assert (stats.walked, stats.drafted_depth, stats.target_passes) == (0, 0, 15 - first)
            assert (stats.accept_length, stats.acceptance_rate) == (1.0, 0.0)
        else:
            assert stats.target_passes < 15 - first
            assert stats.acceptance_rate == stats.walked / stats.drafted_depth
            by_position = stats.accepted_by_position
            assert sum(r * n for r, n in zip(by_position, stats.offered_by_depth, strict=True)) == pytest.approx(
                stats.walked
            )
        total.merge(stats)
    assert total.tokens == 15 * len(prompts)
    assert sum(total.accepted_histogram) == total.target_passes


@pytest.mark.every(2)
@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("tree", [None, "chain:3"])
def test_first_tokens_of_prompts_around_a_chunk(chunk: int, tree: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny.prompts(1, 2, 3, 5, 6, 7, 11)
    widths = []
    whole = tiny.target().prefill_to_end

    def seen(cache: Any, rows: range, tokens: Any, taps: Any) -> Any:
        widths.extend(map(len, tokens))
        return whole(cache, rows, tokens, taps)

    monkeypatch.setattr(tiny.target(), "prefill_to_end", seen)
    speculation = None if tree is None else Speculation(oracle("llama", 12, prompts), parse_tree(tree))
    run = Engine(tiny.target(), None, speculation, batch_size=3, prefill_chunk=chunk)
    for prompt, done in zip(prompts, run.generate(requests(prompts, max_tokens=6)), strict=True):
        assert done.token_ids == tiny.continuation(tiny.target().model, prompt, 6)
        assert done.stats.prefill_tokens == (len(prompt) > 1)
    assert max(widths) == chunk


def test_no_first_token_waits_for_the_drafter_s_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[int]]()
    speculation = Speculation(tiny.drafter("eagle3"), parse_tree("chain:3"))
    run = Engine(tiny.target(), None, speculation, batch_size=2)
    drafter: Any = run.speculation and run.speculation.drafter
    original = drafter._read

    def seen(*given: Any) -> None:
        read.extend([list(given[-1])] if any(given[-1]) else [])
        original(*given)

    monkeypatch.setattr(drafter, "_read", seen)
    for request in requests(tiny.prompts(9, 4), max_tokens=6):
        run.submit(request)
    while not (chunks := run.step()):
        pass
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1]
    assert not read
    run.step()
    assert read[0] == [9, 4]
    del read[:]
    Engine(tiny.target(), None, run.speculation).generate(requests(tiny.prompts(7), max_tokens=1))
    assert not read


def test_where_the_head_alone_does_not_give_the_logits_a_round_does() -> None:
    target = Target(tiny.build_model("llama"))
    prompts = tiny.prompts(5, 9)
    target.head_is_exact = False
    for prompt, done in zip(
        prompts, Engine(target, batch_size=2).generate(requests(prompts, max_tokens=6)), strict=True
    ):
        assert done.token_ids == tiny.continuation(tiny.target().model, prompt, 6)
        assert (done.stats.prefill_tokens, done.stats.target_passes) == (0, 6)


def test_counting_rounds_by_hand() -> None:
    stats = Stats()
    contexts = (1, 1023, 1024, 20_000, 2**20)
    for (accepted, offered), context in zip(((2, 4), (0, 4), (4, 4), (1, 2), (0, 0)), contexts, strict=True):
        stats.record(accepted, offered, context)
    assert stats.accepted_histogram == [2, 1, 1, 0, 1]
    assert stats.offered_by_depth == [4, 4, 3, 3]
    assert stats.accept_length == 1 + 7 / 5
    assert stats.acceptance_rate == 7 / 14
    assert stats.accepted_by_position == [3 / 4, 2 / 4, 1 / 3, 1 / 3]
    assert stats.rounds_by_context == [2, 1, 0, 0, 0, 2]
    assert stats.accept_length_by_context == {"0-1k": 2.0, "1-2k": 5.0, "16k+": 1.5}
    both = Stats()
    both.merge(stats)
    both.merge(stats)
    assert both.rounds_by_context == [4, 2, 0, 0, 0, 4]
    assert both.accept_length_by_context == stats.accept_length_by_context
    assert Stats().accept_length == Stats().acceptance_rate == Stats().tokens_per_second == 0.0


def test_rounds_are_counted_by_the_tokens_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round of each sequence is in the range of its own prompt and answer so far, whoever runs beside it."""
    monkeypatch.setattr("eyas.types.context_bucket", lambda tokens: tokens)
    prompts = tiny.prompts(5, 9)
    for tree in (None, "chain:3"):
        made = engine(tree, batch=2)
        for prompt, done in zip(prompts, made.generate(requests(prompts, max_tokens=8)), strict=True):
            stats = done.stats
            context = len(prompt) + done.stats.prefill_tokens
            rounds = [(at, stats.walked_by_context[at]) for at, n in enumerate(stats.rounds_by_context) if n]
            assert len(rounds) == stats.target_passes
            assert sum(accepted for _, accepted in rounds) == stats.walked
            for at, accepted in rounds:
                assert at == context
                context += accepted + 1


def test_a_one_token_prompt_offers_no_tree_in_its_first_round() -> None:
    """There is no state to draft from yet; the second round has one."""
    stats = engine("chain:3").generate(requests(tiny.prompts(1), max_tokens=8))[0].stats
    assert stats.offered_by_depth[0] == stats.target_passes - 1


def test_a_lossy_rule_labels_what_it_made() -> None:
    prompts = tiny.prompts(5)
    spec = Speculation(tiny.eagle3_drafter(), parse_tree("chain:3"))
    lossy = Engine(tiny.target(), None, spec, rule=TypicalWalk())
    row = lossy.generate(requests(prompts, max_tokens=4))[0]
    assert row.lossy
    assert row.as_dict()["lossy"] is True
    plain = Engine(tiny.target(), None, spec).generate(requests(prompts, max_tokens=4))[0]
    assert not plain.lossy
    assert "lossy" not in plain.as_dict()
    alone = Engine(tiny.target(), None, None, rule=TypicalWalk()).generate(requests(prompts, max_tokens=4))[0]
    assert not alone.lossy


class Words:
    """A tokenizer, as far as the engine needs one."""

    eos_token_id = 96

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, ids))


def test_text_comes_from_the_tokenizer() -> None:
    run = Engine(tiny.target(), Words())
    done = run.generate(requests(tiny.prompts(5), max_tokens=4))[0]
    assert done.text == " ".join(map(str, done.token_ids))
    assert run.eos_ids == ()  # the words have no chat template


def test_the_attention_of_all_rows_is_masked_in_one_pass() -> None:
    """A batch costs as many target passes as its longest sequence has tokens after the first."""
    prompts = tiny.prompts(4, 5, 6)
    run = engine(None, batch=3)
    calls = []
    verify = run.target.verify

    def counted(*args: Any) -> Any:
        calls.append(args[1])
        return verify(*args)

    try:
        run.target.verify = counted  # type: ignore[method-assign]
        run.generate(requests(prompts, max_tokens=7))
    finally:
        del run.target.verify
    assert calls == [range(3)] * 6
