"""The output of one choice as it grows: the engine's chunks in, text out, cut at stop strings.

Text never ends inside a character, and what may be the beginning of a stop string is held back until it is certain.
Speculation makes chunks of other sizes than plain decoding; the text does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eyas.serve.api.schema.request import SamplingFields
from eyas.text.detokenizer import Detokenizer, special_token_ids
from eyas.types import Chunk, PromptLogprobs, Stats, TokenLogprobs


@dataclass(frozen=True)
class ScoredToken:
    """A generated token's log-probabilities, and the offset in the output at which its text begins, in characters.

    Tokens that make up characters only together all begin where these do.
    """

    offset: int
    logprobs: TokenLogprobs


@dataclass
class OutputDelta:
    """What a chunk adds to the output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    """Tokens whose text has begun to be emitted."""


class ChoiceOutput:
    """Detokenizes one sequence and cuts it at stop strings; `finish_reason` is None until the output is complete."""

    def __init__(
        self, tokenizer: Any, body: SamplingFields, kept: frozenset[int] = frozenset(), score_all: bool = False
    ) -> None:
        """`body` says what ends the text and what belongs to it.

        `kept`: special tokens that are part of the text, as the marks of tool calls are.

        `score_all`: report log-probabilities also of tokens that have no text, such as the end token.
        """
        special = special_token_ids(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, special if body.skip_special_tokens is False else kept)
        self._stops = StopStrings(body.stop_strings, included=bool(body.include_stop_str_in_output))
        self._token_by_token, self._score_all = bool(body.stop_strings), score_all
        self._hidden_stops = (
            frozenset() if body.include_stop_str_in_output else (special - kept) | {*(body.stop_token_ids or ())}
        )
        self._detokenized = 0  # characters
        self._emitted = 0  # characters
        self._scored: list[ScoredToken] = []
        self.token_ids: list[int] = []
        """The tokens of the output, the one that ended it included."""
        self.prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
        """Those of the prompt's tokens but the first, from the first chunk on, if they were requested."""
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """The stop string that ended the output, if one did."""
        self.stats: Stats | None = None
        """The sequence's statistics; None until the engine has ended it."""
        self.error: str | None = None

    def add(self, chunk: Chunk) -> OutputDelta:
        """Add a chunk; once the output is complete only its statistics count."""
        delta = OutputDelta()
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        if self.finish_reason is None:
            self._add_tokens(chunk, delta)
        self.token_ids += delta.token_ids
        completion = chunk.completion
        if completion is not None:
            self.stats, self.error = completion.stats, completion.error
            if self.finish_reason is None:
                self._add_text(self._detokenizer.finish(), delta)
                if self.finish_reason is None:
                    self._emit(self._stops.finish(), delta)
                    self.finish_reason = completion.finish_reason
        if self.finish_reason is not None and self._score_all:
            delta.scored += self._scored
            self._scored = []
        return delta

    def _add_tokens(self, chunk: Chunk, delta: OutputDelta) -> None:
        tokens = chunk.token_ids
        stopped = chunk.completion is not None and chunk.completion.finish_reason == "stop"
        shown = len(tokens) - (stopped and bool(tokens) and tokens[-1] in self._hidden_stops)
        if not self._token_by_token and chunk.logprobs is None:
            delta.token_ids += tokens
            self._add_text(self._detokenizer.push(*tokens[:shown]), delta)
            return
        for i, token in enumerate(tokens):
            delta.token_ids.append(token)
            if chunk.logprobs is not None:
                self._scored.append(ScoredToken(self._detokenized, chunk.logprobs[i]))
            if i < shown:
                self._add_text(self._detokenizer.push(token), delta)
            if self.finish_reason is not None:
                return

    def _add_text(self, text: str, delta: OutputDelta) -> None:
        self._detokenized += len(text)
        cut = self._stops.push(text)
        self._emit(cut.text, delta)
        if cut.stop is not None:
            self.finish_reason, self.stop_string = "stop", cut.stop

    def _emit(self, text: str, delta: OutputDelta) -> None:
        delta.text += text
        self._emitted += len(text)
        while self._scored and self._scored[0].offset < self._emitted:
            delta.scored.append(self._scored.pop(0))


class CutText(NamedTuple):
    """Text that may be emitted, and the stop string that ends it."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts a text before the stop string that is complete first, and before the longest of several.

    Stop strings are matched character by character (Knuth-Morris-Pratt), however the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """`included`: cut behind the stop string."""
        self._included = included
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""  # may be the beginning of a stop string

    def push(self, piece: str) -> CutText:
        """Add a piece and return the text up to where a stop string may begin, or begins."""
        if not self._patterns:
            return CutText(piece)
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.step(character)]
            if complete:
                self._held, longest = "", max(complete, key=len)
                return CutText(text[: end if self._included else end - len(longest)], longest)
        kept = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[kept:]
        return CutText(text[:kept])

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """A stop string, and how many of its characters the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # [i] = length of the longest proper border of text[: i + 1]
        border = 0
        for i in range(1, len(text)):
            while border and text[i] != text[border]:
                border = self._fallback[border - 1]
            border += text[i] == text[border]
            self._fallback[i] = border

    def step(self, character: str) -> bool:
        """Add a character; returns whether it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
