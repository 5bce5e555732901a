"""Turns that reuse the cache answer like turns that don't, with less prefill."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.engine import Engine, Speculation
from eyas.text.dialogue import Conversation
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny


def engine(tree: str | None) -> Engine:
    spec = None if tree is None else Speculation(tiny.eagle3_drafter(scale=4.0), parse_tree(tree))
    return Engine(tiny.target("olmo3"), None, spec)


def ask(conversation: Conversation, prompt: list[int], **params: Any) -> Completion:
    chunks = list(conversation.turn(Request(tuple(prompt), SamplingParams(max_tokens=10, **params))))
    assert chunks[-1].completion is not None
    return chunks[-1].completion


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill was given."""
    counts: list[int] = []
    target = tiny.target("olmo3")
    prefill = target.prefill_to_end

    def counting(cache: Any, rows: range, tokens: Any, *args: Any) -> Any:
        counts.append(len(tokens[0]))
        return prefill(cache, rows, tokens, *args)

    monkeypatch.setattr(target, "prefill_to_end", counting)
    return counts


@pytest.mark.every(3)
@pytest.mark.parametrize("tree", [None, "chain:4", "dynamic:4,3,8"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_equal_fresh_runs_and_prefill_only_what_is_new(
    tree: str | None, temperature: float, prefilled: list[int]
) -> None:
    talk = Conversation(engine(tree))
    first, *more = tiny.prompts(12, 5, 7)
    prompt = list(first)
    for new in more:
        answer = ask(talk, prompt, temperature=temperature)
        fresh = ask(Conversation(engine(tree)), prompt, temperature=temperature)
        assert answer.token_ids == fresh.token_ids
        # the same drafts too: what the drafter kept is what it would have learned
        assert answer.stats.accepted_histogram == fresh.stats.accepted_histogram
        prompt = [*prompt, *answer.token_ids, *new]
    assert prefilled[0] == prefilled[1] == 12
    assert prefilled[2] <= 5 + 2  # the new tokens and the two that tie them to the kept ones
    assert prefilled[3] == 12 + 10 + 5


@pytest.mark.every(2)
@pytest.mark.parametrize("tree", [None, "dynamic:4,3,8"])
def test_an_edited_history_is_cut_where_it_differs(tree: str | None, prefilled: list[int]) -> None:
    prompt = tiny.prompts(20)[0]
    for place in (0, 1, 7, 19):
        edited = [*prompt[:place], (prompt[place] + 1) % tiny.VOCAB, *prompt[place + 1 :]]
        talk = Conversation(engine(tree))
        ask(talk, prompt)
        answer = ask(talk, edited)
        fresh = ask(Conversation(engine(tree)), edited)
        assert answer.token_ids == fresh.token_ids
        assert answer.stats.accepted_histogram == fresh.stats.accepted_histogram
        assert prefilled[-2] == 20 - max(0, place - 1)


@pytest.mark.every(2)
@pytest.mark.parametrize("length", [20, 12, 3, 2, 1])
def test_asking_the_same_again_drafts_from_the_right_state(length: int) -> None:
    """The prompt is a prefix of what is held: the drafter's last state must be the prompt's, not the answer's."""
    prompt = tiny.prompts(20)[0]
    talk = Conversation(engine("chain:4"))
    ask(talk, prompt)
    fresh = Conversation(engine("chain:4"))
    assert first_draft(talk, prompt[:length]) == first_draft(fresh, prompt[:length])


def first_draft(talk: Conversation, prompt: list[int]) -> list[int]:
    """The tokens of the first tree drafted in a turn."""
    drafter = talk._engine.speculation.drafter
    seen: list[list[int]] = []
    draft = drafter.draft

    def watched(*args: Any) -> Any:
        tree = draft(*args)
        seen.append((tree.tokens * tree.valid)[0].tolist())
        return tree

    drafter.draft = watched
    ask(talk, prompt)
    del drafter.draft
    return seen[0]


def test_a_turn_left_half_way_serves_the_next(prefilled: list[int]) -> None:
    prompt = tiny.prompts(12)[0]
    talk = Conversation(engine("chain:4"))
    turn = talk.turn(Request(tuple(prompt), SamplingParams(max_tokens=10)))
    next(turn)
    turn.close()
    answer = ask(talk, prompt)
    assert prefilled == [12, 2]
    assert answer.token_ids == ask(Conversation(engine(None)), prompt).token_ids


def test_a_stop_inside_an_accepted_path_does_not_leak_into_the_next_turn() -> None:
    """The cache holds tokens past the stop; they are no part of the conversation."""
    target = tiny.target("olmo3")
    prompt = tiny.prompts(12)[0]
    tokens = tiny.continuation(target.model, prompt, 12)
    oracle = tiny.OracleDrafter([prompt + tokens], (1, 2, 4), omit=0.0)
    made = Engine(target, None, Speculation(oracle, parse_tree("chain:6")))
    talk = Conversation(made)
    answer = ask(talk, prompt, stop_token_ids=(tokens[2],))
    cut = tokens.index(tokens[2]) + 1
    assert answer.token_ids == tokens[:cut]
    longer = [*prompt, *tokens[:cut], 50, 51]
    made.speculation.drafter._sequences = [longer + tiny.continuation(target.model, longer, 12)]
    assert ask(talk, longer).token_ids == tiny.continuation(target.model, longer, 10)


def test_conversations_share_an_engine(prefilled: list[int]) -> None:
    """And its other requests run beside their turns."""
    run = Engine(tiny.target("olmo3"), None, engine("chain:4").speculation, batch_size=2)
    first = Conversation(run)
    second = Conversation(run)
    prompt, other = tiny.prompts(40, 30)
    alone = ask(Conversation(engine(None)), prompt)
    aside = run.stream([Request(tuple(other), SamplingParams(max_tokens=10))])
    next(aside)
    assert ask(first, prompt).token_ids == ask(second, prompt).token_ids == alone.token_ids
    assert list(aside)[-1].completion.token_ids == tiny.continuation(run.target.model, other, 10)
    assert prefilled == [40, 30, 40, 2]
    run.check_invariants()
