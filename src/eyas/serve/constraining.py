"""What an answer must look like: out of a request's fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from eyas.serve.structured import grammar_from_request
from eyas.serve.wire.sampling import SamplingFields
from eyas.types import GrammarSpec


def grammar_of(asked: SamplingFields) -> GrammarSpec | None:
    """The grammar that a request's fields ask for. RequestError."""
    return grammar_from_request(
        _as_sent(getattr(asked, "response_format", None)),
        _as_sent(asked.structured_outputs),
        guided_json=asked.guided_json,
        guided_regex=asked.guided_regex,
        guided_choice=asked.guided_choice,
        guided_grammar=asked.guided_grammar,
    )


def _as_sent(part: BaseModel | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json", by_alias=True, exclude_none=True)
