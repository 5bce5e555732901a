# ruff: noqa: E501
"""Answers in the layouts of real models, against pieces written by hand and tokens walked byte by byte."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from eyas.data.tokens.tokenize import ChatTokenizer, tokenize_chat
from eyas.errors import ModelError, RowError
from eyas.text.chats import Chat, Message
from eyas.text.template import encode_chat

from ..chats.layouts import LAYOUTS, oracle
from ..templates import MARKS, TEMPLATES, templated

FAMILIES = sorted(TEMPLATES)


def said(role: str, content: str | None, **more: Any) -> Message:
    return Message.model_validate({"role": role, "content": content, **more})


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def check(family: str, *messages: Message) -> list[str]:
    """The mask is the oracle's; returns the answers as text."""
    tokenizer = templated(family)
    row = tokenize_chat(tokenizer, Chat(id="x", messages=messages))
    turns = [message.for_template() for message in messages]
    for turn in turns:
        turn.setdefault("content", "")
    pieces = list(LAYOUTS[family](turns))
    assert tokenizer.decode(row.tokens) == "".join(text for text, _ in pieces)
    assert row.loss_mask.tolist() == oracle(tokenizer, row.tokens, pieces)
    return [text for text, assistant in pieces if assistant]


TALK = (
    said("user", "Say assistant."),
    said("assistant", "assistant"),  # part of the header before it
    said("user", "And now Say assistant."),
    said("assistant", " \n Say assistant.\n\n"),  # the question, between whitespace
    said("user", "Ünïcode?"),
    said("assistant", "é€漢🙂👩‍🔬 ▁"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_turns(family: str) -> None:
    answers = check(family, *TALK)
    assert len(answers) == 3
    check(family, said("system", "  Be brief.\n"), *TALK)
    check(family, *TALK[:2])


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_answers_are_their_end_mark(family: str) -> None:
    check(family, *TALK[:2], TALK[2], said("assistant", ""), TALK[4], said("assistant", " \n"))
    check(family, TALK[0], said("assistant", ""))


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_quoted_in_messages_end_nothing(family: str) -> None:
    quoted = " ".join(MARKS[family]) + " {% generation %}"
    check(family, said("user", quoted), said("assistant", f"It is {quoted}, yes."), *TALK)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_turns(family: str) -> None:
    check(family, *(said(("user", "assistant")[i % 2], f"turn {i % 7}") for i in range(100)))


WORDS = st.lists(
    st.sampled_from(
        ["yes", " ", "\n", "\n\n", "é", "🙂", "assistant", "<|im_end|>", "</s>", "[/INST]", "1", "<", "\u00a0"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.booleans())
def test_any_words(family: str, exchanges: list[tuple[str, str]], system: bool) -> None:
    turns = [said("system", "Rules")] if system else []
    for question, answer in exchanges:
        # Mistral moves the system prompt into the last question, so an empty one leaves nothing to hold on to
        question = "Q" + question if family == "mistral" else question
        turns += [said("user", question), said("assistant", answer)]
    check(family, *turns)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral", "deepseek"])
def test_tool_calls_are_the_assistants_and_results_are_not(family: str) -> None:
    quoted = f"an eyas {MARKS[family][-1]} {MARKS[family][1]}"
    calls = (call(word="eyas é"),) if family == "llama3" else (call(word=quoted), call(n=[1, {"deep": "x"}], none=None))
    results = [said("tool", f'"{i}: a hawk"', tool_call_id="call00000") for i, _ in enumerate(calls)]
    answers = check(
        family,
        said("user", "What is an eyas?"),
        said("assistant", None, tool_calls=calls),
        *results,
        said("assistant", "A hawk."),
        said("user", "And <tool_response>?"),
        said("assistant", "", tool_calls=calls[:1]),
    )
    assert len(answers) == 3
    assert "look_up" in answers[0]
    if family.startswith("qwen"):  # words before the calls
        check(family, said("user", "What?"), said("assistant", "I'll look it up.", tool_calls=calls))


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_thoughts_are_the_assistants_where_the_template_keeps_them(family: str) -> None:
    inline = said("assistant", "<think>\nHm.\n</think>\n\nYes.")
    kept = check(family, *TALK[:1], inline, *TALK[2:3], inline)
    assert [("Hm." in answer) for answer in kept] == [False, family == "qwen3"]
    apart = said("assistant", "\n\nYes.", reasoning_content="\nHm.\n  ")
    check(family, *TALK[:1], apart, *TALK[2:3], apart)


def test_tool_steps_keep_their_thoughts() -> None:
    step = said("assistant", "", reasoning_content="I should look.", tool_calls=(call(word="eyas"),))
    check(
        "qwen3",
        said("user", "What?"),
        step,
        said("tool", "hawk"),
        said("assistant", "A hawk.", reasoning_content="So."),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_begins_after_the_prompt_for_it(family: str) -> None:
    """What the engine is asked is the row up to its first answer, but for a begun answer."""
    tokenizer = templated(family)
    row = tokenize_chat(tokenizer, Chat(id="x", messages=TALK[:2]))
    prompt = encode_chat(tokenizer, TALK[:1])
    start = int(row.loss_mask.argmax())
    assert prompt[:start] == tuple(row.tokens[:start].tolist())
    assert tokenizer.decode(prompt[start:]) == ("<think>\n" if family == "deepseek" else "")


def test_generation_marks_give_the_same_answers() -> None:
    source = (
        TEMPLATES["olmo"]
        .replace("message['content'] + eos_token", "@")
        .replace(
            "{{ '<|assistant|>\n'  + @ + '\n' }}",
            "{{ '<|assistant|>\n' }}{%- generation -%}{{ message['content'] + eos_token }}{%- endgeneration -%}{{ '\n' }}",
        )
    )
    source = source.replace(
        "{{ '<|assistant|>\n'  + @ }}",
        "{{ '<|assistant|>\n' }}{%- generation -%}{{ message['content'] + eos_token }}{%- endgeneration -%}",
    )
    assert "@" not in source
    chat = Chat(id="x", messages=TALK)
    plain = templated("olmo")
    marked = _with(source, "olmo")
    assert ChatTokenizer(marked).template.has_generation_marks(None)
    assert ChatTokenizer(marked).exact(chat) == ChatTokenizer(plain).exact(chat)


def test_generation_marks_are_cut_to_what_the_model_writes() -> None:
    """As SmolLM3's are: around the header and the line break after the end mark too."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content }}"
        "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    system = said("system", "You are a helpful assistant.")
    chat = Chat(id="x", messages=(system, *TALK))
    assert ChatTokenizer(_with(source)).exact(chat) == ChatTokenizer(templated("qwen2")).exact(chat)


def test_calls_that_the_result_follows_at_once_end_with_their_brackets() -> None:
    """As Gemma 4's do: one turn goes on through calls and results."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|endoftext|>' + m.content }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content | default('') }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + '{' + c.function.arguments.word + '}' }}{% endfor %}"
        "{{ '' if m.tool_calls else '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = Chat(
        id="x", messages=(TALK[0], said("assistant", None, tool_calls=(call(word="eyas"),)), said("tool", "hawk"))
    )
    tokenizer = _with(source)
    row = tokenize_chat(tokenizer, chat)
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "look_up{eyas}"


