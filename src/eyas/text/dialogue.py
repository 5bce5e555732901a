"""Chats of several turns: a `Conversation` with an engine, and the rows of prompt files as `Dialogue`s.

A row of a prompt file is one prompt, or several user turns; the answer to a turn is appended to the chat before the
next is sent. Command lines and benchmarks answer many rows at once with `converse`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eyas.errors import RequestError
from eyas.text.chats import Message
from eyas.text.prompts import BadRow, PromptRow
from eyas.text.template import encode_chat, encode_prediction, encode_text, has_chat_template
from eyas.types import Chunk, Completion, Request, SamplingParams, Stats

if TYPE_CHECKING:
    from eyas.engine import Engine

_MAX_TOKENS = 32768
"""Maximum tokens that a conversation keeps cached if the target's context is unlimited."""


class Dialogue:
    """One row with its prompts and completions so far; `error` says why it can't be answered."""

    def __init__(self, row: PromptRow | BadRow) -> None:
        self.id = row.id
        self.requests: list[Request] = []
        self.completions: list[Completion] = []
        self.error = row.error if isinstance(row, BadRow) else None
        self._row = row
        self._chat = list(row.messages or ()) if isinstance(row, PromptRow) else []

    @property
    def open(self) -> bool:
        """Whether the row has a turn that is not answered yet."""
        if self.error is not None or isinstance(self._row, BadRow):
            return False
        return len(self.completions) < (1 if self._row.turns is None else len(self._row.turns))

    def next_request(self, engine: Engine, params: SamplingParams) -> Request | None:
        """Make the request of the next turn; None, with `error` set, if the engine can't run it."""
        assert isinstance(self._row, PromptRow)
        try:
            prompt, chat = self._next_prompt(self._row, engine.tokenizer)
            expected = self._row.prediction
            prediction = () if expected is None else encode_prediction(engine.tokenizer, expected)
            request = Request(prompt, params, self.id, chat=chat, prediction=prediction)
            engine.check(request)
        except RequestError as error:
            self.error = f"{self._row.where}: {error}"
            return None
        self.requests.append(request)
        return request

    def answer(self, completion: Completion) -> None:
        """Record the completion of the last request."""
        self.completions.append(completion)
        self._chat.append(Message(role="assistant", content=completion.text))

    def stats(self) -> Stats:
        """The statistics of all turns pooled."""
        pooled = Stats()
        for completion in self.completions:
            pooled.merge(completion.stats)
        return pooled

    def as_dict(self) -> dict[str, Any]:
        """The row as a JSON object; a row of `turns` has an object for each turn and their pooled statistics."""
        if isinstance(self._row, PromptRow) and self._row.turns is not None:
            turns = [completion.as_dict() for completion in self.completions]
            row: dict[str, Any] = {"id": self.id, "turns": turns, "stats": self.stats().as_dict()}
        else:
            row = self.completions[0].as_dict() if self.completions else {"id": self.id}
        return row if self.error is None else row | {"error": self.error}

    def is_empty(self, tokenizer: Any) -> bool:
        """Whether raw text was given to a model that has a chat template, and the answer is empty."""
        raw_text = isinstance(self._row, PromptRow) and self._row.prompt is not None and not self.requests[-1].chat
        return raw_text and has_chat_template(tokenizer) and not self.completions[-1].text.strip()

    def _next_prompt(self, row: PromptRow, tokenizer: Any) -> tuple[tuple[int, ...], bool]:
        """The prompt of the next turn, and whether it is a chat."""
        if row.token_ids is not None:
            return row.token_ids, False
        if row.prompt is not None and (row.raw or not has_chat_template(tokenizer)):
            return encode_text(tokenizer, row.prompt), False
        said = row.prompt if row.turns is None else row.turns[len(self.completions)]
        if said is not None:
            self._chat.append(Message(role="user", content=said))
        return encode_chat(tokenizer, self._chat), True


def converse(engine: Engine, dialogues: Sequence[Dialogue], params: SamplingParams) -> Iterator[tuple[Dialogue, Chunk]]:
    """Answer all dialogues: every first turn, then every second turn, and so on; yields each round's chunks."""
    unanswered = list(dialogues)
    while unanswered := [dialogue for dialogue in unanswered if dialogue.open]:
        requests = [(dialogue, dialogue.next_request(engine, params)) for dialogue in unanswered]
        running = [(dialogue, request) for dialogue, request in requests if request is not None]
        for chunk in engine.stream([request for _, request in running]):
            dialogue = running[chunk.index][0]
            if chunk.completion is not None:
                dialogue.answer(chunk.completion)
            yield dialogue, chunk


def answered(engine: Engine, dialogues: Sequence[Dialogue], params: SamplingParams) -> Iterator[Dialogue]:
    """Answer all dialogues; yields each, in their order, as soon as it and all before it are finished."""
    finished = 0
    for _, chunk in converse(engine, dialogues, params):
        while chunk.completion is not None and finished < len(dialogues) and not dialogues[finished].open:
            yield dialogues[finished]
            finished += 1
    yield from dialogues[finished:]


def empty_answers(dialogues: Sequence[Dialogue], tokenizer: Any) -> str | None:
    """A warning if raw text was given to a chat model and the answers are empty; None if all is well."""
    empty = sum(dialogue.is_empty(tokenizer) for dialogue in dialogues if dialogue.completions)
    if not empty:
        return None
    return (
        f"{empty} of {len(dialogues)} answers are empty: their prompts are raw text, but there is a chat template; "
        "to apply it, leave out `raw=`, and `raw` in prompt files"
    )


class Conversation:
    """A chat with an engine whose turns reuse the cached prefix; several may share an engine with other requests."""

    def __init__(self, engine: Engine) -> None:
        engine.cache_prefixes(engine.target.max_length or _MAX_TOKENS)
        self._engine = engine

    def turn(self, request: Request, stop: Callable[[], bool] = bool) -> Iterator[Chunk]:
        """Stream the answer to a prompt, which usually continues the previous prompt and its answer.

        Once `stop()` is true (`bool()`: never) the answer ends as `cancelled`, with the text it has.
        """
        yield from self._engine.stream([request], stop)
