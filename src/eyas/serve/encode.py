"""From what a request says to the engine's requests: prompts as tokens, parameters, limits."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.errors import RequestError
from eyas.serve.api.schema.messages import AskedMessage
from eyas.serve.api.schema.sampling import SamplingFields
from eyas.serve.http.errors import ApiError
from eyas.text.template import encode_chat, encode_text
from eyas.types import GrammarSpec, Request, SamplingParams

_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos".split()
)
_JAVASCRIPT_SAFE = 2**53
_MARGIN = 4


@dataclass(frozen=True)
class Job:
    """The sequences of one HTTP request: prompt p's choice j at p * n + j."""

    requests: list[Request]
    n: int
    """Choices of each prompt."""
    seed: int
    prompt_tokens: int
    """Of all prompts, each counted once."""


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[AskedMessage],
    schemas: Sequence[dict[str, Any]],
    template: dict[str, Any] | None = None,
) -> tuple[int, ...]:
    """A chat up to where the answer begins. RequestError where the template refuses it."""
    reserved = set(template or ()) & _reserved(tokenizer)
    if reserved:
        raise ApiError(
            400,
            f"chat_template_kwargs may not set {sorted(reserved)[0]}: only what the template itself reads",
            code="invalid_value",
            param="chat_template_kwargs",
        )
    return encode_chat(tokenizer, [message.as_message() for message in messages], schemas, **(template or {}))


def check_size(tokenizer: Any, characters: int, context: int | None) -> None:
    """ApiError 400 for texts that can't fit whatever they say: tokenizing megabytes takes seconds.

    Text may shrink before it is cut into tokens (composed characters, collapsed spaces), hence the margin.
    """
    if context is not None and characters > _MARGIN * context * _longest_piece(tokenizer):
        message = f"the context holds {context} tokens; a text of {characters} characters has far more: shorten it"
        raise ApiError(400, message, code="context_length_exceeded")


@lru_cache(maxsize=8)
def _longest_piece(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def prompt_tokens(tokenizer: Any, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """A prompt of the completions API."""
    return encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """ApiError 400 for ids that the model doesn't have."""
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        message = f"{param} has id {highest}, the vocabulary has {vocab_size}"
        raise ApiError(400, message, code="invalid_value", param=param)


def job(
    asked: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    *,
    request_id: str,
    context: int | None,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: GrammarSpec | None = None,
) -> Job:
    """The engine's requests. ApiError 400 for what doesn't fit the context."""
    seed = secrets.randbelow(_JAVASCRIPT_SAFE) if asked.seed is None else asked.seed
    n = asked.n or 1
    requests: list[Request] = []
    for prompt in prompts:
        limit = _limit(len(prompt), max_tokens, context)
        for choice in range(n):
            requests.append(
                Request(
                    prompt=tuple(prompt),
                    params=_params(asked, limit, (seed + choice) % 2**63, logprobs),
                    id=f"{request_id}-{len(requests)}",
                    trace=asked.options.trace,
                    speculate=asked.options.speculate,
                    grammar=grammar,
                )
            )
    return Job(requests, n, seed, sum(map(len, prompts)))


def _params(asked: SamplingFields, limit: int, seed: int, logprobs: int | None) -> SamplingParams:
    given = {name: getattr(asked, name) for name in _SAMPLING if getattr(asked, name) is not None}
    if asked.min_tokens is not None and asked.min_tokens > limit:
        raise ApiError(
            400,
            f"min_tokens is {asked.min_tokens}, but at most {limit} tokens may follow",
            code="invalid_value",
            param="min_tokens",
        )
    return SamplingParams(
        **{"temperature": 1.0, **given, "top_k": max(0, asked.top_k or 0)},
        max_tokens=limit,
        seed=seed,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (asked.logit_bias or {}).items()},
        logprobs=logprobs,
    )


def _limit(prompt: int, max_tokens: int | None, context: int | None) -> int:
    """Tokens the answer may have."""
    if prompt == 0:
        raise RequestError("the prompt is empty: give it at least one token")
    if context is None:
        if max_tokens is None:
            raise RequestError("this model's context has no end: say max_tokens")
        return max_tokens
    room = context - prompt
    if room >= (1 if max_tokens is None else max_tokens):
        return room if max_tokens is None else max_tokens
    asked = "" if max_tokens is None else f" and {max_tokens} are asked for: {prompt + max_tokens} in all"
    raise ApiError(
        400,
        f"the context holds {context} tokens; the prompt has {prompt}{asked}: shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
        param="messages" if max_tokens is None else "max_tokens",
    )


def _reserved(tokenizer: Any) -> set[str]:
    return set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
