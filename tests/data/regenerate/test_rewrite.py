"""Which turns are asked, in which context, and what the chat is in the end."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.data.regenerate.journal import Answer, AnswerTokens
from eyas.data.regenerate.rewrite import Rewrite, RewriteRule
from eyas.text.chats import Chat, Message

CODES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def call(name: str, number: str | None) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": {}}}


def chat(shape: str) -> Chat:
    """`sua` = system, user, assistant; contents are numbered."""
    messages = [{"role": CODES[letter], "content": f"{letter}{i}"} for i, letter in enumerate(shape)]
    return Chat.model_validate({"id": "c", "messages": messages})


def answered(rewrite: Rewrite, *messages: dict[str, Any], finish: str = "stop") -> list[str]:
    """What each question ended with and which turn it was, while these are the answers."""
    seen = []
    for said in [*messages, *({"content": f"new{i}"} for i in range(len(messages), 9))]:
        question = rewrite.question()
        if question is None:
            break
        seen.append(f"{question.messages[-1].content}:{question.turn}")
        message = Message.model_validate({"role": "assistant", **said})
        rewrite.take(
            Answer(id="c", turn=question.turn, asked=question.digest, message=message, finish_reason=finish, count=1)
        )
    return seen


def said(rewrite: Rewrite) -> str:
    return " ".join(message.content or "-" for message in rewrite.chat().messages)


@pytest.mark.parametrize(
    ("shape", "turns", "questions", "result"),
    [
        ("ua", "last", ["u0:0"], "u0 new0"),
        ("suaua", "last", ["u3:1"], "s0 u1 a2 u3 new0"),
        ("suaua", "all", ["u1:0", "u3:1"], "s0 u1 new0 u3 new1"),
        ("suau", "last", ["u3:1"], "s0 u1 a2 u3 new0"),  # the last turn is not the assistant's
        ("suau", "all", ["u1:0", "u3:1"], "s0 u1 new0 u3 new1"),
        ("uaaa", "last", ["u0:0"], "u0 new0"),  # one turn in three messages
        ("uaauaa", "all", ["u0:0", "u3:1"], "u0 new0 u3 new1"),
        ("saua", "all", ["u2:1"], "s0 a1 u2 new0"),  # a greeting answers nothing
        ("u", "last", ["u0:0"], "u0 new0"),
        ("uad", "last", ["d2:1"], "u0 a1 d2 new0"),
        ("a", "last", [], ""),
        ("sa", "all", [], ""),
        ("s", "all", [], ""),
    ],
)
def test_turns(shape: str, turns: Any, questions: list[str], result: str) -> None:
    rewrite = Rewrite(chat(shape), RewriteRule(turns))
    assert answered(rewrite) == questions
    assert len(rewrite.answers) == len(questions)
    if questions:
        assert said(rewrite) == result


def tooled() -> Chat:
    return Chat.model_validate(
        {
            "id": "c",
            "tools": [{"name": "f"}],
            "messages": [
                {"role": "user", "content": "u0"},
                {"role": "assistant", "tool_calls": [call("f", "1"), call("g", "2")]},
                {"role": "tool", "content": "t2", "tool_call_id": "2"},
                {"role": "tool", "content": "t1", "tool_call_id": "1"},
                {"role": "assistant", "content": "a4"},
                {"role": "user", "content": "u5"},
                {"role": "assistant", "content": "a6"},
            ],
        }
    )


def test_tool_results_follow_the_new_calls() -> None:
    rewrite = Rewrite(tooled(), RewriteRule("all"))
    questions = answered(rewrite, {"tool_calls": [call("f", "x"), call("g", "y")]})
    assert questions == ["u0:0", "t1:1", "u5:2"]
    assert said(rewrite) == "u0 - t2 t1 new1 u5 new2"
    assert [message.tool_call_id for message in rewrite.chat().messages[2:4]] == ["y", "x"]
    assert not rewrite.cut


@pytest.mark.parametrize("new", [{"content": "no call"}, {"tool_calls": [call("f", "x")]}])
def test_the_chat_ends_where_results_do_not_fit(new: dict[str, Any]) -> None:
    rewrite = Rewrite(tooled(), RewriteRule("all"))
    assert answered(rewrite, new) == ["u0:0"]
    assert rewrite.cut
    assert len(rewrite.chat().messages) == 2


def test_a_new_call_ends_the_chat_too() -> None:
    rewrite = Rewrite(tooled(), RewriteRule("all"))
    answered(rewrite, {"tool_calls": [call("f", "x"), call("g", "y")]}, {"tool_calls": [call("f", "z")]})
    assert rewrite.cut
    assert rewrite.chat().messages[-1].tool_calls is not None
    last = Rewrite(tooled(), RewriteRule("last"))
    assert answered(last, {"tool_calls": [call("f", "z")]}) == ["u5:2"]
    assert not last.cut


def test_unfinished_answers_drop_the_chat_if_asked() -> None:
    for drop in (False, True):
        rewrite = Rewrite(chat("uaua"), RewriteRule("all", drop))
        answered(rewrite, finish="length")
        assert (rewrite.dropped, len(rewrite.answers)) == (drop, 1 if drop else 2)


def test_tokens_of_every_turn_that_is_rendered_again() -> None:
    steps = [
        ((0, (1, 2), (3, 4)), ((1, 2, 3, 4), ((2, 4),))),
        ((4, (5,), (6,)), ((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))),
        ((5, (7, 8), (9,)), ((1, 2, 3, 4, 5, 7, 8, 9), ((2, 4), (7, 8)))),  # the second answer is rendered otherwise
    ]
    rewrite = Rewrite(chat("uauaua"), RewriteRule("all"))
    for i, ((kept, prompt, tokens), (row, spans)) in enumerate(steps):
        question = rewrite.question()
        assert question is not None
        assert question.held == (() if i == 0 else steps[i - 1][1][0])
        rewrite.take(
            Answer(
                id="c",
                turn=i,
                asked=question.digest,
                message=Message(role="assistant", content="x"),
                finish_reason="stop",
                count=1,
                tokens=AnswerTokens(kept=kept, prompt=prompt, answer=tokens),
            )
        )
        assert (rewrite.chat().tokens, rewrite.chat().answers) == (row, spans)
    assert rewrite.rerendered == 1
