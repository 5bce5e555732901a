"""From an API request to the engine's requests: prompts as token ids, sampling parameters, context limits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from eyas.errors import RequestError
from eyas.serve.errors import ApiError
from eyas.serve.schema.chat import ChatCompletionRequest
from eyas.serve.schema.messages import RequestMessage
from eyas.serve.schema.request import GenerationRequest
from eyas.text.template import encode_chat, encode_text, required, template_variables
from eyas.types import GrammarSpec, Request, SamplingParams

_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos".split()
)
_FOR_TEMPLATES = ("reasoning_effort", "enable_thinking")
"""Fields of chats that some templates read as variables."""
_RANDOM = -1
"""A seed that asks for a random one, as in llama.cpp and vLLM."""
_JAVASCRIPT_SAFE = 2**53
"""Seeds drawn here stay below it: larger integers lose digits in JavaScript."""
_MAX_COMPRESSION = 4
"""Factor by which normalization may shorten a text before it is tokenized (composed characters, collapsed spaces)."""


@dataclass(frozen=True)
class EncodedRequest:
    """The engine's requests for one HTTP request: choice j of prompt p is `sequences[p * n + j]`."""

    sequences: list[Request]
    n: int
    """How many choices each prompt has."""
    seed: int
    """The seed of each prompt's first choice; choice j has seed + j."""
    prompt_tokens: int
    """Tokens of all prompts, each prompt counted once."""


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[RequestMessage],
    tools: Sequence[dict[str, Any]],
    chat_template_kwargs: dict[str, Any] | None = None,
    **rendering: bool,
) -> tuple[int, ...]:
    """Tokenize a chat up to where the answer begins, with the switches of `encode_chat`, which may raise RequestError.

    Raises ApiError 400 for a variable in `chat_template_kwargs` that the template doesn't take from it.
    """
    if chat_template_kwargs:
        readable = template_variables(required(tokenizer), tools)
        for name in chat_template_kwargs.keys() - readable:
            takes = ", ".join(sorted(readable)) or "nothing"
            message = (
                f"chat_template_kwargs may not set {name[:100]!r}: this model's chat template takes {takes} from it"
            )
            raise ApiError(400, message, code="invalid_value", param=f"chat_template_kwargs.{name[:100]}")
    chat = [message.as_message() for message in messages]
    return encode_chat(tokenizer, chat, tools, variables=chat_template_kwargs, **rendering)


