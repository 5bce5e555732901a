"""Lookahead against a restatement of its paper's algorithm, step by step, and in the engine: it changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from eyas.drafters.weightless.lookahead import LookaheadDrafter, first_guesses
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.engine.default_tree import tree_for
from eyas.errors import UsageError
from eyas.tree import parse_tree
from eyas.types import GrammarSpec, Limits, Request, SamplingParams
from eyas.verify import TypicalWalk

from ... import pairs, tiny
from .lookahead_paper import decode_by_paper

PAPER = (15, 5, 15)
SMALL = (5, 3, 4)


def engine(sizes: tuple[int, int, int] = SMALL, name: str = "llama", **settings: object) -> Engine:
    target = tiny.target(name)
    drafter = LookaheadDrafter(target.device, target.vocab_size, *sizes)
    return Engine(target, None, Speculation(drafter, tree_for(drafter, None)), **settings)  # type: ignore[arg-type]


def repetitive(*lengths: int, scale: int = 8) -> list[list[int]]:
    """Prompts of few distinct tokens."""
    return [[3 + token % scale for token in prompt] for prompt in tiny.prompts(*lengths)]


def requests(tokens: int, temperature: float = 0.0) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True))
        for i, prompt in enumerate(repetitive(13, 1, 20, 5, 9))
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("sizes", [SMALL, PAPER, (3, 4, 1), (1, 3, 2)])
def test_every_step_accepts_what_the_papers_algorithm_accepts(sizes: tuple[int, int, int]) -> None:
    model, same = (tiny.build_model("llama", scale=5.0) for _ in range(2))  # it repeats itself, as text does
    tokens, accepted = 60, 0
    target = tiny.Target(same)
    drafter = LookaheadDrafter(target.device, target.vocab_size, *sizes)
    ours = Engine(target, None, Speculation(drafter, tree_for(drafter, None)))
    for prompt in repetitive(13, 1, 20):
        chunks = list(ours.stream([Request(tuple(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True))]))
        done = chunks[-1].completion
        assert done is not None
        steps = [len(chunk.token_ids) for chunk in chunks]
        known = len(prompt) > 1  # then the first token came with the prompt
        text = prompt + done.token_ids[:known]
        guesses = first_guesses(prompt, sizes[0] + sizes[1] - 3)
        answer, lengths = decode_by_paper(model, text, guesses, sizes, tokens - known)
        assert answer[: tokens - known] == done.token_ids[known:]
        assert steps[known:-1] == lengths[:-1]
        assert len(steps) - known == len(lengths)
        accepted += done.stats.walked
    assert accepted > 0


@pytest.mark.parametrize(("temperature", "sizes", "batch"), tiny.sample([0.0, 0.7, 1.0], [SMALL, PAPER], [1, 4]))
def test_output_is_that_of_plain_decoding(temperature: float, sizes: tuple[int, int, int], batch: int) -> None:
    asked = requests(16, temperature)
    plain = [done.token_ids for done in Engine(tiny.target(), batch_size=batch).generate(asked)]
    made = engine(sizes, limits=Limits(max_running=batch, prefix_tokens=256))
    for _ in range(2):  # the second time with prefixes from the cache
        done = made.generate(asked)
        assert [one.token_ids for one in done] == plain
        made.check_invariants()
    if temperature == 0.0:
        assert sum(one.stats.walked for one in done) > 0


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "deepseek3"])
def test_output_is_that_of_plain_decoding_on_other_architectures(name: str) -> None:
    asked = requests(16)
    plain = [done.token_ids for done in Engine(tiny.target(name), batch_size=4).generate(asked)]
    assert [done.token_ids for done in engine(SMALL, name, batch_size=4).generate(asked)] == plain


def test_nothing_changes_for_sequences_that_are_preempted() -> None:
    asked = requests(16, 0.7)
    plain = [done.token_ids for done in Engine(tiny.target(), batch_size=8).generate(asked)]
    made = engine(batch_size=4)
    answers = [list[int]() for _ in asked]
    for request in asked:
        made.submit(request)
    steps = 0
    while not made.idle:
        if steps == 8:  # as after an interrupted step
            made._core.runner.slots.intact = False
            made._core.scheduler.preempt(made._core.scheduler.running.sequences)
        for chunk in made.step():
            answers[chunk.index] += chunk.token_ids
        steps += 1
    assert answers == plain
    assert made.state().preempted_total > 0
    made.check_invariants()


def test_nothing_changes_at_the_contexts_end() -> None:
    target = tiny.target()
    assert target.max_length is not None
    prompt = tuple(repetitive(target.max_length - 9)[0])
    asked = [Request(prompt, SamplingParams(max_tokens=64, ignore_eos=True))]
    (plain,) = Engine(target).generate(asked)
    (done,) = engine(PAPER).generate(asked)
    assert len(done.token_ids) == 9
    assert done.token_ids == plain.token_ids


def test_nothing_changes_under_a_grammar_which_has_no_say_in_the_window() -> None:
    pytest.importorskip("llguidance")
    target = tiny.Target(tiny.build_model("llama", vocab_size=len(pairs.tokenizer())))
    spec = GrammarSpec("regex", r"[0-9]{1,3}(\.[0-9]{1,3}){3}( +[a-z]+)*")
    asked = [
        Request(tuple(prompt), SamplingParams(max_tokens=30, temperature=heat, seed=i), grammar=held)
        for i, (prompt, heat, held) in enumerate(
            zip(repetitive(7, 4, 9, 5), (0.0, 0.8) * 2, (spec, spec, None, spec), strict=True)
        )
    ]
    plain = [done.token_ids for done in Engine(target, pairs.tokenizer(), batch_size=4).generate(asked)]
    drafter = LookaheadDrafter(target.device, target.vocab_size, *SMALL)
    speculation = Speculation(drafter, tree_for(drafter, None))
    made = Engine(target, pairs.tokenizer(), speculation, batch_size=4)
    for index, request in enumerate(asked):
        assert made.submit(request) == index
    answers: dict[int, list[int]] = {index: [] for index in range(len(asked))}
    ran = 0
    while not made.idle:
        for chunk in made.step():
            answers[chunk.index] += chunk.token_ids
        if made.outcome is not None and made.outcome.draft is not None:
            scratch, valid = made.outcome.draft.tree.scratch, made.outcome.draft.tree.valid
            assert scratch is not None
            ran += int((scratch & valid).sum())
            assert made.outcome.pass_tokens == len(made.outcome.tokens) + int(valid.sum())
    assert list(answers.values()) == plain
    assert ran > 0


@pytest.mark.parametrize("rule", [None, TypicalWalk()])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_scratch_nodes_are_never_emitted_nor_counted(rule: TypicalWalk | None, temperature: float) -> None:
    made = engine(PAPER, batch_size=4, rule=rule)
    asked = [replace(request, trace=True) for request in requests(20, temperature)]
    for request in asked:
        made.submit(request)
    scratch_nodes = 0
    while not made.idle:
        chunks = {chunk.index: chunk for chunk in made.step()}
        if made.outcome is None or made.outcome.draft is None:
            continue
        tree, paths = made.outcome.draft.tree, made.outcome.draft.paths
        assert tree.scratch is not None
        scratch_nodes += int(tree.scratch.sum())
        for row, path in enumerate(paths):
            assert not any(tree.scratch[row, node - 1] for node in path[1:])
            assert made.outcome.nodes[row] == int((tree.valid & ~tree.scratch)[row].sum())
            assert made.outcome.offered[row] <= PAPER[1] - 1
        assert all(chunk.draft is None or len(chunk.draft.tokens) in made.outcome.nodes for chunk in chunks.values())
    assert scratch_nodes > 0


def test_plain_rounds_in_between_leave_a_window_that_works() -> None:
    """Rows that don't speculate, and rounds for which there is no room, draft nothing."""
    asked = [replace(request, speculate=i % 2 == 0) for i, request in enumerate(requests(16))]
    plain = [done.token_ids for done in Engine(tiny.target(), batch_size=8).generate(asked)]
    made = engine(batch_size=4)
    tree = made.speculation.tree  # type: ignore[union-attr]
    chunks = list[tuple[int, Sequence[int]]]()
    for request in asked:
        made.submit(request)
    while not made.idle:
        made._core.runner.planner.tree = tree if len(chunks) % 3 else None
        chunks += [(chunk.index, chunk.token_ids) for chunk in made.step()]
    assert [[t for i, tokens in chunks if i == index for t in tokens] for index in range(len(asked))] == plain


def test_a_slot_remembers_nothing_of_the_sequence_before() -> None:
    asked = requests(16)
    made = engine()
    first = made.generate(asked)
    second = made.generate(asked)
    assert [one.stats.accepted_histogram for one in first] == [one.stats.accepted_histogram for one in second]


def test_other_trees_are_refused_and_so_are_its_trees_for_others() -> None:
    drafter = LookaheadDrafter(torch.device("cpu"), tiny.VOCAB)
    with pytest.raises(UsageError, match="for the method lookahead"):
        tree_for(drafter, parse_tree("chain:4"))
    with pytest.raises(UsageError, match="for the method lookahead"):
        tree_for(tiny.eagle3_drafter(), parse_tree("lookahead:5,3,4"))
    with pytest.raises(UsageError, match="lookahead has a window: write `tree=auto`"):
        make_controller(tiny.target(), drafter, "auto:chain", 1)
    with pytest.raises(UsageError, match="ngram must be at least 3"):
        LookaheadDrafter(torch.device("cpu"), tiny.VOCAB, 5, 2, 4)
