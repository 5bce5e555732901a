"""Copies, the same question, and the questions of evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.data.chats.duplicates import Duplicates, Evaluations, normalized, question_key
from eyas.errors import DataError, RowError
from eyas.text.chats import Chat, Message, exchange

from ...pairs import write_rows


def reason(check: Any, chat: Chat) -> str | None:
    try:
        check(chat)
    except RowError as error:
        return error.reason
    return None


def test_texts_are_compared_normalized() -> None:
    assert normalized("  What\tIS\n\nthis? ") == "what is this?"
    assert normalized("ﬁne Stra\u00dfe \u212b") == normalized("FINE STRASSE \u00c5")
    assert normalized("x==1") != normalized("x!=1")


def test_the_first_of_equals_stays() -> None:
    seen = Duplicates()
    assert reason(seen.check, exchange("a", "What?", "This.")) is None
    assert reason(seen.check, exchange("b", "What?", "This.")) == "exact duplicate"
    assert reason(seen.check, exchange("c", " WHAT?", "That.")) == "same prompt as another chat"
    assert reason(seen.check, exchange("d", "What!", "This.")) is None
    system = Message(role="system", content="Be brief.")
    two = exchange("e", "What?", "This.")
    with_system = two.model_copy(update={"messages": (system, *two.messages)})
    assert reason(seen.check, with_system) is None  # another prompt
    assert question_key(with_system) == question_key(two)
    tools = two.model_copy(update={"tools": ({"type": "function", "function": {"name": "f"}},)})
    assert reason(seen.check, tools) is None
    longer = two.model_copy(update={"messages": (*two.messages, Message(role="user", content="And?"))})
    assert reason(seen.check, longer) is None
    assert reason(seen.check, longer) == "exact duplicate"


def test_evaluation_questions_are_found_in_any_turn(tmp_path: Path) -> None:
    rows = [
        {"turns": ["Why is the sky blue?", "And at night?"]},
        {"prompt": "raw"},
        {"messages": [{"role": "user", "content": "chat"}]},
    ]
    evaluations = Evaluations([write_rows(tmp_path / "eval.jsonl", rows)])
    assert reason(evaluations.check, exchange("a", "why is  the SKY blue?", "x")) == "question of an evaluation file"
    later = exchange("b", "Hello", "Hi").messages + exchange("b", "and at night?", "Dark.").messages
    assert reason(evaluations.check, Chat(id="b", messages=later)) is not None
    for text in ("raw", "chat"):
        assert reason(evaluations.check, exchange("c", text, "x")) is not None
    assert reason(evaluations.check, exchange("d", "Why is the sea blue?", "Why is the sky blue?")) is None
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        Evaluations([write_rows(tmp_path / "bad.jsonl", ["{"])])
    with pytest.raises(DataError, match="give the prompt as text"):
        Evaluations([write_rows(tmp_path / "ids.jsonl", [{"token_ids": [1]}])])