def template_settings(
    tokenizer: Any, body: ChatCompletionRequest, tools: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the variables for a chat's template, and the fields that the template doesn't read, with the reason.

    `chat_template_kwargs` takes precedence over the fields that clients set for every model.
    """
    given = {name: value for name in _FOR_TEMPLATES if (value := getattr(body, name)) is not None}
    if not given:
        return dict(body.chat_template_kwargs or {}), []
    readable = template_variables(tokenizer, tools)
    unread = [(name, "this model's chat template doesn't read it") for name in given if name not in readable]
    read = {name: value for name, value in given.items() if name in readable}
    return read | (body.chat_template_kwargs or {}), unread


def completion_prompt(tokenizer: Any, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Tokenize a prompt of the completions API, unless it is token ids already."""
    return encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokenize bad words as vLLM does: each at the start of a text, and after a space if its token absorbs that.

    Raises RequestError for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        first, spaced = (
            tuple(tokenizer(space + word.lstrip(), add_special_tokens=False)["input_ids"]) for space in ("", " ")
        )
        if not first:
            raise RequestError(f"bad_words has {word!r}, which has no tokens")
        found.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found.append(spaced)
    return tuple(found)


def characters_in(*values: Any) -> int:
    """Count the characters of all strings in JSON values, field names included."""
    count = 0
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return count


def check_size(tokenizer: Any, characters: int, context: int | None) -> None:
    """Raise ApiError 400 for a text that can't fit the context: tokenizing megabytes would take seconds."""
    if characters == 0:
        return
    if context is not None and characters > _MAX_COMPRESSION * context * _longest_piece(required(tokenizer)):
        message = f"the context holds {context} tokens; a text of {characters} characters has far more: shorten it"
        raise ApiError(400, message, code="context_length_exceeded")


def check_token_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError 400 for token ids outside the vocabulary."""
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        message = f"{param} has id {highest}, but the vocabulary has only {vocab_size} tokens"
        raise ApiError(400, message, code="invalid_value", param=param)


class EncodingOptions(NamedTuple):
    """What a body asks for that the two APIs express differently, or that had to be processed first."""

    max_tokens: int | None
    logprobs: int | None
    """How many alternatives; None = no log-probabilities."""
    prompt_logprobs: int | None
    bad_words: tuple[tuple[int, ...], ...]
    """Tokenized by `bad_word_ids`."""
    grammar: GrammarSpec | None
    chat: bool = False
    prediction: tuple[int, ...] = ()
    shorten: bool = False
    """Whether to lower `max_tokens` to what fits the context instead of raising."""


def encode_request(
    body: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    wanted: EncodingOptions,
    *,
    request_id: str,
    context: int | None,
    default_seed: int | None,
) -> EncodedRequest:
    """Make the engine's requests from tokenized prompts. Raises ApiError 400 if they don't fit the `context`.

    A body without a seed gets `default_seed`, or else a random one.
    """
    seed = default_seed if body.seed in (None, _RANDOM) else body.seed
    if seed is None:
        seed = secrets.randbelow(_JAVASCRIPT_SAFE)
    n = body.n or 1
    sequences: list[Request] = []
    for prompt in prompts:
        answer_tokens = _answer_tokens(len(prompt), wanted.max_tokens, context, wanted.shorten)
        for choice in range(n):
            sequences.append(
                Request(
                    prompt=tuple(prompt),
                    params=_sampling_params(
                        body,
                        max_tokens=answer_tokens,
                        seed=(seed + choice) % 2**63,
                        logprobs=wanted.logprobs,
                        prompt_logprobs=wanted.prompt_logprobs,
                        bad_words_ids=wanted.bad_words,
                    ),
                    id=f"{request_id}-{len(sequences)}",
                    trace=body.options.trace,
                    speculate=body.options.speculate,
                    grammar=wanted.grammar,
                    chat=wanted.chat,
                    prediction=wanted.prediction,
                )
            )
    return EncodedRequest(sequences, n, seed, sum(map(len, prompts)))


def _sampling_params(body: GenerationRequest, *, max_tokens: int, **given: Any) -> SamplingParams:
    given |= {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens is {body.min_tokens}, but at most {max_tokens} tokens may follow",
            code="invalid_value",
            param="min_tokens",
        )
    given = {"temperature": 1.0, **given, "top_k": max(0, body.top_k or 0)}
    if body.top_p == 0:  # nothing but the most likely token, as in llama.cpp
        given |= {"top_p": 1.0, "top_k": 1}
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
    )


def _answer_tokens(prompt: int, max_tokens: int | None, context: int | None, shorten: bool) -> int:
    """How many tokens the answer to a prompt of this length may have."""
    if prompt == 0:
        raise RequestError("the prompt is empty: give it at least one token")
    if context is None:
        if max_tokens is None:
            raise RequestError("this model's context is unlimited: set max_tokens")
        return max_tokens
    room = context - prompt
    if room >= (1 if max_tokens is None or shorten else max_tokens):
        return room if max_tokens is None else min(room, max_tokens)
    wanted = (
        "" if max_tokens is None or shorten else f", and {max_tokens} more are requested: {prompt + max_tokens} in all"
    )
    raise ApiError(
        400,
        f"the context holds {context} tokens; the prompt has {prompt}{wanted}: shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
        param="messages" if max_tokens is None else "max_tokens",
    )


@lru_cache(maxsize=8)
def _longest_piece(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))
