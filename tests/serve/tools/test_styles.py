"""The style of calls is what a template writes of earlier calls: found out, read back at every split, constrained."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.serve.tools.calling import tool_call_grammar
from eyas.serve.tools.parser import CallPiece, TextPiece, ToolCallParser
from eyas.serve.tools.styles import HARMONY, HERMES, LLAMA3, MISTRAL, PYTHONIC, ToolStyle, detect_tool_style
from eyas.verify import compile_grammar
from eyas.verify.constraint import Constraint

from ... import pairs

BEFORE = (
    "{% if tools %}Call tools, perhaps within <tool_call></tool_call>: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}"
)
AFTER = "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
WORDS = {
    "EACH": "{% for c in m.tool_calls %}{% set f = c.function %}",
    "NAME": "{{ f.name }}",
    "ARGS": "{{ f.arguments | tojson }}",
    "ITEMS": "{% for k, v in f.arguments.items() %}",
    "KEY": "{{ k }}",
    "VALUE": "{{ v if v is string else v | tojson }}",
    "NUMBER": "{{ loop.index0 }}",
    "COMMA": "{{ ', ' if not loop.last }}{% endfor %}",
    "LINE": "{{ '\n' if not loop.last }}{% endfor %}",
    "DONE": "{% endfor %}",
}
"""Short for parts of templates."""
QUOTED = """{{ '<|"|>' ~ v ~ '<|"|>' if v is string else v | tojson }}{{ ',' if not loop.last }}"""
CALLS = {
    "hermes": 'EACH<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>LINE',
    "list": '<tool_calls>[EACH{"name": "NAME", "arguments": ARGS}COMMA]</tool_calls>',
    "lines": '<tool_calls>\nEACH{"name": "NAME", "arguments": ARGS}LINE\n</tool_calls>',
    "other keys": '<|ACT|>[\nEACH{"id": "NUMBER", "tool_name": "NAME", "parameters": ARGS}COMMA\n]<|END_ACT|>',
    "name as key": '<|tools|>[EACH{"NAME": ARGS}COMMA]<|tools_end|>',
    "list with ids": '[CALLS] [EACH{"name": "NAME", "arguments": ARGS, "id": "{{ c.id }}"}COMMA]',
    "named": "EACH[CALLS]NAME[TO]ARGSDONE",
    "numbered": "<|calls|>EACH<|call|>functions.NAME:NUMBER<|args|>ARGS<|call_end|>DONE<|calls_end|>",
    "fenced": "<|calls|>EACH<|call|>function<|sep|>NAME\n```json\nARGS\n```<|call_end|>DONE<|calls_end|>",
    "tag": "EACH<function=NAME>ARGS</function>DONE",
    "functions": "EACH<tool_call>\n<function=NAME>\nITEMS<parameter=KEY>\nVALUE\n</parameter>\nDONE</function>\n"
    "</tool_call>LINE",
    "keys and values": "EACH<tool_call>NAME\nITEMS<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\nDONE"
    "</tool_call>LINE",
    "invoke": '<m:tool_call>\nEACH<invoke name="NAME">\nITEMS<parameter name="KEY">VALUE</parameter>\nDONE'
    "</invoke>\nDONE</m:tool_call>",
    "typed": '<|D|calls>\nEACH<|D|invoke name="NAME">\nITEMS<|D|parameter name="KEY" '
    "string=\"{{ 'true' if v is string else 'false' }}\">VALUE</|D|parameter>\nDONE</|D|invoke>\nDONE</|D|calls>",
    "sections": 'EACH<call name="NAME">ITEMS<param name="KEY">{{ "<![CDATA[" ~ v ~ "]]>" '
    "if v is string and '<' in v else v if v is string else v | tojson }}</param>DONE</call>DONE",
    "keys as tags": 'EACH<call name="NAME">ITEMS<KEY>VALUE</KEY>DONE</call>DONE',
    "python": "<|tool_call_start|>[EACHNAME(ITEMSKEY={{ v | tojson }}COMMA)COMMA]<|tool_call_end|>",
    "bare python": "[EACHNAME(ITEMSKEY={{ v | tojson }}COMMA)COMMA]",
    "braces": "EACH<|tool_call>call:NAME{{ '{' }}ITEMSKEY:" + QUOTED + "DONE{{ '}' }}<tool_call|>DONE",
    "bare": """EACH{"name": "NAME", "parameters": ARGS}{{ '; ' if not loop.last }}DONE""",
}
"""What a template writes of calls, in the shapes of published ones."""
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "warn", "parameters": {"type": "object", "properties": PROPERTIES}}},
]
CITY = 'Bern, "old" town <3\n(it\'s {here})'
FIRST, SECOND = ("weather", {"city": CITY, "days": -2, "wind": True}), ("warn", {"city": "7"})


def source(name: str) -> str:
    calls = CALLS[name]
    for word, meaning in WORDS.items():
        calls = calls.replace(word, meaning)
    return BEFORE + calls + AFTER


def answer(name: str, *calls: tuple[str, Any], content: str = "") -> str:
    """What the template writes of an answer with these calls."""
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for number, (tool, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made}
    texts, _ = render_jinja_template([[message]], chat_template=source(name))
    return str(texts[0]).removeprefix("<|assistant|>").removesuffix("<|end|>")


def read(style: ToolStyle, pieces: list[str]) -> tuple[str, list[list[str]]]:
    parser = ToolCallParser(style, tools=TOOLS)
    text = ""
    calls = list[list[str]]()
    for part in [each for piece in pieces for each in parser.feed(piece)] + parser.finish():
        if isinstance(part, TextPiece):
            text += part.text
        elif part.name is not None:
            calls.append([part.name, part.arguments])
        else:
            calls[-1][1] += part.arguments
    return text, calls


def style_of(name: str) -> ToolStyle:
    style = detect_tool_style(source(name))
    assert style is not None
    return style


@pytest.mark.parametrize("name", CALLS)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    style = style_of(name)
    for calls in ((FIRST,), (FIRST, SECOND)):
        text, found = read(style, [answer(name, *calls)])
        assert not text.strip()
        assert [(tool, json.loads(arguments)) for tool, arguments in found] == list(calls)
    before = "" if style.bare else "Let me see."
    text, found = read(style, [answer(name, FIRST, content=before) + ("" if style.bare else "\nSo.")])
    assert text.split() == [*before.split(), *([] if style.bare else ["So."])]
    assert len(found) == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CALLS)
def test_every_split_is_read_alike(name: str) -> None:
    style = style_of(name)
    text = answer(name, FIRST, SECOND)
    whole = read(style, [text])
    assert read(style, list(text)) == whole
    for at in range(len(text)):
        assert read(style, [text[:at], text[at:]]) == whole
    for at in range(0, len(text), 3):  # an answer that its length ends
        assert read(style, list(text[:at])) == read(style, [text[:at]])


@cache
def tokenizer(special: bool) -> Any:
    """One to which a style's marks are special tokens, or text."""
    made = pairs.tokenizer().__class__(
        tokenizer_object=pairs.tokenizer().backend_tokenizer.__class__.from_str(
            pairs.tokenizer().backend_tokenizer.to_str()
        ),
        eos_token=pairs.tokenizer().eos_token,
    )
    marks = (
        "<tool_call> </tool_call> [CALLS] [TO] <|calls|> <|call|> <|args|> <|call_end|> <|calls_end|> <|sep|>".split()
    )
    marks += '<|tool_call_start|> <|tool_call_end|> <|tool_call> <tool_call|> <|"|> <|ACT|> <|END_ACT|>'.split()
    if special:
        made.add_tokens(marks, special_tokens=True)
    return made


