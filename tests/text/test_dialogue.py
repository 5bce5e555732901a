"""Rows being answered: turns build on answers, and what can't run leaves an error, not an exception."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from eyas.errors import RequestError
from eyas.text.chats import Message
from eyas.text.dialogue import Dialogue, converse, empty_answers
from eyas.text.prompts import BadRow, PromptRow
from eyas.text.template import encode_chat, encode_text
from eyas.types import Chunk, Completion, Request, SamplingParams, Stats

from ..pairs import tokenizer

PARAMS = SamplingParams(max_tokens=3)


class Parrot:
    """An engine that answers `yes`, takes at most `room` tokens, and finishes the last request first."""

    def __init__(self, room: int = 10_000) -> None:
        self.room = room
        self.tokenizer = tokenizer()
        self.calls: list[list[Request]] = []

    def check(self, request: Request) -> None:
        if len(request.prompt) > self.room:
            raise RequestError("too long")

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        self.calls.append(list(requests))
        for index in reversed(range(len(requests))):
            stats = Stats(tokens=2, target_passes=2, decode_seconds=0.5)
            yield Chunk(index, (5, 6), 0, Completion(requests[index].id, [5, 6], "yes", "length", stats))


def answer(engine: Any, *rows: PromptRow | BadRow) -> list[Dialogue]:
    dialogues = [Dialogue(row) for row in rows]
    for dialogue, chunk in converse(engine, dialogues, PARAMS):
        assert chunk.completion is dialogue.completions[-1]
    return dialogues


def prompts(dialogue: Dialogue) -> list[tuple[int, ...]]:
    return [request.prompt for request in dialogue.requests]


def said(*words: str) -> tuple[int, ...]:
    roles = ("user", "assistant") * len(words)
    return encode_chat(tokenizer(), [Message(role=r, content=w) for r, w in zip(roles, words, strict=False)])  # type: ignore[arg-type]


def test_each_answer_goes_into_the_chat_of_the_next_turn() -> None:
    engine = Parrot()
    two, one = answer(engine, PromptRow("a", "f:1", turns=("first", "second")), PromptRow("b", "f:2", prompt="x"))
    assert [[request.id for request in call] for call in engine.calls] == [["a", "b"], ["a"]]
    assert prompts(two) == [said("first"), said("first", "yes", "second")]
    assert all(request.params is PARAMS for call in engine.calls for request in call)
    assert (len(two.completions), len(one.completions), two.open) == (2, 1, False)
    assert (two.stats().tokens, two.stats().decode_seconds) == (4, 1.0)
    row = two.as_dict()
    assert list(row) == ["id", "turns", "stats"]
    assert [turn["text"] for turn in row["turns"]] == ["yes", "yes"]
    assert row["stats"]["tokens"] == 4
    assert one.as_dict()["token_ids"] == [5, 6]


def test_a_chat_is_continued_and_ids_are_taken_as_they_are() -> None:
    chat, ids = answer(
        Parrot(),
        PromptRow("a", "f:1", messages=(Message(role="user", content="first"),)),
        PromptRow("b", "f:2", token_ids=(7, 8)),
    )
    assert prompts(chat) == [said("first")]
    assert prompts(ids) == [(7, 8)]


def test_a_prompt_is_what_a_user_says_unless_it_is_raw() -> None:
    chat, raw = answer(Parrot(), PromptRow("a", "f:1", prompt="x"), PromptRow("b", "f:2", prompt="x", raw=True))
    assert prompts(chat) == [said("x")]
    assert prompts(raw) == [encode_text(tokenizer(), "x")]
    assert [dialogue.requests[0].chat for dialogue in (chat, raw)] == [True, False]


def test_without_a_chat_template_or_tokenizer() -> None:
    bare = Parrot()
    none = Parrot()
    bare.tokenizer = copy(tokenizer())
    none.tokenizer = None
    bare.tokenizer.chat_template = None
    (text,) = answer(bare, PromptRow("a", "f:1", prompt="x"))
    assert prompts(text) == [encode_text(tokenizer(), "x")]
    chat, text, ids = answer(
        none,
        PromptRow("a", "f:1", turns=("x",)),
        PromptRow("b", "f:2", prompt="x"),
        PromptRow("c", "f:3", token_ids=(7,)),
    )
    assert "has no tokenizer files" in str(chat.error)
    assert "has no tokenizer files" in str(text.error)
    assert prompts(ids) == [(7,)]


def test_empty_answers_to_raw_text_are_counted() -> None:
    rows = [PromptRow("a", "f:1", prompt="x", raw=True), PromptRow("b", "f:2", prompt="x")]
    dialogues = answer(Parrot(), *rows)
    assert empty_answers(dialogues, tokenizer()) is None
    for dialogue in dialogues:
        dialogue.completions[0].text = " "
    assert str(empty_answers(dialogues, tokenizer())).startswith("1 of 2 answers are empty")
    assert empty_answers(dialogues, None) is None


def test_what_cannot_run_is_named_and_the_others_run() -> None:
    engine = Parrot(room=len(said("first")))
    bad, late, good = answer(
        engine,
        BadRow("1", "f:1: broken"),
        PromptRow("2", "f:2", turns=("first", "again")),
        PromptRow("3", "f:3", prompt="x"),
    )
    assert (bad.error, bad.completions, bad.as_dict()) == ("f:1: broken", [], {"id": "1", "error": "f:1: broken"})
    assert late.error == "f:2: too long"
    assert (len(late.completions), len(late.requests)) == (1, 1)
    assert late.as_dict()["error"] == "f:2: too long"
    assert len(late.as_dict()["turns"]) == 1
    assert (good.error, len(good.completions)) == (None, 1)
    assert [[request.id for request in call] for call in engine.calls] == [["2", "3"], []]


def test_what_a_row_predicts_goes_with_its_request() -> None:
    rows = [PromptRow("a", "a:1", prompt="Hi", prediction="yes and no"), PromptRow("b", "b:1", prompt="Hi")]
    predicted, plain = (Dialogue(row).next_request(Parrot(), PARAMS) for row in rows)  # type: ignore[arg-type]
    assert predicted is not None
    assert plain is not None
    assert tokenizer().decode(predicted.prediction) == "yes and no"
    assert plain.prediction == ()
