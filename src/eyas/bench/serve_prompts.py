"""What a load generator asks: rows of prompt files as requests of the OpenAI API."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.chats import Message
from eyas.data.prompts import BadRow, PromptRow, encode_chat, encode_text, read_prompts
from eyas.data.regenerate.completions import as_sent, sampling_fields
from eyas.errors import DataError
from eyas.types import SamplingParams

CHAT, TEXT = "/chat/completions", "/completions"


@dataclass(frozen=True)
class Item:
    """A prompt on its way."""

    id: str
    path: str
    """`/chat/completions` or `/completions`."""
    prompt: dict[str, Any]
    """The body's `messages` or `prompt`."""
    tokens: int | None = None
    """Most tokens of its answer; None = what the sampling parameters say."""

    def body(self, model: str, params: SamplingParams, number: int) -> dict[str, Any]:
        """The request, streamed; request `number` is asked with its own seed."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        most = {} if self.tokens is None else {"max_tokens": self.tokens}
        return {"model": model, **self.prompt, **sampling_fields(params, params.seed + number), **most, **streamed}


def read_items(paths: Sequence[Path], limit: int | None, seed: int, tokenizer: Any = None) -> list[Item]:
    """All rows of all files, in one seeded order. Of a row with `turns` the first is asked.

    With a tokenizer its chat template is applied here and every prompt is sent as token ids, so that servers which
    render chats differently still get the same prompt. Raises DataError for a row that can't be read.
    """
    items = []
    for path in dict.fromkeys(paths):
        for row in read_prompts(path, limit):
            if isinstance(row, BadRow):
                raise DataError(row.error)
            items.append(item_of(row, f"{path.stem}:{row.id}", tokenizer))
    random.Random(seed).shuffle(items)
    return items


def item_of(row: PromptRow, name: str, tokenizer: Any, answers: Sequence[str] = ()) -> Item:
    """The request of a row after so many of its turns were answered. RequestError if the template refuses the chat."""
    if row.token_ids is not None:
        return Item(name, TEXT, {"prompt": list(row.token_ids)})
    if row.prompt is not None:
        text = row.prompt if tokenizer is None else list(encode_text(tokenizer, row.prompt))
        return Item(name, TEXT, {"prompt": text})
    messages = list(row.messages or ())
    for number, turn in enumerate((row.turns or ())[: len(answers) + 1]):
        messages += [Message(role="assistant", content=answers[number - 1])] if number else []
        messages.append(Message(role="user", content=turn))
    if tokenizer is not None:
        return Item(name, TEXT, {"prompt": list(encode_chat(tokenizer, messages))})
    return Item(name, CHAT, {"messages": [as_sent(message) for message in messages]})