def allowed(name: str, text: str, special: bool, **options: Any) -> bool:
    made = tokenizer(special)
    spec = tool_call_grammar(TOOLS, "required", style_of(name), made, **options)
    assert spec is not None
    followed = Constraint(compile_grammar(made, spec), [made.eos_token_id])
    ids = [*made(text, add_special_tokens=False)["input_ids"], made.eos_token_id]
    return followed.consume(ids) == len(ids)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_constrained_to_the_schemas(name: str, special: bool) -> None:
    pytest.importorskip("llguidance")
    assert allowed(name, answer(name, FIRST), special)
    assert allowed(name, answer(name, SECOND, FIRST), special)
    assert not allowed(name, answer(name, SECOND, FIRST), special, parallel=False)
    assert not allowed(name, answer(name, ("weather", {"days": 1})), special)
    assert not allowed(name, answer(name, ("weather", {"city": "Ulm", "days": "many"})), special)
    assert not allowed(name, answer(name, ("snow", {"city": "Ulm"})), special)
    assert not allowed(name, "It rains.", special)


def test_prose_is_no_style() -> None:
    """The calls of Apriel and MiniMax are written in another way than the text about tools mentions."""
    style = style_of("list")
    assert style.begin == "<tool_calls>["
    calls = '<tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>'
    assert read(style, [calls]) == ("", [["f", '{"x": 1}']])
    bare = "{% if tools %}<tool_call></tool_call>{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    found = detect_tool_style(bare + "<tool_calls>[{{ m.tool_calls | tojson }}]</tool_calls>{% endif %}{% endfor %}")
    assert found is not None
    assert read(found, [calls]) == ("", [["f", '{"x": 1}']])
    assert read(found, list(calls)) == ("", [["f", '{"x": 1}']])


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}within <tool_call>: {{ tools | tojson }}{% endif %}", HERMES),
        ("{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}", MISTRAL),
        ("{% if tools %}<|tool_list_start|>{{ tools | tojson }}{% endif %}", PYTHONIC),
        ("{% if tools %}{{ tools | tojson }}<|eot_id|>{% endif %}", LLAMA3),
        ("{% if tools %}in a new way: {{ tools | tojson }}{% endif %}", None),
        ({"default": "{{ messages }}", "tool_use": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"}, HERMES),
    ],
)
def test_templates_that_write_no_calls_are_told_by_their_marks(template: Any, style: ToolStyle | None) -> None:
    if isinstance(template, str) and "tools" in template:
        template += "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    if isinstance(template, dict):
        template["tool_use"] += "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    assert detect_tool_style(template) == style


