"""Chats made up by the target: the same file whatever interrupts the run, filters that tell, steering left out."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from eyas.data.regenerate.journal import Answer, Reply, Take
from eyas.data.regenerate.workers import EngineAnswerer
from eyas.data.synthesize import CUT_OFF, LANGUAGE, REPETITIVE, SHORT, SynthesisRule, check_text, synthesize
from eyas.engine import Engine, Speculation
from eyas.errors import DataError, RequestError, RowError, UsageError
from eyas.targets import Target
from eyas.text.chats import Message, exchange, read_chats
from eyas.text.template import encode_chat, encode_user_turn
from eyas.tree import parse_tree
from eyas.types import SamplingParams

from .. import tiny
from ..pairs import tokenizer

PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, stop_token_ids=tuple(range(3, 300, 6)))
"""Random weights seldom end a message by themselves."""
ANY = SynthesisRule(chats=3, turns=2, min_words=1, near_duplicates=None)


def answerer(tree: str | None = None) -> EngineAnswerer:
    target = Target(tiny.build_model("llama", vocab_size=len(tokenizer())))
    drafter = tiny.eagle3_drafter(vocab_size=len(tokenizer()), draft_vocab_size=120)
    speculation = None if tree is None else Speculation(drafter, parse_tree(tree))
    return EngineAnswerer(Engine(target, tokenizer(), speculation, batch_size=3), PARAMS)


class Scripted:
    """Says what a script has for a chat's number and turn; `stop_after` replies the process is killed."""

    def __init__(self, script: Any, stop_after: int | None = None) -> None:
        self._script = script
        self._left = stop_after
        self.settings = {"answered_by": "script"}
        self.asked: list[Any] = []

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        while questions := take(4):
            for question in reversed(questions):  # in another order than asked
                if self._left is not None and len(self.asked) >= self._left:
                    raise KeyboardInterrupt
                self.asked.append(question)
                text, reason = self._script(int(question.id.rpartition("-")[2]), question.turn)
                message = Message(role=question.role, content=text)
                yield Reply(
                    Answer(
                        id=question.id,
                        turn=question.turn,
                        asked=question.digest,
                        message=message,
                        finish_reason=reason,
                        count=3,
                    )
                )


def talk(number: int, turn: int) -> tuple[str, str]:
    if turn == 0 and number % 3 == 1:
        return "Hi", "stop"
    if turn != 1 and number % 3 == 2:
        return "Why do tides come twice a day?", "stop"  # each after the first is a duplicate
    return f"Say {number} things about turn {turn}, and why {number * 7} matters.", "stop"


def test_interrupted_anywhere_the_same_bytes(tmp_path: Path) -> None:
    rule = SynthesisRule(chats=8, turns=2)
    whole = Scripted(talk)
    summary = synthesize(tmp_path / "whole.jsonl", whole, rule)
    assert summary.chats == 8
    assert summary.dropped[SHORT] > 2
    assert summary.tried > summary.chats + summary.dropped[SHORT]  # duplicates were tried as well
    asked = 0
    for number in itertools.count():
        script = Scripted(talk, stop_after=5 + number)
        try:
            synthesize(tmp_path / "parts.jsonl", script, rule)
        except KeyboardInterrupt:
            asked += len(script.asked)
            continue
        asked += len(script.asked)
        break
    assert number > 2
    assert asked == len(whole.asked)  # nothing is asked twice
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    again = Scripted(talk)
    synthesize(tmp_path / "parts.jsonl", again, rule)
    assert not again.asked
    with pytest.raises(UsageError, match="other settings"):
        synthesize(tmp_path / "parts.jsonl", again, SynthesisRule(chats=8, turns=2, seed=1))


def test_steering_is_asked_with_and_never_kept(tmp_path: Path) -> None:
    script = Scripted(talk)
    synthesize(tmp_path / "out.jsonl", script, SynthesisRule(chats=4, turns=2, topics=("owls",)))
    for question in script.asked:
        roles = [message.role for message in question.messages]
        if question.role == "user":
            assert roles[0] == "system"
            assert "owls" in question.messages[0].content
        else:
            assert "system" not in roles
    for chat in read_chats(tmp_path / "out.jsonl"):
        assert [message.role for message in chat.messages] == ["user", "assistant", "user"]


def test_too_few_good_chats_are_said_and_written(tmp_path: Path) -> None:
    def cut(number: int, turn: int) -> tuple[str, str]:
        return (talk(0, turn)[0] + str(number), "stop" if number < 2 else "length")

    with pytest.raises(DataError, match=f"only 2 of 100 chats are good.*98 x {CUT_OFF}"):
        synthesize(tmp_path / "out.jsonl", Scripted(cut), SynthesisRule(chats=5, near_duplicates=None))
    assert len(list(read_chats(tmp_path / "out.jsonl"))) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hello there", SHORT),
        ("What is it? " * 60, REPETITIVE),
        ("Wie viele Eier legt ein Falke, und wann schlüpfen die Jungen?", LANGUAGE),
        ("How many eggs does a falcon lay, and when do the chicks hatch?", None),
    ],
)
def test_filters_tell(text: str, reason: str | None) -> None:
    chat = exchange("c", text, "Three.")
    rule = SynthesisRule(chats=1, languages=("en",))
    if reason is None:
        check_text(chat, rule)
        return
    with pytest.raises(RowError) as raised:
        check_text(chat, rule)
    assert raised.value.reason == reason


def test_a_target_makes_up_chats_with_speculation_as_without(tmp_path: Path) -> None:
    files = []
    for tree in (None, "chain:3", "dynamic:3,2,5"):
        path = tmp_path / f"{tree}.jsonl"
        synthesize(path, answerer(tree), ANY)
        files.append((path.read_bytes(), path.with_name(f"{path.name}.journal").read_bytes().count(b'"answer"')))
    assert files[0][0] == files[1][0] == files[2][0]
    assert files[0][1] > 5


def test_a_users_turn_begins_where_the_template_says() -> None:
    said = [Message(role="user", content="a <|im_end|> b"), Message(role="assistant", content="c")]
    ids, end = encode_user_turn(tokenizer(), said)
    asked = (*said, Message(role="user", content="what next"))
    whole = encode_chat(tokenizer(), asked, add_generation_prompt=False)
    assert whole[: len(ids)] == ids
    rest = whole[len(ids) :]
    assert tokenizer().decode(rest[: rest.index(end)]) == "what next"
    plain = deepcopy(tokenizer())  # others share it
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(RequestError, match="plain text"):
        encode_user_turn(plain, said)
