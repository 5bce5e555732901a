"""llama-server's own routes, which editors call: `/completion`, `/infill`, `/props`, `/apply-template`.

Everything is decoded as for `/v1/completions`. This file translates the names, and adds what only these routes have:
limits on indentation and time, and timings.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import eyas
from eyas.serve.api.chat import read_chat, start_completion
from eyas.serve.api.encode import characters_in, check_size, check_token_ids
from eyas.serve.api.generation import ChoiceStep, Generation, ScoredToken
from eyas.serve.api.logprobs import TokenTexts, chat_logprobs
from eyas.serve.context import Context, Info, RequestInfo, ServerContext
from eyas.serve.errors import translating
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.schema.chat import CompletionRequest
from eyas.serve.schema.llama import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    InfillRequest,
    LlamaChunk,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaRequest,
    LlamaSelection,
)
from eyas.serve.schema.request import ignored_fields
from eyas.serve.schema.response import ERRORS_OF_READS, WITH_BODY, error_responses, generation_responses
from eyas.serve.tools.calling import tool_calling
from eyas.text.fill import ExtraFile, encode_fill, fill_format
from eyas.text.template import encode_text, required
from eyas.types import Stats

router = APIRouter(route_class=JsonRoute)
COMPLETION, INFILL = "/completion", "/infill"
_KEPT_AROUND_GAP = (1536, 510)
"""The tokens before and after a gap that are kept, as in llama-server: an editor waits for them to be read."""
Json = dict[str, Any]


@router.post(COMPLETION, responses=generation_responses(LlamaCompletion | LlamaSelection, LlamaChunk))
async def complete(body: LlamaCompletionRequest, context: Context, info: Info) -> Response:
    """Continue a prompt, as llama-server does."""
    completion = _completion(body, context)
    tokenizer, given = context.engine.tokenizer, body.prompt
    size = characters_in(given)
    check_size(tokenizer, size, context.max_model_len)
    parts = [given] if isinstance(given, str) else list(given)
    check_token_ids([part for part in parts if isinstance(part, int)], context.engine.target.vocab_size, "prompt")
    prompt = await context.in_worker(_mixed, tokenizer, parts, characters=size, info=info)
    return await _respond(body, completion, prompt, context, info, COMPLETION)


@router.post(INFILL, responses=generation_responses(LlamaCompletion | LlamaSelection, LlamaChunk))
async def infill(body: InfillRequest, context: Context, info: Info) -> Response:
    """Fill the gap at an editor's cursor."""
    completion = _completion(body, context)
    tokenizer = required(context.engine.tokenizer)
    form = fill_format(tokenizer, context.settings.fim_tokens)
    size = characters_in(body.input_prefix, body.input_suffix, body.prompt, [file.text for file in body.input_extra])
    check_size(tokenizer, size, context.max_model_len)
    fill = partial(
        encode_fill,
        extra=[ExtraFile(file.filename, file.text) for file in body.input_extra],
        begun=body.prompt,
        named=True,
        max_context=_KEPT_AROUND_GAP,
    )
    prompt = await context.in_worker(
        fill, tokenizer, form, body.input_prefix, body.input_suffix, characters=size, info=info
    )
    return await _respond(body, completion, prompt, context, info, INFILL)


@router.get("/props", responses=error_responses(*ERRORS_OF_READS, 503))
async def props(context: Context) -> Json:
    """Describe the server, in llama-server's form."""
    tokenizer = context.engine.tokenizer
    return {
        "default_generation_settings": {"n_ctx": context.max_model_len, "params": {}},
        "total_slots": 1,  # sequences have no slots of their own here: every request may use slot 0
        "model_alias": context.settings.model_names[0],
        "model_path": context.settings.model_names[0],
        "modalities": {"vision": False, "audio": False},
        "chat_template": str(getattr(tokenizer, "chat_template", None) or ""),
        "bos_token": str(getattr(tokenizer, "bos_token", None) or ""),
        "eos_token": str(getattr(tokenizer, "eos_token", None) or ""),
        "build_info": f"eyas {eyas.__version__}",
    }


@router.post("/apply-template", response_model=ApplyTemplateResponse, responses=error_responses(*WITH_BODY))
async def apply_template(body: ApplyTemplateRequest, context: Context, info: Info) -> Json:
    """Write a chat as the model's template does, up to where the answer begins."""
    context.check_model(body.model)
    context.log_ignored(ignored_fields(body))
    tokenizer = required(context.engine.tokenizer)
    ids = await read_chat(body, context, info, tool_calling(body, tokenizer))
    return {"prompt": await context.in_worker(tokenizer.decode, ids, characters=4 * len(ids), info=info)}


def _mixed(tokenizer: Any, parts: Sequence[str | int]) -> tuple[int, ...]:
    """The tokens of a sequence of texts and token ids; only a text at the beginning gets special tokens."""
    found: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            found.append(part)
        elif at == 0:
            found += encode_text(tokenizer, part)
        else:
            found += required(tokenizer)(part, add_special_tokens=False)["input_ids"]
    return tuple(found)


def _completion(body: LlamaRequest, context: ServerContext) -> CompletionRequest:
    """The same request with OpenAI's names; what is ignored is logged. Raises ApiError for another model."""
    context.check_model(body.model)
    with translating(body.model_dump()):
        completion = body.completion(context.settings.model_names[0])
    context.log_ignored(ignored_fields(body))
    context.log_ignored(ignored_fields(completion))
    return completion


