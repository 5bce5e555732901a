"""Reasoning: the marks around what a model thinks before it answers, and a splitter that separates both in a stream.

Models write their thought into the answer, between marks that differ by family (`PARSERS`). Which family a model
belongs to is shown by its chat template, or else by its tokenizer (`reasoning_marks`). Some templates open the thought
themselves: then the answer begins inside it, without an opening mark (`begins_inside`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from eyas.errors import UsageError
from eyas.text.detokenizer import special_token_ids

AUTO, NONE = "auto", "none"
"""The names for the marks that the model shows, and for none: thoughts stay in the text."""
_BREAKS = "\r\n"
_TAIL = 48
"""Tokens at the end of a prompt among which an opening mark is looked for; no mark is longer than half of them."""


@dataclass(frozen=True)
class ReasoningMarks:
    """What stands around the thoughts of a model family. Line breaks next to a mark belong to the mark.

    No mark may begin with another one that is looked for in the same place.
    """

    opens: tuple[str, ...]
    """Any of them begins a thought."""
    closes: tuple[str, ...]
    """Any of them ends it."""
    anywhere: bool = False
    """Whether a thought may follow a part of the answer. Only for marks that are special tokens: texts can't quote
    them. Otherwise a thought can only come first, and later marks are text."""
    begun: bool = False
    """Whether answers begin inside a thought though the template doesn't open it."""
    interrupts: tuple[str, ...] = ()
    """What else ends a thought, but belongs to the answer."""
    answer_opens: tuple[str, ...] = ()
    """Marks before the answer itself."""
    answer_closes: tuple[str, ...] = ()
    """Marks after it."""
    shown: tuple[str, ...] = ()
    """What a chat template or a vocabulary has to contain for the family to be recognized; default: `closes`."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.opens, *self.closes, *self.interrupts, *self.answer_opens, *self.answer_closes)

    def special_tokens(self, tokenizer: Any) -> frozenset[int]:
        """The special tokens that marks are made of; without them in the text no mark would be found."""
        special = special_token_ids(tokenizer)
        added = tokenizer.get_added_vocab().items() if special else ()
        return frozenset(id_ for name, id_ in added if id_ in special and any(name in text for text in self.texts))


_THINK = ReasoningMarks(("<think>",), ("</think>",))
_GRANITE_PHRASES = ReasoningMarks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    shown=("Here is my thought process:", "Here is my response:"),
)
_GRANITE_TAGS = ReasoningMarks(
    ("<think>",),
    ("</think>",),
    answer_opens=("<response>",),
    answer_closes=("</response>",),
    shown=("</think>", "<response>"),
)
_MISTRAL = ReasoningMarks(("[THINK]",), ("[/THINK]",), anywhere=True)
_COHERE = ReasoningMarks(("<|START_THINKING|>",), ("<|END_THINKING|>",), anywhere=True)
_SEED = ReasoningMarks(("<seed:think>",), ("</seed:think>",))
_MINIMAX_M3 = ReasoningMarks(("<mm:think>",), ("</mm:think>",))
_KIMI_VL = ReasoningMarks(("◁think▷",), ("◁/think▷",))
_KIMI_K3 = ReasoningMarks(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), anywhere=True)
_GEMMA = ReasoningMarks(("<|channel>thought",), ("<channel|>",), anywhere=True, shown=("<|channel>", "<channel|>"))
_NEXT_MESSAGE = "<|start|>assistant"
_HARMONY = ReasoningMarks(
    tuple(f"{head}<|channel|>analysis<|message|>" for head in (_NEXT_MESSAGE, "")),
    ("<|end|>",),
    anywhere=True,
    interrupts=("<|start|>", "<|channel|>"),
    answer_opens=tuple(
        f"{head}<|channel|>{name}<|message|>" for head in (_NEXT_MESSAGE, "") for name in ("final", "commentary")
    ),
    answer_closes=("<|end|>",),
    shown=("<|channel|>", "<|message|>"),
)
"""GPT-OSS writes in channels: `analysis` is the thought. A call names its recipient within the header of its channel,
so that header is none of these marks."""

_FAMILIES = (
    _HARMONY, _GEMMA, _KIMI_K3, _KIMI_VL, _MINIMAX_M3, _SEED, _COHERE, _MISTRAL, _GRANITE_TAGS, _GRANITE_PHRASES,
    _THINK,
)  # fmt: skip
"""Families in the order in which they are recognized: the first whose marks are shown."""

_THINKERS = """
    deepseek_v3 ernie45 glm45 hunyuan kimi_k2 lfm2 mimo minimax_m2 nemotron_v3 olmo3 qwen3 smollm3 step3 think
