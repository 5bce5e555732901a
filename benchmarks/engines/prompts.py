"""The prompts: those of the demo, and chats about this Python's own library, spread over all of it."""

from __future__ import annotations

from typing import Any

from eyas.assets import PROMPTS
from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.text.chats import Message
from eyas.text.template import encode_chat

LONGEST = 300
"""Tokens: what is longer costs time and shows nothing more."""


def make_prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """`count` distinct prompts as token ids, the same ones every time under the same Python."""
    demo = [encode_chat(tokenizer, [Message(role="user", content=text)]) for _, text in PROMPTS]
    chats = [chat for module in library_modules() for chat in chats_of(module)]
    wanted, found = count - len(demo), list[tuple[int, ...]]()
    for number in range(max(wanted, 0)):
        candidates = chats[number * len(chats) // wanted : (number + 1) * len(chats) // wanted]
        encoded = (encode_chat(tokenizer, chat.messages[:1]) for chat in candidates)
        found.append(next(ids for ids in encoded if len(ids) <= LONGEST))
    return [*demo, *found][:count]