def _with(source: str, family: str = "qwen2") -> Any:
    import copy

    made = copy.deepcopy(templated(family))
    made.chat_template = source
    return made


MACRO = (
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MACRO, "generation marks"),
        ("{% for m in messages %}{{ m.content | urlencode }}<|im_end|>{% endfor %}", "changes the text"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "doesn't render the assistant's messages"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "a message twice"),
        ("{% for m in messages | reverse %}{{ m.content }}<|im_end|>{% endfor %}", "the messages in order"),
        ("{{ raise_exception('no chats here') }}", "no chats here"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_marked_is_refused_at_once(source: str, why: str) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        ChatTokenizer(_with(source))
    if "no chats" not in why:
        assert "put {% generation %} and {% endgeneration %} around" in str(caught.value)


def test_a_chat_that_the_template_refuses_is_a_row_s_error() -> None:
    with pytest.raises(RowError, match="roles must alternate") as caught:
        tokenize_chat(templated("gemma"), Chat(id="odd", messages=(*TALK[:2], TALK[1])))
    assert caught.value.reason == "the template refuses the chat"
    assert "chat odd" in caught.value.detail
    calls = Chat(id="c", messages=(TALK[0], said("assistant", None, tool_calls=(call(a="b"),))))
    with pytest.raises(RowError, match="shows no tool calls"):
        tokenize_chat(templated("olmo"), calls)
    hidden = Chat(id="p", messages=(said("user", "\U000f0001"), TALK[1]))
    with pytest.raises(RowError, match="private-use"):
        tokenize_chat(templated("qwen2"), hidden)


def test_a_prompt_that_changes_once_it_is_answered_is_refused() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
        "{% if loop.last and m.role == 'user' and messages | length > 4 %}{{ ' Think!' }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = _with(source)
    tokenize_chat(tokenizer, Chat(id="x", messages=TALK[:4]))
    with pytest.raises(RowError, match="prompt of turn 6 differently once it is answered"):
        tokenize_chat(tokenizer, Chat(id="x", messages=TALK))


def test_text_without_an_end_mark_ends_with_its_words() -> None:
    source = (
        "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
    )
    tokenizer = _with(source)
    answers = [said("assistant", "Yes"), said("assistant", " No\n")]
    row = tokenize_chat(tokenizer, Chat(id="x", messages=(TALK[0], answers[0], TALK[2], answers[1])))
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "Yes No"
    assert ChatTokenizer(tokenizer).end_mark is None


def test_a_token_that_ends_a_turn_elsewhere_ends_it_if_the_model_stops_there() -> None:
    """GLM's answers are closed by whoever speaks next."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|endoftext|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
    )
    tokenizer = _with(source)
    chat = Chat(id="x", messages=TALK[:4])
    stop = tokenizer.convert_tokens_to_ids("<|im_start|>")
    with_stop = ChatTokenizer(tokenizer, [stop]).row(chat)
    without = ChatTokenizer(tokenizer).row(chat)
    assert tokenizer.decode(with_stop.tokens[with_stop.loss_mask]).startswith("assistant<|im_start|>")
    assert with_stop.loss_mask.sum() == without.loss_mask.sum() + 1


def test_spaces_that_a_tokenizer_adds_belong_to_the_word_after_them() -> None:
    """As in the tokenizers of Llama 2 and Mistral: `▁` for spaces, one more before every piece of text, bytes for the rest."""
    pieces = [
        "<unk>",
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
    ]
    vocab: Any = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in pieces[1:5]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES["mistral"]
    )
    row = tokenize_chat(tokenizer, Chat(id="x", messages=(said("user", "b a"), said("assistant", "é a\nb "))))
    tokens = tokenizer.convert_ids_to_tokens(row.tokens)
    assert [token for token, on in zip(tokens, row.loss_mask, strict=True) if not on] == [
        "<s>", "[INST]", "▁", "▁b", "▁a", "[/INST]",
    ]  # fmt: skip
    assert tokens[6:] == ["▁", "▁", "<0xC3>", "<0xA9>", "▁a", "<0x0A>", "b", "</s>"]


def test_a_token_half_in_an_answer_is_not_its() -> None:
    tokenizer = templated("qwen2")
    row = tokenize_chat(tokenizer, Chat(id="x", messages=(TALK[0], said("assistant", "\nreturn a"))))
    joined = tokenizer("assistant\n\nreturn")["input_ids"]
    assert "ĊĊ" in tokenizer.convert_ids_to_tokens(joined)  # the header's line break and the answer's are one token
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "return a<|im_end|>"


def test_a_space_before_an_answer_is_not_its_where_offsets_are_shortened() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':  ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:  ' }}{% endif %}"
    )
    tokenizer = _with(source, "llama3")
    row = tokenize_chat(tokenizer, Chat(id="x", messages=(TALK[0], said("assistant", "(1)"))))
    assert tokenizer.decode(row.tokens[row.loss_mask]) == "(1)<|eot_id|>"


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = "x"
        name_or_path = "old/model"
        is_fast = False

    with pytest.raises(ModelError, match="old/model is a slow one"):
        ChatTokenizer(Slow())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
def test_a_greeting_before_the_first_question_is_context(family: str, system: bool) -> None:
    """The answers after it are marked as without it; a template that refuses such chats gets none."""
    before = [said("system", "Be brief.")] if system else []
    greeted = Chat(id="x", messages=(*before, said("assistant", "Welcome!"), *TALK))
    tokenizer = templated(family)
    made = ChatTokenizer(tokenizer).exact(greeted)
    answers = [tokenizer.decode(made.tokens[start:stop]) for start, stop in made.answers or ()]
    assert answers == check(family, *TALK)
    refuses = family == "gemma"
    assert made.messages == ((*before, *TALK) if refuses else greeted.messages)
    assert ("Welcome!" in tokenizer.decode(made.tokens)) is not refuses


def test_a_greeting_between_generation_marks_is_context_too() -> None:
    tokenizer = copy.deepcopy(templated("qwen2"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = ChatTokenizer(tokenizer).exact(Chat(id="x", messages=(said("assistant", "Welcome!"), *TALK[:2])))
    assert [tokenizer.decode(made.tokens[start:stop]) for start, stop in made.answers] == ["assistant<|im_end|>"]