""".split()
PARSERS: Mapping[str, ReasoningMarks] = {
    **dict.fromkeys(_THINKERS, _THINK),
    "cohere": _COHERE,
    "deepseek_r1": ReasoningMarks(("<think>",), ("</think>",), begun=True),
    "gemma4": _GEMMA,
    "gpt_oss": _HARMONY,
    "granite": _GRANITE_PHRASES,
    "granite_3_3": _GRANITE_TAGS,
    "kimi_k3": _KIMI_K3,
    "kimi_vl": _KIMI_VL,
    "minimax_m3": _MINIMAX_M3,
    "mistral": _MISTRAL,
    "openai_gptoss": _HARMONY,
    "seed_oss": _SEED,
}
"""Names, mostly vLLM's, -> the marks that they stand for."""


def check_parser(name: str) -> str:
    """The name in the form of `PARSERS`, or `auto` or `none`; SGLang writes hyphens. Raises UsageError if unknown."""
    found = name.replace("-", "_")
    if found not in (AUTO, NONE, *PARSERS):
        raise UsageError(f"there is no reasoning parser {name}: use {AUTO}, {NONE}, {', '.join(PARSERS)}")
    return found


def reasoning_marks(tokenizer: Any, parser: str = AUTO) -> ReasoningMarks | None:
    """The marks that a parser's name stands for (`check_parser`); None if there are none, or the model shows none."""
    if parser == NONE or tokenizer is None:
        return None
    if parser != AUTO:
        return PARSERS[parser]
    template = getattr(tokenizer, "chat_template", None) or ""
    return _shown_marks(tokenizer, "\n".join(template.values()) if isinstance(template, Mapping) else str(template))


@lru_cache(maxsize=16)
def _shown_marks(tokenizer: Any, template: str) -> ReasoningMarks | None:
    """The first family whose marks the template shows, or else the vocabulary: some templates leave thoughts out."""
    places: tuple[str | Mapping[str, int], ...] = (template, tokenizer.get_added_vocab()) if template else ()
    for place in places:
        for marks in _FAMILIES:
            if all(text in place for text in marks.shown or marks.closes):
                return marks
    return None


def begins_inside(marks: ReasoningMarks, tokenizer: Any, prompt: Sequence[int], said: str = "") -> bool:
    """Whether an answer begins inside a thought: its prompt, as token ids, ends with an opening mark.

    `said`: the beginning of the answer, if the prompt has one; then that decides.
    """
    if said:
        splitter = ThoughtSplitter(marks, inside=marks.begun)
        splitter.feed(said)
        return splitter.thinking
    end = str(tokenizer.decode(list(prompt[-_TAIL:]))).rstrip()
    return end.endswith(marks.opens) or (marks.begun and not end.endswith(marks.closes))


def all_marks() -> frozenset[str]:
    """The marks before and after thoughts, of all families."""
    return frozenset(mark for marks in _FAMILIES for mark in (*marks.opens, *marks.closes))


class Piece(NamedTuple):
    """A piece of a thought or of an answer. Its text is empty where only a mark was read."""

    text: str
    thought: bool
    """Whether it belongs to a thought; the marks around one do."""
    stop: int
    """How many characters of the whole text have been split after this piece."""


