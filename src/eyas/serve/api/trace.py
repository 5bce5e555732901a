"""Traces of rounds as JSON, for `eyas.trace`: what was drafted, what was accepted, and the texts of the tokens."""

from __future__ import annotations

from typing import Any

from eyas.text.detokenizer import Detokenizer
from eyas.types import Chunk, DraftRound

Json = dict[str, Any]
_LEAST_LOGPROB = -100.0
"""Written instead of smaller log-probabilities: JSON has no infinity."""


class RoundTrace:
    """The trace of one choice for `eyas.trace`; the `pieces` of all its rounds, joined, are the choice's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)

    def fields(self, chunk: Chunk) -> Json:
        """The JSON of one round: `accepted`, `token_ids`, `pieces` and, if a tree was drafted, `draft`.

        The first `accepted` of the tokens were drafted; the one after them is the target's own.
        """
        pieces = [self._detokenizer.push(token) for token in chunk.token_ids]
        if chunk.completion is not None and pieces:
            pieces[-1] += self._detokenizer.finish()
        fields: Json = {"accepted": chunk.accepted, "token_ids": list(chunk.token_ids), "pieces": pieces}
        if chunk.draft is not None:
            fields["draft"] = draft_fields(chunk.draft, self._tokenizer)
        return fields


def draft_fields(draft: DraftRound, tokenizer: Any) -> Json:
    """The JSON of a draft tree: an entry for each node in `tokens`, `parents`, `logprob` and `pieces`.

    `path` lists the accepted nodes, from the root down.
    """
    before = [draft.root if parent < 0 else draft.tokens[parent] for parent in draft.parents]
    return {
        "tokens": list(draft.tokens),
        "parents": list(draft.parents),
        "logprob": [max(round(value, 4), _LEAST_LOGPROB) for value in draft.logprob],
        "path": list(draft.path),
        "pieces": [_piece(tokenizer, *pair) for pair in zip(before, draft.tokens, strict=True)],
    }


def _piece(tokenizer: Any, before: int, token: int) -> str:
    """A node's text after its parent's, which decides about a leading space; special tokens by their names."""
    shared = len(tokenizer.decode([before]))
    text: str = tokenizer.decode([before, token])[shared:]
    return text
