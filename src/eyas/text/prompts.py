"""Prompt files: JSON Lines, each row a prompt in one of four forms. A bad row is a value, not an exception.

Other keys are allowed: evaluation files carry references, categories and the like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from eyas.errors import DataError, RequestError
from eyas.text.chats import Message
from eyas.text.template import turns_for

KINDS = ("prompt", "messages", "turns", "token_ids")

Text = Annotated[str, StringConstraints(min_length=1)]


class _Row(BaseModel):
    """The keys that are read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    id: str | int | None = None
    question_id: str | int | None = None
    prompt: Text | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    turns: tuple[Text, ...] | None = Field(default=None, min_length=1)
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class PromptRow:
    """What to answer; exactly one of the four forms is given."""

    id: str
    where: str
    """`file:line`, or the option it came from."""
    prompt: str | None = None
    """Raw text, tokenized as it is."""
    messages: tuple[Message, ...] | None = None
    """A chat to continue."""
    turns: tuple[str, ...] | None = None
    """What the user says, turn by turn; each answer goes into the chat."""
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that can't be run, and why (with file and line)."""

    id: str
    error: str


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow | BadRow]:
    """All rows of a file, or the first `limit`; blank lines don't count."""
    try:
        with path.open("rb") as lines:
            rows = list(islice(_rows(lines, path.name), limit))
    except OSError as error:
        raise DataError(f"can't read the prompts {path}: {error.strerror}") from error
    if not rows:
        raise DataError(f"{path} has no rows: write one JSON object a line")
    return rows


def _rows(lines: Iterator[bytes] | Any, name: str) -> Iterator[PromptRow | BadRow]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_row(line, f"{name}:{number}", str(number))


def parse_row(line: bytes | str, where: str, default_id: str) -> PromptRow | BadRow:
    """One row of a file."""
    try:
        row = _Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "row"
        return BadRow(default_id, f"{where}: {place}: {first['msg']}")
    name = next((str(key) for key in (row.id, row.question_id) if key is not None), default_id)
    given = {kind: getattr(row, kind) for kind in KINDS if getattr(row, kind) is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        return BadRow(name, f"{where}: give exactly one of {', '.join(KINDS)}; found {found}")
    return PromptRow(name, where, **given)


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Raw text as the tokenizer takes it, with the special tokens it adds itself."""
    return tuple(tokenizer(text)["input_ids"])


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, **variables: Any
) -> tuple[int, ...]:
    """A chat, up to where the assistant's next answer begins; `variables` are what the template reads besides."""
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("the tokenizer has no chat template: use rows with `prompt` or `token_ids`")
    chat = turns_for(tokenizer, messages)
    schemas = list(tools) if tools else None
    try:
        ids = tokenizer.apply_chat_template(
            chat, tools=schemas, add_generation_prompt=True, return_dict=False, **variables
        )
    except Exception as error:  # templates raise whatever they like
        raise RequestError(f"the chat template refuses this chat: {error}") from error
    return tuple(ids)
