"""Chats for one target: rendered, their answers marked, and within a length."""

from __future__ import annotations

import hashlib
from typing import Any

from eyas.assets import named_target
from eyas.data.chats import Chat
from eyas.data.tokenize import ChatTokenizer
from eyas.errors import RowError

TOO_LONG = "too long"
FEW_TOKENS = "too few answer tokens"
FOREIGN = "tokens of another target"


class ChatFitter:
    """Gives chats their tokens and answers; RowError for those that don't fit."""

    def __init__(self, model: str, max_length: int | None, cut: bool, min_answer_tokens: int) -> None:
        """Loads the target's tokenizer only."""
        from eyas.target import load_tokenizer

        self._tokenizer = tokenizer = load_tokenizer(model)
        stops = _generation_stops(model)
        self._chats = ChatTokenizer(tokenizer, stops)
        self._max_length, self._cut, self._min_answer_tokens = max_length, cut, min_answer_tokens
        told = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), str(stops))
        self.identity = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
        """Of everything that decides how a chat is rendered."""
        self.end_mark = self._chats.end_mark

    def fit(self, chat: Chat) -> tuple[Chat, bool]:
        """The chat with tokens and answers, and whether it lost turns. One without any answer stays as it is."""
        if not any(message.role == "assistant" for message in chat.messages):
            return chat, False
        if chat.tokens is not None:
            self._check_own(chat)
        exact = self._chats.exact(chat)
        fitted = exact if self._fits(exact) else self._shortened(exact)
        count = sum(stop - start for start, stop in fitted.answers or ())
        if count < self._min_answer_tokens:
            raise RowError(FEW_TOKENS, f"{count} answer tokens, fewer than {self._min_answer_tokens}")
        return fitted, fitted is not exact

    def _check_own(self, chat: Chat) -> None:
        """RowError if the tokens that a chat carries don't say, to this tokenizer, what its last answer says."""
        said = next(message.content or "" for message in reversed(chat.messages) if message.role == "assistant")
        known = max(chat.tokens or (0,)) < len(self._tokenizer)
        if not known or said.strip() not in self._tokenizer.decode(chat.tokens):
            raise RowError(FOREIGN, "its tokens don't hold its last answer: prepare the chats without them")

    def _fits(self, chat: Chat) -> bool:
        return self._max_length is None or len(chat.tokens or ()) <= self._max_length

    def _shortened(self, chat: Chat) -> Chat:
        """The most turns that fit, up to and with an answer; rendered anew, as a template may see the end of a chat."""
        if self._cut:
            bare = chat.model_copy(update={"tokens": None, "answers": None})
            ends = [i + 1 for i, message in enumerate(chat.messages) if message.role == "assistant"]
            for end in reversed(ends):
                shorter = self._chats.exact(bare.model_copy(update={"messages": chat.messages[:end]}))
                if self._fits(shorter):
                    return shorter
        raise RowError(TOO_LONG, f"{len(chat.tokens or ())} tokens, more than {self._max_length}")


def _generation_stops(model: str) -> list[int]:
    """The end tokens of the target's generation config, if it has one."""
    from transformers import GenerationConfig

    try:
        stops: Any = GenerationConfig.from_pretrained(named_target(model)).eos_token_id
    except OSError:
        return []
    return [stops] if isinstance(stops, int) else list(stops or ())
