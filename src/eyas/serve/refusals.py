"""Fields of OpenAI's API that this server does not serve, and why. Null, their default, says nothing and is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TEXT_ONLY = "eyas serves text"
_TOOLS = "write tools and tool_choice instead"

REFUSED: dict[str, str] = {
    "audio": _TEXT_ONLY,
    "modalities": f'{_TEXT_ONLY}: leave it out or send ["text"]',
    "best_of": "answers aren't ranked: ask for n of them",
    "suffix": "text is only continued, never filled in",
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "metadata": "nothing is stored: leave it out or send {}",
    "moderation": "nothing is moderated",
    "prediction": "a drafter guesses ahead already",
    "prompt_cache_key": "shared prefixes are found by themselves",
    "prompt_cache_retention": "shared prefixes are found by themselves",
    "prompt_cache_options": "shared prefixes are found by themselves",
    "reasoning_effort": "the chat template decides, through chat_template_kwargs",
    "service_tier": "there is one tier: leave it out or send auto or default",
    "store": "nothing is stored: leave it out or send false",
    "verbosity": "models here have no such setting",
    "web_search_options": "there is no search: offer one as a tool",
}


def without_nulls(body: Any) -> Any:
    """The body without refused fields that are null."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if value is not None or name not in REFUSED}


def reason_for(where: Sequence[str]) -> str | None:
    """Why a field isn't served; None if it is, or if nobody knows it."""
    return REFUSED.get(where[0]) if where else None
