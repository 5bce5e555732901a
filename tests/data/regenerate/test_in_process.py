"""The engine's answers: those of `engine.generate`, to the token, with and without a drafter, in whatever order."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate import RewriteRule, regenerate
from eyas.data.regenerate.rewrite import Rewrite
from eyas.data.regenerate.workers import EngineAnswerer
from eyas.data.tokens.tokenize import tokenize_chat
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.text.chats import Chat, Message, read_chats, write_chats
from eyas.text.template import encode_chat
from eyas.tree import parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import TypicalWalk

from ... import tiny
from ...pairs import tokenizer

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)


@cache
def target() -> Target:
    return Target(tiny.build_model("llama", vocab_size=len(tokenizer())))


def engine(tree: str | None = None, batch: int = 1, **more: Any) -> Engine:
    drafter = tiny.eagle3_drafter(vocab_size=len(tokenizer()), draft_vocab_size=120)
    speculation = None if tree is None else Speculation(drafter, parse_tree(tree))
    return Engine(target(), tokenizer(), speculation, batch_size=batch, **more)


def talk(count: int, turns: int = 1) -> list[Chat]:
    words = ["add", "clips in May", "return a + b", "48/2", "def"]
    chats = []
    for i in range(count):
        messages = [
            Message(role=role, content=f"{words[(i + t) % 5]} {i} {t}")  # type: ignore[arg-type]
            for t in range(turns)
            for role in ("user", "assistant")
        ]
        chats.append(Chat(id=f"c{i}", messages=tuple(messages)))
    return chats


def generated(chats: list[Chat]) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...], str]]:
    """Tokens, span and text of each chat's last answer, one request at a time, without regeneration's machinery."""
    plain = engine()
    found = []
    for chat in chats:
        prompt = encode_chat(tokenizer(), chat.messages[:-1])
        question = Rewrite(chat, RewriteRule()).question()
        assert question is not None
        params = PARAMS.model_copy(update={"seed": question.seed(PARAMS.seed)})
        (done,) = plain.generate([Request(prompt, params, chat=True)])
        tokens = (*prompt, *done.token_ids)
        found.append((tokens, ((len(prompt), len(tokens)),), done.text))
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(("tree", "batch"), [(None, 1), (None, 3), ("chain:3", 1), ("dynamic:3,2,5", 4)])
def test_answers_equal_generate(tmp_path: Path, tree: str | None, batch: int) -> None:
    chats = talk(9)
    write_chats(tmp_path / "in.jsonl", chats)
    stats = []
    summary = regenerate(
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        EngineAnswerer(engine(tree, batch), PARAMS),
        watch=lambda tally: stats.append(replace(tally.stats)),
    )
    made = list(read_chats(tmp_path / "out.jsonl"))
    assert [(chat.tokens, chat.answers, chat.messages[-1].content) for chat in made] == generated(chats)
    assert [chat.messages[:-1] for chat in made] == [chat.messages[:-1] for chat in chats]
    assert len({chat.tokens for chat in made}) == 9
    assert summary.tokens == sum(tokenize_chat(tokenizer(), chat).loss_mask.sum() for chat in made)
    assert stats[-1].tokens == summary.tokens
    assert (stats[-1].drafted_depth > 0) == (tree is not None)


@pytest.mark.every(2)
@pytest.mark.parametrize("tree", [None, "chain:3"])
def test_all_turns_equal_asking_one_by_one(tmp_path: Path, tree: str | None) -> None:
    chats = talk(5, turns=3)
    write_chats(tmp_path / "in.jsonl", chats)
    regenerate(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", EngineAnswerer(engine(tree, 3), PARAMS), RewriteRule("all")
    )
    plain = engine()
    for old, new in zip(chats, read_chats(tmp_path / "out.jsonl"), strict=True):
        rewrite = Rewrite(old, RewriteRule("all"))
        messages = list[Message]()
        last = tuple[int, ...]()
        for turn in range(3):
            messages.append(old.messages[2 * turn])
            prompt = encode_chat(tokenizer(), messages)
            question = rewrite.question()
            assert question is not None
            seed = replace(question, turn=turn).seed(PARAMS.seed)
            (done,) = plain.generate([Request(prompt, PARAMS.model_copy(update={"seed": seed}), chat=True)])
            messages.append(Message(role="assistant", content=done.text))
            last = (*prompt, *done.token_ids)
        assert new.messages == tuple(messages)
        assert new.tokens == last
        assert new.answers is not None
        assert new.answers[-1] == (len(prompt), len(last))


def test_what_cannot_be_asked_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    chats = [*talk(2), Chat(id="long", messages=(Message(role="user", content="x " * 400),))]
    chats += [Chat(id="mute", messages=(Message(role="assistant", content="hello"),)), *talk(4)[2:], *talk(1)]
    write_chats(tmp_path / "in.jsonl", chats)
    with (tmp_path / "in.jsonl").open("ab") as out:
        out.write(b'{"id": "x", "messages": [{"role": "robot", "content": "a"}]}\n\xff\xfe\n')
    run = lambda: regenerate(  # noqa: E731
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", EngineAnswerer(engine(batch=2), PARAMS)
    )
    summary = run()
    assert [chat.id for chat in read_chats(tmp_path / "out.jsonl")] == ["c0", "c1", "c2", "c3"]
    ((name, reason),) = summary.unanswered
    assert name == "long"
    assert "the model's context holds 256" in reason
    assert summary.nothing_to_answer == 1
    assert [problem.split(": ")[1] for problem in summary.unreadable[1:]] == ["messages.0.role", "row"]
    assert "several chats have the id c0" in summary.unreadable[0]
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run() == summary
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_template_that_refuses_most_chats_stops_nothing(tmp_path: Path) -> None:
    chats = [Chat(id=f"bad{i}", messages=(Message(role="user", content="BAD"),)) for i in range(60)]
    write_chats(tmp_path / "in.jsonl", [*chats, *talk(1)])
    strict = engine()
    strict.tokenizer = deepcopy(tokenizer())
    strict.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'BAD' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    summary = regenerate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", EngineAnswerer(strict, PARAMS))
    assert (summary.chats, len(summary.unanswered)) == (1, 60)
    assert summary.unanswered[0] == ("bad0", "the chat template refuses this chat: no")
    strict.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        EngineAnswerer(strict, PARAMS)


def test_unfinished_answers_are_kept_or_dropped(tmp_path: Path) -> None:
    write_chats(tmp_path / "in.jsonl", talk(6))
    answerer = EngineAnswerer(
        engine(batch=2), PARAMS.model_copy(update={"stop_token_ids": tuple(range(0, len(tokenizer()), 12))})
    )
    kept = regenerate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", answerer)
    assert 0 < kept.unfinished < 6
    dropped = regenerate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", answerer, RewriteRule("last", True))
    assert dropped.chats + dropped.dropped == 6
    assert (dropped.dropped, dropped.unfinished) == (kept.unfinished, 0)


def test_more_chats_may_come_later(tmp_path: Path) -> None:
    """The input grew: what was answered stays, in the new order."""
    batches: list[int] = []
    for chats in (talk(3), [*reversed(talk(5))]):
        write_chats(tmp_path / "in.jsonl", chats)
        counts: list[int] = []
        regenerate(
            tmp_path / "in.jsonl",
            tmp_path / "out.jsonl",
            EngineAnswerer(engine(), PARAMS),
            watch=lambda tally, counts=counts: counts.append(tally.answers),  # type: ignore[misc]
        )
        batches.append(len(counts))
        assert [chat.id for chat in read_chats(tmp_path / "out.jsonl")] == [chat.id for chat in chats]
    assert batches == [3, 2]


def test_only_the_targets_own_answers() -> None:
    lossy = engine("chain:2", rule=TypicalWalk())
    with pytest.raises(UsageError, match="lossless"):
        EngineAnswerer(lossy, PARAMS)
