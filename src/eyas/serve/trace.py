"""What a traced request is told about each round: its tokens one by one, and the draft tree they came from."""

from __future__ import annotations

from typing import Any

from eyas.data.detokenizer import Detokenizer
from eyas.types import Chunk, DraftRound

_LEAST = -100.0  # JSON has no infinity


class Tracer:
    """The trace of one answer; `pieces` of all its chunks, joined, are the answer's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)

    def fields(self, chunk: Chunk) -> dict[str, Any]:
        """The JSON of one chunk: `accepted`, `token_ids`, `pieces` and, if a tree was offered, `draft`.

        The first `accepted` of the tokens were drafted, the one after them is the target's own.
        """
        pieces = [self._text.push(token) for token in chunk.token_ids]
        if chunk.completion is not None and pieces:
            pieces[-1] += self._text.finish()
        found: dict[str, Any] = {"accepted": chunk.accepted, "token_ids": list(chunk.token_ids), "pieces": pieces}
        if chunk.draft is not None:
            found["draft"] = draft_fields(chunk.draft, self._tokenizer)
        return found


def draft_fields(draft: DraftRound, tokenizer: Any) -> dict[str, Any]:
    """A tree's JSON: one entry a node in `tokens`, `parents`, `logprob`, `pieces`; `path` = the accepted nodes."""
    before = [draft.root if parent < 0 else draft.tokens[parent] for parent in draft.parents]
    return {
        "tokens": list(draft.tokens),
        "parents": list(draft.parents),
        "logprob": [max(round(value, 4), _LEAST) for value in draft.logprob],
        "path": list(draft.path),
        "pieces": [_piece(tokenizer, *pair) for pair in zip(before, draft.tokens, strict=True)],
    }


def _piece(tokenizer: Any, before: int, token: int) -> str:
    """A node's text behind its parent's, which decides about a leading space; special tokens by their names."""
    shared = len(tokenizer.decode([before]))
    text: str = tokenizer.decode([before, token])[shared:]
    return text