class ThoughtSplitter:
    """Splits a text that comes piece by piece into thoughts and answers, the same however it is cut into pieces.

    What may be the beginning of a mark is held back until that is decided.
    """

    def __init__(self, marks: ReasoningMarks, *, inside: bool = False, interrupts: Sequence[str] = ()) -> None:
        """`inside`: the text begins inside a thought. `interrupts`: as in the marks, for this text only."""
        self._marks = marks
        self._interrupts = (*marks.interrupts, *interrupts)
        self._ends = (*marks.closes, *self._interrupts)
        self._state: Literal["first", "thought", "answer"] = "first"
        """`first`: only white space and marks came since the beginning or the last thought."""
        self._inside = inside  # whether a thought continues after the state `first`, even without an opening mark
        if marks.anywhere and not inside:
            self._state = "answer"
        self._any_mark = inside
        self._beside_mark = inside  # line breaks that come now belong to a mark
        self._held = ""
        self._stop = 0

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._state == "thought" or (self._state == "first" and self._inside)

    @property
    def settled(self) -> bool:
        """Whether all further text is part of the answer."""
        return self._state == "answer" and not (self._held or self._beside_mark or self._answer_marks)

    @property
    def _answer_marks(self) -> tuple[str, ...]:
        """The marks to look for in the answer."""
        opens = self._marks.opens if self._marks.anywhere else ()
        around = (*self._marks.answer_opens, *self._marks.answer_closes)
        return (*opens, *around) if self._any_mark or self._marks.anywhere else opens

    def feed(self, text: str) -> list[Piece]:
        """Add text; returns what is decided by now."""
        self._held += text
        return self._split(last=False)

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        return self._split(last=True)

    def _split(self, *, last: bool) -> list[Piece]:
        found: list[Piece] = []
        steps = {"first": self._first, "thought": self._thought, "answer": self._answer}
        before = None
        while self._held and before != (self._state, len(self._held)):
            before = self._state, len(self._held)
            found += steps[self._state](last)
        return found

    def _take(self, count: int, *, thought: bool, hidden: bool = False) -> list[Piece]:
        """Take characters from the held text, without showing them if they are `hidden`."""
        text = self._held[:count]
        self._held = self._held[count:]
        self._stop += len(text)
        return [Piece("" if hidden else text, thought, self._stop)] if text else []

    def _take_mark(self, count: int, *, thought: bool) -> list[Piece]:
        """Take what ends with a mark."""
        self._beside_mark = self._any_mark = True
        return self._take(count, thought=thought, hidden=True)

    def _take_breaks(self, *, thought: bool) -> list[Piece]:
        """Take the line breaks after a mark."""
        if not self._beside_mark:
            return []
        count = len(self._held) - len(self._held.lstrip(_BREAKS))
        self._beside_mark = count == len(self._held)  # there may be more of them
        return self._take(count, thought=thought, hidden=True)

    def _first(self, last: bool) -> list[Piece]:
        found = self._take_breaks(thought=True)
        start = self._held.lstrip()
        opened = next((mark for mark in self._marks.opens if start.startswith(mark)), None)
        if opened is not None:
            self._state = "thought"
            return found + self._take_mark(len(self._held) - len(start) + len(opened), thought=True)
        if last or (start and not any(mark.startswith(start) for mark in self._marks.opens)):
            self._state = "thought" if self._inside else "answer"
        return found

    def _thought(self, last: bool) -> list[Piece]:
        found = self._take_breaks(thought=True)
        at, mark = _first_of(self._ends, self._held)
        if mark is None:
            text = (
                self._held if last else self._held[: len(self._held) - _begun(self._ends, self._held)].rstrip(_BREAKS)
            )
            return found + self._take(len(text), thought=True)
        breaks = at - len(self._held[:at].rstrip(_BREAKS))
        found += self._take(at - breaks, thought=True)
        if mark in self._interrupts:
            self._state = "answer"
            return found + self._take(breaks, thought=True, hidden=True)
        self._state = "answer" if self._marks.anywhere else "first"
        self._inside = False
        return found + self._take_mark(breaks + len(mark), thought=True)

    def _answer(self, last: bool) -> list[Piece]:
        found = self._take_breaks(thought=True)
        at, mark = _first_of(self._answer_marks, self._held)
        if mark is None:
            keep = 0 if last else _begun(self._answer_marks, self._held)
            return found + self._take(len(self._held) - keep, thought=False)
        found += self._take(at, thought=False)
        opened = mark in self._marks.opens
        if opened:
            self._state = "thought"
        return found + self._take_mark(len(mark), thought=opened)


def _first_of(marks: Sequence[str], text: str) -> tuple[int, str | None]:
    """Where the first mark in a text begins, and which it is; None if there is none."""
    return min(((text.index(mark), mark) for mark in marks if mark in text), default=(len(text), None))


def _begun(marks: Sequence[str], text: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next((count for count in range(most, 0, -1) if any(mark.startswith(text[-count:]) for mark in marks)), 0)
