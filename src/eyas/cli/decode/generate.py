"""`eyas generate`: prompts in, text or JSON out."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from eyas.cli.common.build import note_plain, open_engine, sampling_params
from eyas.cli.common.display import StreamedText, note, row_bar, stats_line
from eyas.cli.common.options import BatchSize, DraftOptions, Json, MaybePromptFile, SamplingOptions, TargetOptions
from eyas.cli.common.verb import FAILURE
from eyas.errors import RequestError, UsageError

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.text.dialogue import Dialogue
    from eyas.text.prompts import BadRow, PromptRow
    from eyas.types import SamplingParams


def generate(
    target: TargetOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, Option(help="Text to answer; the chat template is applied if there is one.")] = None,
    prompt_file: MaybePromptFile = None,
    raw: Annotated[bool, Option("--raw", help="Take --prompt as it is: no chat template.")] = False,
    batch_size: BatchSize = 1,
    json: Json = False,
) -> int:
    """Decode prompts; the output is exactly the target's own."""
    from eyas.text.dialogue import Dialogue
    from eyas.text.prompts import read_prompts
    from eyas.types import Request

    _check_source(prompt, prompt_file, raw)
    params = sampling_params(sampling)
    rows = None if prompt_file is None else read_prompts(prompt_file)
    engine = open_engine(target, draft, batch_size)
    note_plain(draft)
    engine.check(Request((0,), params))  # what is wrong with every row is wrong with the options
    if rows is None:
        return _answer_one(engine, Dialogue(_row_of(prompt or "", raw, engine)), params, json)
    return _answer_all(engine, [Dialogue(row) for row in rows], params, json)


def _check_source(prompt: str | None, prompt_file: Path | None, raw: bool) -> None:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE")
    if prompt == "":
        raise UsageError("the prompt is empty: give --prompt some text")
    if raw and prompt is None:
        raise UsageError("--raw is about --prompt; in a file write `prompt` (raw) or `messages` (chat template)")


def _row_of(prompt: str, raw: bool, engine: Engine) -> PromptRow | BadRow:
    """The row that a prompt file would have in place of `--prompt`."""
    from eyas.text.chats import Message
    from eyas.text.prompts import PromptRow

    if raw or not getattr(engine.tokenizer, "chat_template", None):
        return PromptRow("0", "--prompt", prompt=prompt)
    return PromptRow("0", "--prompt", messages=(Message(role="user", content=prompt),))


def _answer_one(engine: Engine, dialogue: Dialogue, params: SamplingParams, json: bool) -> int:
    """Show text as it is written, or JSON at the end."""
    from eyas.text.dialogue import converse

    text = None if json else StreamedText(engine.tokenizer, speculating=engine.speculation is not None)
    for _, chunk in converse(engine, [dialogue], params):
        if text is not None:
            text.add(chunk)
    if dialogue.error is not None:
        raise RequestError(dialogue.error)
    if json:
        _print_json(dialogue)
    else:
        _note_stats(dialogue)
    return 0


def _answer_all(engine: Engine, dialogues: list[Dialogue], params: SamplingParams, json: bool) -> int:
    """Show rows in the order of the file; the bar is for a terminal that doesn't show the rows themselves."""
    with row_bar(len(dialogues), hidden=sys.stdout.isatty()) as advance:
        for dialogue in _in_order(engine, dialogues, params):
            if dialogue.error is not None:
                note(f"error: {dialogue.error}")
            if json:
                _print_json(dialogue)
            elif dialogue.completions:
                typer.echo(f"--- {dialogue.id}")
                typer.echo("\n".join(completion.text for completion in dialogue.completions))
                _note_stats(dialogue)
            advance()
    return FAILURE if any(dialogue.error for dialogue in dialogues) else 0


def _in_order(engine: Engine, dialogues: list[Dialogue], params: SamplingParams) -> Iterator[Dialogue]:
    """Answer all; yield each as soon as it and those before it are finished."""
    from eyas.text.dialogue import converse

    shown = 0
    for _, chunk in converse(engine, dialogues, params):
        while chunk.completion is not None and shown < len(dialogues) and not dialogues[shown].open:
            yield dialogues[shown]
            shown += 1
    yield from dialogues[shown:]


def _print_json(dialogue: Dialogue) -> None:
    typer.echo(jsonlib.dumps(dialogue.as_dict(), ensure_ascii=False))


def _note_stats(dialogue: Dialogue) -> None:
    note(stats_line(dialogue.stats(), any(completion.lossy for completion in dialogue.completions)))
