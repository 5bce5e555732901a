"""`eyas generate`: prompts in, text or JSON out."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from eyas.cli.common.build import open_engine, sampling_params
from eyas.cli.common.display import StreamedText, note, stats_line
from eyas.cli.common.guard import FAILURE
from eyas.cli.common.options import BatchSize, DraftOptions, Json, MaybePromptFile, SamplingOptions, TargetOptions
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
    engine.check(Request((0,), params))  # what is wrong with every row is wrong with the options
    dialogues = [Dialogue(row) for row in rows or [_option_row(prompt or "", raw, engine)]]
    if rows is None:
        return _answer_one(engine, dialogues[0], params, json)
    return _answer_all(engine, dialogues, params, json)


def _check_source(prompt: str | None, prompt_file: Path | None, raw: bool) -> None:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE")
    if prompt == "":
        raise UsageError("the prompt is empty: give --prompt some text")
    if raw and prompt is None:
        raise UsageError("--raw is about --prompt; in a file write `prompt` (raw) or `messages` (chat template)")


def _option_row(text: str, raw: bool, engine: Engine) -> PromptRow | BadRow:
    from eyas.text.chats import Message
    from eyas.text.prompts import PromptRow

    if raw or not getattr(engine.tokenizer, "chat_template", None):
        return PromptRow("0", "--prompt", prompt=text)
    return PromptRow("0", "--prompt", messages=(Message(role="user", content=text),))


def _answer_one(engine: Engine, dialogue: Dialogue, params: SamplingParams, json: bool) -> int:
    from eyas.text.dialogue import converse

    live = None if json else StreamedText(engine.tokenizer, speculating=engine.speculation is not None)
    for _, chunk in converse(engine, [dialogue], params):
        if live is not None:
            live.add(chunk)
    if dialogue.error is not None:
        raise RequestError(dialogue.error)
    _show(dialogue, json, header=False, text=False)
    return 0


def _answer_all(engine: Engine, dialogues: list[Dialogue], params: SamplingParams, json: bool) -> int:
    """Rows are shown in the order of the file, each as soon as those before it are done."""
    from eyas.text.dialogue import converse

    shown = 0
    with _progress(len(dialogues)) as advance:
        for _, chunk in converse(engine, dialogues, params):
            if chunk.completion is None:
                continue
            while shown < len(dialogues) and not dialogues[shown].open:
                _show(dialogues[shown], json, header=True, text=True)
                shown += 1
                advance()
    for dialogue in dialogues[shown:]:
        _show(dialogue, json, header=True, text=True)
    return FAILURE if any(dialogue.error for dialogue in dialogues) else 0


def _show(dialogue: Dialogue, json: bool, *, header: bool, text: bool) -> None:
    if dialogue.error is not None:
        note(f"error: {dialogue.error}")
    if json:
        typer.echo(jsonlib.dumps(dialogue.as_dict(), ensure_ascii=False))
        return
    if not dialogue.completions:
        return
    if header:
        typer.echo(f"--- {dialogue.id}")
    if text:
        typer.echo("\n".join(completion.text for completion in dialogue.completions))
    note(stats_line(dialogue.stats(), any(completion.lossy for completion in dialogue.completions)))


@contextmanager
def _progress(rows: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while standard output goes elsewhere (else the rows themselves are the progress)."""
    from rich.console import Console
    from rich.progress import Progress

    hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=hidden, redirect_stdout=False) as bar:
        task = bar.add_task("rows", total=rows)
        yield lambda: bar.advance(task)
