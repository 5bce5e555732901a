"""`eyas generate`: prompts in, text or JSON out."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from eyas.cli.common.answers import StreamedText, note_cut, note_stats, wrapped
from eyas.cli.common.build import open_engine, sampling_params
from eyas.cli.common.display import note, row_bar
from eyas.cli.common.options import BatchSize, ChatTargetOptions, DraftOptions, Json, MaybePromptFile, SamplingOptions
from eyas.cli.common.verb import FAILURE
from eyas.drafters.options import PREDICTION
from eyas.errors import DataError, RequestError, UsageError
from eyas.files import read_text

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.text.dialogue import Dialogue
    from eyas.types import SamplingParams


def generate(
    target: ChatTargetOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, Option(help="The user's message; the chat template is applied if there is one.")
    ] = None,
    prompt_file: MaybePromptFile = None,
    raw: Annotated[
        bool, Option("--raw", help="Use --prompt, or every `prompt` of the file, as it is: no chat template.")
    ] = False,
    suffix: Annotated[
        str | None, Option(help="What follows --prompt after a gap: the answer fills it, without the chat template.")
    ] = None,
    prediction: Annotated[
        Path | None,
        Option(
            exists=True, dir_okay=False, help="A text that the answer to --prompt repeats in part: drafts copy from it."
        ),
    ] = None,
    batch_size: BatchSize = 1,
    json: Json = False,
) -> int:
    """Decode prompts; the output is exactly the target's own.

    Examples:
        eyas generate MODEL --prompt "What is an eyas?" --draft-model DRAFTER
        eyas generate FILE.gguf --prompt-file prompts.jsonl --method ngram --json
        eyas generate MODEL --prompt "Add docstrings: $(cat old.py)" --prediction old.py
    """
    from eyas.text.dialogue import Dialogue, empty_answers
    from eyas.text.fill import encode_fill, fill_format
    from eyas.text.prompts import PromptRow, read_prompts
    from eyas.text.template import NO_TOKENIZER
    from eyas.types import Request

    _check_source(prompt, prompt_file)
    if suffix is not None and prompt is None:
        raise UsageError("--suffix follows a --prompt: give one, not --prompt-file")
    if prediction is not None and prompt is None:
        raise UsageError("--prediction is about a --prompt: rows of a --prompt-file have `prediction`")
    params = sampling_params(sampling)
    expected = None if prediction is None else _predicted(prediction)
    rows = read_prompts(prompt_file, raw=raw) if prompt_file else []
    asked = [] if prompt_file else [PromptRow("0", "--prompt", prompt=prompt, raw=raw, prediction=expected)]
    predicts = any(isinstance(row, PromptRow) and row.prediction for row in (*rows, *asked))
    if draft == DraftOptions() and predicts:
        draft = replace(draft, method=PREDICTION)
    elif draft.method == PREDICTION and not predicts:
        raise UsageError(f"method {PREDICTION} copies from a prediction: give --prediction FILE")
    if raw and rows and not any(isinstance(row, PromptRow) and row.raw for row in rows):
        raise UsageError(f"--raw is about `prompt`: {prompt_file} has no row with one")
    engine = open_engine(target, draft, batch_size)
    engine.check(Request((0,), params))  # an error in every row is an error in the options
    if engine.tokenizer is None and not json:
        raise UsageError(f"{NO_TOKENIZER}: `token_ids` rows in a --prompt-file, and --json")
    if suffix and prompt is not None:
        filled = encode_fill(engine.tokenizer, fill_format(engine.tokenizer), prompt, suffix)
        asked = [PromptRow("0", "--prompt", token_ids=filled, prediction=expected)]
    dialogues = [Dialogue(row) for row in (*asked, *rows)]
    if asked:
        _answer_one(engine, dialogues[0], params, json)
    else:
        _answer_all(engine, dialogues, params, json)
    warning = empty_answers(dialogues, engine.tokenizer)
    if warning is not None:
        note(f"warning: {warning}")
    return FAILURE if any(dialogue.error for dialogue in dialogues) else 0


def _predicted(path: Path) -> str | None:
    """The text of a file; None if it is empty. Raises DataError."""
    try:
        return read_text(path) or None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path} as text: {error}") from error


def _check_source(prompt: str | None, prompt_file: Path | None) -> None:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE")
    if prompt == "":
        raise UsageError("the prompt is empty: give --prompt some text")


def _answer_one(engine: Engine, dialogue: Dialogue, params: SamplingParams, json: bool) -> None:
    """Show text as it is written, or JSON at the end."""
    from eyas.text.dialogue import converse

    text = None if json else StreamedText(engine.tokenizer, speculating=engine.speculation is not None)
    for _, chunk in converse(engine, [dialogue], params):
        if text is not None:
            text.add(chunk)
    if dialogue.error is not None:
        raise RequestError(dialogue.error)
    if json:
        typer.echo(jsonlib.dumps(dialogue.as_dict(), ensure_ascii=False))
    else:
        note_cut(dialogue.completions, params.max_tokens)
        note_stats(dialogue.completions)


def _answer_all(engine: Engine, dialogues: list[Dialogue], params: SamplingParams, json: bool) -> None:
    """Show rows in the order of the file; a bar is drawn only if the rows themselves don't go to the terminal."""
    from eyas.text.dialogue import answered

    with row_bar(len(dialogues), hidden=sys.stdout.isatty()) as advance:
        for dialogue in answered(engine, dialogues, params):
            if dialogue.error is not None:
                note(f"error: {dialogue.error}")
            if json:
                typer.echo(jsonlib.dumps(dialogue.as_dict(), ensure_ascii=False))
            elif dialogue.completions:
                typer.echo(f"--- {dialogue.id}")
                text = "\n".join(completion.text for completion in dialogue.completions)
                typer.echo(wrapped(text) if sys.stdout.isatty() else text)
                note_stats(dialogue.completions)
            advance()
    if not json:
        note_cut([each for dialogue in dialogues for each in dialogue.completions], params.max_tokens)