async def _respond(
    body: LlamaRequest,
    completion: CompletionRequest,
    prompt: tuple[int, ...],
    context: ServerContext,
    info: RequestInfo,
    endpoint: str,
) -> Response:
    generation = await start_completion(completion, [prompt], context, info, endpoint=endpoint)
    writer = LlamaWriter(body, completion, generation)
    return await respond(
        writer, stream=completion.stream, write_seconds=context.settings.write_seconds, ends_itself=True
    )


class LineLimits:
    """Ends a text before a line that is indented too little, or after some time once a line is complete."""

    def __init__(self, indent: int, milliseconds: int) -> None:
        """At least `indent` characters of indentation, and at most this many `milliseconds`; 0 = no limit."""
        self._indent = indent
        self._milliseconds = milliseconds
        self._began = time.monotonic()
        self._line: str | None = None  # the indentation of the current line so far; None = it is the first, or has text
        self.broken = False
        """Whether several lines were begun."""
        self.ended = False

    def cut(self, text: str) -> str:
        """The part of the next `text` that belongs to the answer; sets `ended` if it is the last one."""
        for at, character in enumerate(text):
            if character == "\n":
                self._line = ""
                self.broken = True
            elif self._line is not None and character in " \t":
                self._line += character
            elif self._line is not None:
                if len(self._line) < self._indent:
                    self.ended = True
                    return text[:at]
                self._line = None
        late = self._milliseconds and (time.monotonic() - self._began) * 1e3 > self._milliseconds
        self.ended = bool(late and self.broken)
        return text


class LlamaWriter:
    """Writes a generation in llama-server's form."""

    def __init__(self, body: LlamaRequest, completion: CompletionRequest, generation: Generation) -> None:
        self._body = body
        self._completion = completion
        self._generation = generation
        self._limits = LineLimits(body.n_indent, body.t_max_predict_ms)
        self._prompt_tokens = len(generation.request.sequences[0].prompt)
        self._scored: list[ScoredToken] = []
        self._shortened = False
        """Whether a limit of lines ended the text."""

    async def full(self) -> Json:
        """Generate everything and return the full response."""
        content = ""
        try:
            async for step in self._generation:
                content += self._text(step)
        finally:
            self._generation.close()
        return self._last(content)

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the pieces of the text as they are generated, and then the final fields."""
        try:
            async for step in self._generation:
                text = self._text(step)
                if text:
                    yield {
                        "index": 0,
                        "content": text,
                        "tokens": list(step.delta.token_ids),
                        "stop": False,
                        "id_slot": 0,
                        "tokens_predicted": len(self._generation.outputs[0].token_ids),
                        "tokens_evaluated": self._prompt_tokens,
                    }
        finally:
            self._generation.close()
        yield self._last("")

    def _text(self, step: ChoiceStep) -> str:
        """The text of a step, as far as it belongs to the answer."""
        self._scored += step.delta.scored
        if self._shortened:
            return ""
        text = self._limits.cut(step.delta.text)
        if self._limits.ended and not step.last:
            self._shortened = True
            self._generation.stop(0)
        return text

    def _last(self, content: str) -> Json:
        """The final fields, or those of them that were asked for."""
        output = self._generation.outputs[0]
        body = self._body
        stats = output.stats or Stats()
        stop_type = "limit" if self._shortened or output.finish_reason == "length" else "eos"
        if output.stop_string is not None and not self._shortened:
            stop_type = "word"
        fields: Json = {
            "index": 0,
            "content": content,
            "tokens": output.token_ids if body.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._generation.context.settings.model_names[0],
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": self._prompt_tokens,
            "tokens_cached": self._prompt_tokens + max(0, len(output.token_ids) - 1),
            "generation_settings": self._settings(),
            "prompt": "",
            "has_new_line": self._limits.broken,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": output.stop_string or "",
            "timings": timings(stats, self._prompt_tokens, len(output.token_ids)),
        }
        if body.n_probs:
            texts = TokenTexts(self._generation.context.engine.tokenizer)
            fields["completion_probabilities"] = chat_logprobs(texts, self._scored)["content"]
        return selected(fields, body.response_fields) if body.response_fields else fields

    def _settings(self) -> Json:
        params = self._generation.request.sequences[0].params
        return {
            "n_ctx": self._generation.context.max_model_len,
            "n_predict": self._body.n_predict,
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(self._completion.stop_strings),
            "stream": bool(self._completion.stream),
        }


def timings(stats: Stats, prompt_tokens: int, tokens: int) -> Json:
    """A sequence's `timings` as llama-server gives them, in milliseconds and tokens."""
    read = max(0, prompt_tokens - stats.reused_tokens)
    reading, writing = 1e3 * stats.prefill_seconds, 1e3 * stats.decode_seconds
    found = {
        "cache_n": stats.reused_tokens,
        "prompt_n": read,
        "prompt_ms": reading,
        "prompt_per_token_ms": reading / read if read else 0.0,
        "prompt_per_second": 1e3 * read / reading if reading else 0.0,
        "predicted_n": tokens,
        "predicted_ms": writing,
        "predicted_per_token_ms": writing / tokens if tokens else 0.0,
        "predicted_per_second": 1e3 * tokens / writing if writing else 0.0,
    }
    if stats.drafted_depth:
        found |= {"draft_n": stats.drafted_depth, "draft_n_accepted": stats.walked}
    return found


def selected(fields: Json, paths: Sequence[str]) -> Json:
    """The fields at `paths` such as `timings/prompt_n`, by their whole paths; those that don't exist are left out."""
    found: Json = {}
    for path in paths:
        value: Any = fields
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
