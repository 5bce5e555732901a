"""The style in which a model writes tool calls, detected from its chat template.

A template is rendered with sample calls, because it writes an earlier call in the way that the model was trained to
write calls. The sample's names and values are found in the rendered text, and the text around them is the style:

| form | a call, as some models write it |
|---|---|
| `object` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes, Llama 3), or a list of them |
| `named` | `[TOOL_CALLS]name[ARGS]{...}` (Mistral, DeepSeek, Kimi, GPT-OSS) |
| `elements` | `<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder, GLM, MiniMax-M2) |
| `python` | `[name(key='value', other=3)]` (LFM2, Llama 3.2 and 4) |
| `braces` | `call:name{key:<|"|>value<|"|>,other:3}` (Gemma 4) |

In the texts of a style, characters of Unicode's private area stand for what differs from call to call.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

NAME = "\ue000"
ID = "\ue001"
NUMBER = "\ue002"
KEY = "\ue003"
TYPE = "\ue004"
"""The tool's name, the call's id, its number, an argument's key, and the name of its type."""
TAGS = "<|python_tag|>", "functools"
"""What Llama 3 and Phi-4 may write before objects although their templates don't."""
CDATA = "<![CDATA[", "]]>"
Form = Literal["object", "named", "elements", "python", "braces"]


@dataclass(frozen=True)
class Element:
    """How one argument is written in the form `elements`: `begin`, its key, `middle`, its value, `end`."""

    begin: str
    middle: str
    """May have a TYPE."""
    end: str
    """May have the KEY again."""
    text_type: str = ""
    """The TYPE of a text."""
    other_type: str = ""
    """The TYPE of a whole number."""
    cdata: bool = False
    """Whether a text with signs of markup stands between `CDATA`."""


