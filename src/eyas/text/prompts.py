"""Prompt files of `eyas generate`, `verify` and `bench`: JSON Lines or Parquet, each row a prompt in one of four forms.

A row gives exactly one of `prompt`, `messages`, `turns` and `token_ids`; `raw` may go with `prompt`. Like `--prompt`, a
`prompt` is a user's message, put into the chat template if there is one, unless it is raw. `prediction` may be a text
that the answer is expected to repeat, and `category` may name its subject. Other keys are ignored, since evaluation
files carry references and the like. A bad row becomes a `BadRow`, so that the rows after it are still answered.

SPEED-Bench (arXiv 2604.09557) has such files: `turns`, and as categories the domains of its qualitative split and the
entropy of its throughput splits. A row whose prompt it may not redistribute says so, and is a bad row here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from eyas.errors import DataError
from eyas.files import json_lines, parquet_rows
from eyas.text.chats import Message

_FORMS = ("prompt", "messages", "turns", "token_ids")
_ELSEWHERE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""How SPEED-Bench begins a turn whose text it may not redistribute."""
_UNFETCHED = "its text isn't in the file: NVIDIA's specdec_bench (prepare_data.py) writes a file that has it"

Text = Annotated[str, StringConstraints(min_length=1)]


class _Row(BaseModel):
    """The keys of a row that are read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    id: str | int | None = None
    question_id: str | int | None = None
    prompt: Text | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    turns: tuple[Text, ...] | None = Field(default=None, min_length=1)
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    raw: bool = False
    prediction: Text | None = None
    category: str | None = None


@dataclass(frozen=True)
class PromptRow:
    """One prompt to answer, in exactly one of the four forms."""

    id: str
    where: str
    """`file:line`, or the option it came from."""
    prompt: str | None = None
    """A user's message: the chat template is applied if there is one, unless the row is `raw`."""
    messages: tuple[Message, ...] | None = None
    """A chat that the assistant continues."""
    turns: tuple[str, ...] | None = None
    """User messages, sent one after the other; each answer is appended to the chat before the next."""
    token_ids: tuple[int, ...] | None = None
    raw: bool = False
    """Take `prompt` as it is: a text to continue, without a chat template."""
    prediction: str | None = None
    """What the answers are expected to repeat, such as the old text of a file to edit."""
    category: str | None = None
    """Its subject, as given in the file."""

    @property
    def said(self) -> str | None:
        """The text before the first answer: the prompt, the last message or the first turn; None for token ids."""
        said = self.prompt if self.messages is None else self.messages[-1].content
        return self.turns[0] if self.turns is not None else said


@dataclass(frozen=True)
class BadRow:
    """A row that can't be run; `error` names file, line and reason."""

    id: str
    error: str


def question_of(row: PromptRow, tokenizer: Any) -> str:
    """What a row asks, for readers: its own words, or the last message in its token ids.

    Special tokens delimit the messages of a chat. The last part between them opens the answer; the one before is the
    question, which some templates begin with a line that names the speaker.
    """
    if row.said is not None:
        return row.said
    special = set(tokenizer.all_special_ids)
    parts = [[*tokens] for is_special, tokens in groupby(row.token_ids or (), special.__contains__) if not is_special]
    texts = [text for part in parts if (text := tokenizer.decode(part).strip())]
    question = texts[-2] if len(texts) > 1 else texts[0] if texts else ""
    return question.removeprefix("user\n").strip()


def read_prompts(path: Path, limit: int | None = None, raw: bool = False) -> list[PromptRow | BadRow]:
    """Read all rows of a file, or the first `limit`, skipping blank lines; DataError if it is empty or unreadable.

    `raw` makes every `prompt` a raw one.
    """
    try:
        parquet = (json.dumps(row).encode() for row in parquet_rows(path))
        lines = enumerate(parquet, start=1) if path.suffix == ".parquet" else json_lines(path)
        rows = [parse_row(line, f"{path.name}:{number}", str(number)) for number, line in islice(lines, limit)]
    except OSError as error:
        raise DataError(f"can't read the prompts {path}: {error.strerror or error}") from error
    if not rows:
        raise DataError(f"{path} has no rows: write one JSON object a line")
    return [
        replace(row, raw=True) if raw and isinstance(row, PromptRow) and row.prompt is not None else row for row in rows
    ]


def parse_row(line: bytes | str, where: str, default_id: str) -> PromptRow | BadRow:
    """Parse one line; `where` begins its error message, `default_id` names a row that has no id."""
    try:
        row = _Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "row"
        return BadRow(default_id, f"{where}: {key}: {first['msg']}")
    name = next((str(key) for key in (row.id, row.question_id) if key is not None and str(key).strip()), default_id)
    given = {form: getattr(row, form) for form in _FORMS if getattr(row, form) is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        return BadRow(name, f"{where}: give exactly one of {', '.join(_FORMS)}; found {found}")
    if row.raw and row.prompt is None:
        return BadRow(name, f"{where}: raw is about `prompt`: leave it out, or give a prompt")
    if any(turn.startswith(_ELSEWHERE) for turn in row.turns or ()):
        return BadRow(name, f"{where}: {_UNFETCHED}")
    return PromptRow(name, where, **given, raw=row.raw, prediction=row.prediction, category=row.category)
