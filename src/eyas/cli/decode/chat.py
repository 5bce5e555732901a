"""`eyas chat`: a conversation whose cache is kept between turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from eyas.cli.common.build import note_plain, open_engine, sampling_params
from eyas.cli.common.display import StreamedText, note, stats_line
from eyas.cli.common.options import ChatTargetOptions, DraftOptions, SamplingOptions
from eyas.cli.common.verb import FAILURE
from eyas.errors import RequestError, UsageError


def chat(
    target: ChatTargetOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, Option(help="System message.")] = None,
) -> int:
    """Chat with the target. /reset starts over; /exit, or the end of the input, leaves."""
    from eyas.text.chats import Message
    from eyas.text.dialogue import Conversation
    from eyas.text.template import NO_TOKENIZER, encode_chat, has_chat_template
    from eyas.types import Request

    params = sampling_params(sampling)
    engine = open_engine(target, draft, batch_size=1)
    note_plain(draft)
    if engine.tokenizer is None:
        raise UsageError(NO_TOKENIZER)
    if not has_chat_template(engine.tokenizer):
        raise UsageError(f"the tokenizer of {target.model} has no chat template: use eyas generate")
    engine.check(Request((0,), params))
    conversation = Conversation(engine)
    opening = [] if system is None else [Message(role="system", content=system)]
    messages, code = list(opening), 0
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            note("(a new conversation)")
            continue
        try:
            chat = [*messages, Message(role="user", content=line)]
            request = Request(encode_chat(engine.tokenizer, chat), params, chat=True)
            engine.check(request)
        except RequestError as error:
            note(f"error: {error} (/reset starts over)")
            code = FAILURE
            continue
        text = StreamedText(engine.tokenizer, speculating=engine.speculation is not None)
        for chunk in conversation.turn(request):
            text.add(chunk)
            if chunk.completion is not None:
                messages = [*chat, Message(role="assistant", content=chunk.completion.text)]
                note(stats_line(chunk.completion.stats, chunk.completion.lossy, chunk.completion.seeded))
    return code


def _lines() -> Iterator[str]:
    """Lines of standard input that aren't empty; a prompt sign is shown if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