@dataclass(frozen=True)
class ToolStyle:
    """One style of writing tool calls. An answer is text, `begin`, calls with `between`, and `end`.

    A call is `before_name`, the tool's name, `before_arguments`, the arguments, `after_arguments`.
    """

    form: Form
    begin: str
    between: str
    end: str
    before_name: str = ""
    before_arguments: str = ""
    after_arguments: str = ""
    element: Element | None = None
    quote: str = ""
    """What stands around a text in the form `braces`."""
    begun: bool = False
    """Whether the prompt ends with `begin`, so that an answer may start after it."""
    optional: str = ""
    """What else a model may write around calls."""
    id_length: int = 0
    """Number of letters and digits in a call's id; 0 = an id in OpenAI's form."""

    @property
    def name(self) -> str:
        """The style in a few words: its form and the mark before a call."""
        return f"{self.form} {self.begin.strip()}".strip()

    @property
    def bare(self) -> bool:
        """Whether calls begin like any other text, so that only an answer that begins with one is read as calls."""
        return not self.begin.strip(" \n[")

    @property
    def harmony(self) -> bool:
        """Whether it is GPT-OSS' style, whose calls name their recipient in one of two places."""
        return self.begin == HARMONY.begin

    def new_id(self) -> str:
        """Make a random id for a new call."""
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that calls are written with."""
        element = (self.element.begin, self.element.middle, self.element.end) if self.element else ()
        around = (self.before_name, self.before_arguments, self.after_arguments)
        tags = TAGS if self.bare else ("[CALL_ID]",)
        return (self.begin, self.between, self.end, *around, *element, self.quote, self.optional, *tags)


def object_style(begin: str, end: str, key: str = "arguments", between: str | None = None) -> ToolStyle:
    """Calls as JSON objects with the arguments under `key`; `between` is by default `end` and `begin` again."""
    around = '{"name": "', f'", "{key}": ', "}"
    return ToolStyle("object", begin, f"{end}\n{begin}" if between is None else between, end, *around)


HERMES = object_style("<tool_call>\n", "\n</tool_call>")
LLAMA3 = object_style("", "", key="parameters", between="; ")
MISTRAL = replace(object_style("[TOOL_CALLS] [", "]", between=", "), id_length=9)
MISTRAL_ARGS = ToolStyle("named", "[TOOL_CALLS]", "[TOOL_CALLS]", "", before_arguments="[ARGS]", id_length=9)
PYTHONIC = ToolStyle("python", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "", "(", ")")
HARMONY = ToolStyle(
    "named",
    " to=functions.",
    "<|call|><|start|>assistant to=functions.",
    "",
    before_arguments="<|channel|>commentary json<|message|>",
    optional="<|start|><|constrain|>",
)
"""GPT-OSS writes the recipient before or after the channel; both are read."""
_SHOWN = {
    "<tool_call>": HERMES,
    "[TOOL_CALLS]": MISTRAL,
    "<|tool_call_start|>": PYTHONIC,
    "<|tool_list_start|>": PYTHONIC,
    "<|tool_call|>": object_style("<|tool_call|>[", "]", between=", "),
    "<tool_calls>": object_style("<tool_calls>[", "]</tool_calls>", between=", "),
    "<TOOLCALL>": object_style("<TOOLCALL>[", "]</TOOLCALL>", between=", "),
    "<|eot_id|>": LLAMA3,
}
"""A mark in the text before an answer -> the style, for templates that show tools and write no calls."""
_UNSAID = {"<|tool_call_start|>": PYTHONIC}
"""A token that only models with this style have -> the style, for templates whose text has no mark either."""

_QUESTION, _ANSWER = "What is an eyas?", "Let me look it up."
_FIRST, _SECOND = "look_up", "put_down"
_TEXT, _WHOLE = "young bird", 37
_ARGUMENTS = {"word": _TEXT, "count": _WHOLE}
_LONG_IDS, _SHORT_IDS = ("call_4f81ab60aa", "call_93cd7e55bb"), ("qa4f81ab6", "qb93cd7e5")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "a word"},
                    "count": {"type": "integer", "description": "a number"},
                },
                "required": ["word", "count"],
            },
        },
    }
    for name in (_FIRST, _SECOND)
]
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_THOUGHT = re.compile(r".*(?:</\S*?think\S*?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>)", re.DOTALL)
_DIGITS = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


def shows_tools(template: str | Mapping[str, str] | None) -> bool:
    """Whether a chat template reads tools at all."""
    return "tools" in (_for_tools(template) or "")


def detect_tool_style(
    template: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    added_tokens: Container[str] = (),
) -> ToolStyle | None:
    """The style of the calls in a chat template; None if it shows no tools, or writes calls in an unknown style.

    If there are several named templates, the one for tools is read. `special_tokens`: the names that templates use for
    the tokenizer's special tokens, such as `eos_token`. `added_tokens`: all that the tokenizer has, which tell the
    style of a template that shows tools and says nothing of calls (LFM2.5).
    """
    source = _for_tools(template)
    if source is None or ("tools" not in source and "tool_calls" not in source):
        return None
    unsaid = next((style for mark, style in _UNSAID.items() if mark in added_tokens), None)
    return _detect(source, tuple(sorted((special_tokens or {}).items())), unsaid)


def _for_tools(template: str | Mapping[str, str] | None) -> str | None:
    return template.get("tool_use", template.get("default")) if isinstance(template, Mapping) else template


@lru_cache(maxsize=16)
def _detect(source: str, special_tokens: tuple[tuple[str, str], ...], unsaid: ToolStyle | None) -> ToolStyle | None:
    renderer = _Renderer(source, dict(special_tokens))
    for ids in (_LONG_IDS, _SHORT_IDS):  # Mistral's templates refuse ids that aren't nine letters and digits
        for as_text in (False, True):
            sample = renderer.sample(ids, as_text)
            style = None if sample is None else _read(sample)
            if style is not None:
                element = style.element and replace(style.element, cdata=CDATA[0] in source)
                return replace(style, element=element, id_length=0 if ids is _LONG_IDS else len(ids[0]))
    shown = renderer.try_render([{"role": "user", "content": _QUESTION}], prompt=True)
    written = renderer.sample(_SHORT_IDS, False)
    if shown is None or _FIRST not in shown or (written is not None and _FIRST in written.one):
        return None  # calls in an unknown style
    return next((style for mark, style in _SHOWN.items() if mark in shown), unsaid)


@dataclass(frozen=True)
class _Sample:
    """What a template writes from the user's question on."""

    prompt: str
    """Up to where the answer begins."""
    plain: str
    """With an answer that is text."""
    one: str
    """With an answer that is one call."""
    two: str | None
    """With an answer that is two calls; None if the template refuses that."""
    both: str | None
    """With an answer that is text and one call."""
    ids: tuple[str, str]
    eos: str