def test_marks_that_models_forget_are_not_missed() -> None:
    style = style_of("functions")
    inner = answer("functions", FIRST).removeprefix("<tool_call>\n")
    assert read(style, [inner]) == read(style, [answer("functions", FIRST)])
    assert read(style, ["<tool_call><function=weather><parameter=city>Ulm</parameter></function></tool_call>"])[1] == [
        ["weather", '{"city": "Ulm"}']
    ]


def test_texts_of_elements_stream() -> None:
    parser = ToolCallParser(style_of("functions"), tools=TOOLS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nBe")
    assert parser.feed("rn") == [CallPiece(0, "rn")]
    assert parser.feed("\n</para") == []


def test_a_template_that_says_nothing_of_calls_is_told_by_the_tokens() -> None:
    shown = "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    assert detect_tool_style(shown, added_tokens=("<tool_call>", "<|tool_call_start|>")) == PYTHONIC
    assert detect_tool_style(shown, added_tokens=("<tool_call>", "[TOOL_CALLS]")) is None
    own = shown.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}"
    )
    assert detect_tool_style(own, added_tokens=("<|tool_call_start|>",)) is None  # it shows that it has another style


def test_text_in_sections_may_have_the_ends_of_elements() -> None:
    style = style_of("sections")
    text = "</param></call> ]] <![CDATA["
    assert read(style, list(answer("sections", ("warn", {"city": text})))) == (
        "",
        [["warn", json.dumps({"city": text})]],
    )
    unknown = answer("sections", ("other", {"text": '{"a": "<"}'}))
    assert read(style, [unknown])[1] == [["other", json.dumps({"text": '{"a": "<"}'})]]


def test_braces_with_none() -> None:
    text = '<|tool_call>call:f{a:None,b:[true,<|"|>None<|"|>]}<tool_call|>'
    ((_, arguments),) = read(style_of("braces"), [text])[1]
    assert json.loads(arguments) == {"a": None, "b": [True, "None"]}


def test_marks_before_bare_objects() -> None:
    call = '{"name": "warn", "arguments": {}}'
    for text in (call, f"<|python_tag|>{call}", f"functools[{call}]"):
        assert read(style_of("bare"), list(text)) == ("", [["warn", "{}"]])


def test_a_whole_tag_ends_calls() -> None:
    """ERNIE's answers end with another tag than its calls: both have the last sign."""
    style = detect_tool_style(
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.content %}<say>{{ m.content }}</say>{% endif %}"
        "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}\n<|end|>{% endfor %}"
    )
    assert style is not None
    assert style.end == "</call>"


def test_harmony() -> None:
    style = detect_tool_style(
        "{{ tools | tojson }}{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}"
        " to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    assert style == HARMONY
    for text in (
        "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Bern"}',
        "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Bern"}',
    ):
        assert read(style, [text])[1] == [["weather", '{"city": "Bern"}']]
        assert read(style, list(text)) == read(style, [text])


def test_elements_within_elements() -> None:
    style = style_of("keys as tags")
    text = '<call name="f"><place><city>Bern</city><days><item>1</item><item>2</item></days></place></call>'
    ((_, arguments),) = read(style, [text])[1]
    assert json.loads(arguments) == {"place": {"city": "Bern", "days": [1, 2]}}