class _Renderer:
    """Renders a template with sample messages."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special = {"bos_token": "<bos>", "eos_token": "<eos>", **special_tokens}

    def try_render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str | None:
        """The text; None if the template refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                [list(messages)],
                tools=_TOOLS,
                chat_template=self._source,
                add_generation_prompt=prompt,
                **self._special,
            )
        except Exception:  # noqa: BLE001  # templates may raise anything
            return None
        text: str = texts[0]
        return text

    def sample(self, ids: tuple[str, str], as_text: bool) -> _Sample | None:
        """The sample with these ids, arguments as an object or as text; None if the template refuses it."""
        user = {"role": "user", "content": _QUESTION}
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": _given(as_text)}}
            for number, name in zip(ids, (_FIRST, _SECOND), strict=True)
        ]

        def answer(content: str | None, count: int) -> str | None:
            message = {"role": "assistant", "content": content} | ({"tool_calls": calls[:count]} if count else {})
            return self._after_question([user, message])

        one = answer("", 1)
        if one is None:
            one = answer(None, 1)
        prompt = self._after_question([user], prompt=True)
        plain = answer(_ANSWER, 0)
        if one is None or prompt is None or plain is None:
            return None
        two = answer("", 2)
        two = answer(None, 2) if two is None else two
        return _Sample(prompt, plain, one, two, answer(_ANSWER, 1), ids, self._special["eos_token"])

    def _after_question(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str | None:
        text = self.try_render(messages, prompt)
        if text is None or _QUESTION in text:
            return text and text[text.rindex(_QUESTION) :]
        before = self.try_render(messages[:1])  # a template that doesn't show the question
        return text if before is None else text[len(shared_start(text, before)) :]


def _given(as_text: bool) -> Any:
    return json.dumps(_ARGUMENTS) if as_text else dict(_ARGUMENTS)


@dataclass(frozen=True)
class _Found:
    """A sample call in a text: where it is, and the parts of a style that it shows."""

    start: int
    stop: int
    style: ToolStyle


def _read(sample: _Sample) -> ToolStyle | None:
    """The style that a sample shows; None if its call can't be found."""
    one = _find(sample.one, 0, _FIRST)
    if one is None:
        return None
    if "<|channel|>" in sample.one and "<|message|>" in sample.one:
        return HARMONY
    begin = _beginning(sample, one)
    end = _ending(sample.one[one.stop :], sample)
    if one.style.element is not None:  # what follows the last argument belongs to the call
        end = one.style.after_arguments + end if not end.startswith(one.style.after_arguments) else end
    between = None
    if sample.two is not None and (first := _find(sample.two, 0, _FIRST)) is not None:
        second = _find(sample.two, first.stop, _SECOND)
        between = None if second is None else sample.two[first.stop : second.start]
    if between is None:
        between = f"{end}{begin}" or "; "

    def general(text: str) -> str:
        for name in (_FIRST, _SECOND):
            text = text.replace(name, NAME)
        for number in sample.ids:
            text = text.replace(number, ID)
        return _DIGITS.sub(NUMBER, text)

    style = replace(one.style, begin=general(begin), between=general(between), end=general(end))
    begun = bool(begin.strip()) and sample.prompt.endswith(begin.rstrip())
    return replace(
        style,
        before_name=general(style.before_name),
        before_arguments=general(style.before_arguments),
        after_arguments=general(style.after_arguments),
        begun=begun,
    )


def _beginning(sample: _Sample, one: _Found) -> str:
    """What stands before the first call, without what begins every answer."""
    before = sample.one[: one.start]
    shared = max(len(shared_start(before, other)) for other in (sample.prompt, sample.plain))
    cut = re.search(r"[<\[][^<>\[\]\s]*$", before[:shared])  # not inside a tag
    rest = before[shared if cut is None or shared == len(before) else cut.start() :]
    text, answer, behind = (sample.both or "").partition(_ANSWER)
    found = _find(behind, 0, _FIRST) if answer and text else None
    if found is not None:
        common = shared_end(before, behind[: found.start])
        if not rest.strip() or len(common) < len(rest):
            return _whole_tags(common).lstrip()
    return _THOUGHT.sub("", rest).lstrip()


def _whole_tags(text: str) -> str:
    """A text without the rest of a tag at its beginning."""
    return re.sub(r"^[^<\[{\s>\]]+[>\]]", "", text)


def _ending(after: str, sample: _Sample) -> str:
    """What stands after the last call, without what ends every message."""
    after = after.split(sample.eos)[0] if sample.eos in after else after
    message_end = sample.plain.partition(_ANSWER)[2]
    message_end = message_end.split(sample.eos)[0] if sample.eos in message_end else message_end
    common = _whole_tags(shared_end(after, message_end)).removeprefix(">")
    if common.strip():
        return after[: len(after) - len(common)].rstrip()
    tags = [after.index(tag) for tag in _TAG.findall(message_end) if tag in after]
    if tags:
        return after[: min(tags)].rstrip()
    if message_end.strip():  # a message of calls has an end of its own
        return re.sub(r"(<[^<>]+>|\[[^\[\]]+\])\s*$", "", after).rstrip()
    return after.rstrip()


def _find(text: str, start: int, name: str) -> _Found | None:
    """The first call of a tool after `start`, in whatever form."""
    at = text.find(name, start)
    if at < 0:
        return None
    for find in (_find_object, _find_named, _find_python, _find_braces, _find_elements):
        found = find(text, start, at, name)
        if found is not None:
            return found
    return None


def _find_object(text: str, start: int, at: int, name: str) -> _Found | None:
    for opening in re.finditer(r"\{", text[start:at]):
        begin = start + opening.start()
        value = _decoded(text, begin)
        if value is None or not isinstance(value[0], dict) or value[1] <= at:
            continue
        inside = value[0].get("function", value[0])
        keys = [key for key, each in inside.items() if _are_arguments(each)] if isinstance(inside, dict) else []
        if not keys or name not in [each for each in inside.values() if isinstance(each, str)]:
            continue
        argument = text.index(":", text.index(json.dumps(keys[0]), begin)) + 1
        argument += len(text[argument:]) - len(text[argument:].lstrip())
        stop = _decoded(text, argument)
        if stop is None or argument < at:
            return None  # the arguments come before the name: no known model does so
        around = text[begin:at], text[at + len(name) : argument], text[stop[1] : value[1]]
        return _Found(begin, value[1], ToolStyle("object", "", "", "", *around))
    return None


def _find_named(text: str, start: int, at: int, name: str) -> _Found | None:
    del start
    last = _last_before(text, at, name, "{")
    opening = text.find("{", at)
    while opening >= 0:
        value = _decoded(text, opening)
        if value is not None and _are_arguments(value[0]):
            between = text[last + len(name) : opening]
            return _Found(last, value[1], ToolStyle("named", "", "", "", "", between)) if len(between) < 80 else None
        opening = text.find("{", opening + 1)
    return None


def _find_python(text: str, start: int, at: int, name: str) -> _Found | None:
    del start
    match = re.compile(re.escape(name) + r"\((.*?)\)", re.DOTALL).match(text, at)
    if match is None or python_arguments(match[1]) != _ARGUMENTS:
        return None
    return _Found(at, match.end(), ToolStyle("python", "", "", "", "", "(", ")"))


def _find_braces(text: str, start: int, at: int, name: str) -> _Found | None:
    del start
    match = re.compile(re.escape(name) + r"\{(?:count:37,)?word:(\W{1,8})" + re.escape(_TEXT)).match(text, at)
    if match is None:
        return None
    stop = text.find("}", match.end())
    return _Found(at, stop + 1, ToolStyle("braces", "", "", "", "", "{", "}", quote=match[1])) if stop > 0 else None


def _find_elements(text: str, start: int, at: int, name: str) -> _Found | None:
    del start
    first, second = list(_ARGUMENTS)
    places = []
    here = at + len(name)
    for part in (first, _TEXT, second, str(_WHOLE)):
        here = text.find(part, here)
        if here < 0:
            return None
        places.append((here, here + len(part)))
        here += len(part)
    (key, key_stop), (value, value_stop), (other, other_stop), (number, number_stop) = places
    at = text.rfind(name, at, key)
    opened = text[at + len(name) : key]
    middle = text[key_stop:value]
    joint = text[value_stop:other]
    begin = _whole_tags(shared_end(opened, joint)).removeprefix(">")
    end = joint[: len(joint) - len(begin)].replace(first, KEY)
    rest = text[number_stop:]
    if not end.strip() or not begin.strip() or not rest.startswith(end.replace(KEY, second)):
        return None
    middle, text_type, other_type = _typed(middle, text[other_stop:number])
    name_end = opened[: len(opened) - len(begin)]
    stop = number_stop + len(end.replace(KEY, second))
    element = Element(begin, middle, end, text_type, other_type)
    return _Found(at, stop, ToolStyle("elements", "", "", "", "", name_end, "", element))


def _typed(text: str, number: str) -> tuple[str, str, str]:
    """What stands between key and value, with a TYPE if it differs for a text and a number, and both types."""
    if text == number:
        return text, "", ""
    head = shared_start(text, number)
    head = head[: len(re.sub(r"\w+$", "", head))]  # whole words
    tail = shared_end(text, number)
    tail = re.sub(r"^\w+", "", tail)
    return head + TYPE + tail, text[len(head) : len(text) - len(tail)], number[len(head) : len(number) - len(tail)]


def _last_before(text: str, at: int, name: str, sign: str) -> int:
    """The last place of the name, from `at` on, before a sign."""
    stop = text.find(sign, at)
    found = text.rfind(name, at, stop if stop >= 0 else len(text))
    return at if found < 0 else found


def _decoded(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value at a place, and where it ends; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None


def _are_arguments(value: Any) -> bool:
    if isinstance(value, str) and value.startswith("{"):
        decoded = _decoded(value, 0)
        return decoded is not None and decoded[0] == _ARGUMENTS
    return bool(value == _ARGUMENTS)


def shared_start(first: str, second: str) -> str:
    """The characters with which both texts begin."""
    length = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return first[: min(len(first), len(second)) if length is None else length]


def shared_end(first: str, second: str) -> str:
    """The characters with which both texts end."""
    return shared_start(first[::-1], second[::-1])[::-1]


def python_arguments(text: str) -> dict[str, Any] | None:
    """The keyword arguments of a Python call, whose values may also be JSON; None if they are something else."""
    # a line break in quotes isn't Python, but models and templates write it
    call = _parsed(f"f({text.strip()})") or _parsed("f({})".format(text.strip().replace("\n", "\\n")))
    if not isinstance(call, ast.Call) or call.args:
        return None
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        try:
            found[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        except (ValueError, RecursionError):
            return None
    return found


def _parsed(expression: str) -> ast.expr | None:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_JSON_NAMES = {"true": True, "false": False, "null": None}


class _JsonNames(ast.NodeTransformer):
    """Reads `true`, `false` and `null` as Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # the name that ast looks for
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
