"""Ollama's API under `/api`, and LM Studio's under `/api/v0`, which editors and chat programs call.

Chats and completions are decoded as those of `/v1`. This file translates the names, and streams lines of JSON. The
server has one model, which is always loaded, so it can be listed and described, but neither pulled nor unloaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from eyas.errors import RequestError
from eyas.serve.api.chat import create_chat_completion, read_prompts, start_chat, start_completion
from eyas.serve.api.generation import Generation
from eyas.serve.api.logprobs import chat_logprobs
from eyas.serve.api.messages import as_object
from eyas.serve.api.response import ChatResponseWriter, Json, ThoughtPiece
from eyas.serve.context import Context, Info, RequestInfo, ServerContext
from eyas.serve.errors import translating
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import encoded, respond
from eyas.serve.schema.ollama import (
    LMStudioModels,
    OllamaChatLine,
    OllamaChatRequest,
    OllamaErrorBody,
    OllamaGenerateLine,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaRunning,
    OllamaShow,
    OllamaTags,
    OllamaVersion,
    ShowRequest,
)
from eyas.serve.schema.request import GenerationRequest, ignored_fields
from eyas.serve.schema.response import ERRORS_OF_READS, WITH_BODY, error_responses, generation_responses
from eyas.serve.tools.calling import Calling
from eyas.serve.tools.parser import CallPiece, TextPiece
from eyas.serve.tools.styles import shows_tools
from eyas.targets.parameters import parameter_count, weight_bytes
from eyas.text.fill import FillFormat, fill_format
from eyas.text.template import has_chat_template, template_variables
from eyas.types import Stats

router = APIRouter(route_class=JsonRoute)
CHAT, GENERATE = "/api/chat", "/api/generate"
_VERSION = "0.14.2"
"""The version of Ollama that has this API; clients compare it with the oldest that they support. `/version` has
eyas's."""
_FAR_FUTURE = timedelta(days=36500)
"""After how long a model that stays is said to expire; Ollama's own client shows it as forever."""
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_READ_ERRORS = error_responses(*ERRORS_OF_READS, 503, body=OllamaErrorBody)


class AnswerPiece(NamedTuple):
    """What a line adds to the answer."""

    text: str = ""
    thought: str = ""
    calls: tuple[Json, ...] = ()

    def then(self, more: AnswerPiece) -> AnswerPiece:
        """This, and what comes after it."""
        return AnswerPiece(self.text + more.text, self.thought + more.thought, self.calls + more.calls)


Form = Callable[[AnswerPiece], Json]


@router.get("/api/version", response_model=OllamaVersion, responses=error_responses(500, body=OllamaErrorBody))
async def version() -> Json:
    """The version of Ollama whose API this is."""
    return {"version": _VERSION}


@router.get("/api/tags", response_model=OllamaTags, responses=_READ_ERRORS)
async def tags(context: Context, info: Info) -> Json:
    """List the model names that requests may use."""
    facts = await _facts(context, info)
    return {"models": [facts.listed(context, name) for name in context.settings.model_names]}


@router.get("/api/ps", response_model=OllamaRunning, responses=_READ_ERRORS)
async def running(context: Context, info: Info) -> Json:
    """List the model names that are loaded: all of them."""
    facts = await _facts(context, info)
    here = {
        "expires_at": _time(context.started, _FAR_FUTURE),
        "size_vram": 0 if str(context.engine.target.device) == "cpu" else facts.size,
        "context_length": context.max_model_len or 0,
    }
    return {"models": [facts.listed(context, name) | here for name in context.settings.model_names]}


@router.post("/api/show", response_model=OllamaShow, responses=error_responses(*WITH_BODY, body=OllamaErrorBody))
async def show(body: ShowRequest, context: Context, info: Info) -> Json:
    """Describe the model: its context, what it can do, and how."""
    _served(context, body.model or body.name or "")
    context.log_ignored(ignored_fields(body))
    facts = await _facts(context, info)
    limit = context.max_model_len
    tokenizer = context.engine.tokenizer
    form = _fill(context)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    about = {"general.architecture": facts.family, "general.parameter_count": facts.parameters}
    return {
        "modelfile": f"# served by eyas\nFROM {context.settings.model_names[0]}\n",
        "parameters": "" if limit is None else f"num_ctx {limit}",
        "template": template if form is None else _gap(tokenizer, form) + template,
        "details": facts.details,
        "model_info": about if limit is None else about | {f"{facts.family}.context_length": limit},
        "capabilities": _capabilities(context),
        "modified_at": _time(context.started),
    }


@router.post(CHAT, responses=generation_responses(OllamaChatLine, OllamaChatLine, OllamaErrorBody, lines=True))
async def chat(body: OllamaChatRequest, context: Context, info: Info) -> Response:
    """Answer a chat, all at once or line by line."""
    served = _accept(body, context)
    if not body.messages:
        return await _idle(body, _in_chat)
    return await _answer(body, served, context, info, CHAT, _in_chat)


@router.post(
    GENERATE, responses=generation_responses(OllamaGenerateLine, OllamaGenerateLine, OllamaErrorBody, lines=True)
)
async def generate(body: OllamaGenerateRequest, context: Context, info: Info) -> Response:
    """Answer a prompt, continue it, or fill the gap before `suffix`."""
    served = _accept(body, context)
    if not (body.prompt or body.suffix):
        return await _idle(body, _in_text)
    # a model without a chat template continues any prompt, as one without a template does in Ollama
    plain = body.raw or body.suffix or not (body.system or has_chat_template(context.engine.tokenizer))
    if not plain:
        return await _answer(body, served, context, info, GENERATE, _in_text)
    with translating(body.options.model_dump()):
        request = body.as_completion(served)
    context.log_ignored(ignored_fields(request))
    prompts = await read_prompts(request, context, info)
    generation = await start_completion(request, prompts, context, info, endpoint=GENERATE, shorten=True)
    return await _respond(LinesWriter(body, request, generation, info, None, _in_text))


async def _answer(
    body: OllamaChatRequest | OllamaGenerateRequest,
    served: str,
    context: ServerContext,
    info: RequestInfo,
    endpoint: str,
    form: Form,
) -> Response:
    """Answer a chat."""
    with translating(body.options.model_dump()):
        request = body.as_chat(served)
    context.log_ignored(ignored_fields(request))
    generation, tools = await start_chat(request, context, info, endpoint=endpoint, shorten=True)
    return await _respond(LinesWriter(body, request, generation, info, tools, form))


@router.get("/api/v0/models", response_model=LMStudioModels, responses=error_responses(*ERRORS_OF_READS, 503))
async def lm_studio_models(context: Context, info: Info) -> Json:
    """List the model names that requests may use, as LM Studio does."""
    facts = await _facts(context, info)
    fields = {
        "publisher": "eyas",
        "arch": facts.family,
        "quantization": facts.quantization,
        "max_context_length": context.max_model_len,
        "loaded_context_length": context.max_model_len,
        "capabilities": ["tool_use"] if "tools" in _capabilities(context) else [],
    }
    return {"data": [{"id": name} | fields for name in context.settings.model_names]}


# described in the schema as /v1/chat/completions
router.post("/api/v0/chat/completions", include_in_schema=False)(create_chat_completion)


class _Facts(NamedTuple):
    """Facts about the model that clients ask for."""

    family: str
    parameters: int
    size: int
    """In bytes."""
    quantization: str

    @property
    def details(self) -> Json:
        """The facts as Ollama shows them."""
        return {
            "parent_model": "",
            "format": "gguf",  # the only one that all clients know
            "family": self.family,
            "families": [self.family],
            "parameter_size": _rounded(self.parameters),
            "quantization_level": self.quantization,
        }

    def listed(self, context: ServerContext, name: str) -> Json:
        """The model by one of its names."""
        return {
            "name": name,
            "model": name,
            "modified_at": _time(context.started),
            "size": self.size,
            "digest": hashlib.sha256(f"{name} {self}".encode()).hexdigest(),
            "details": self.details,
        }


async def _facts(context: ServerContext, info: RequestInfo) -> _Facts:
    target = context.engine.target
    parameters, size = await context.in_worker(_measured, target.model, info=info)
    weights = target.precision["weights"]
    return _Facts(target.config.model_type, parameters, size, _NAMES.get(weights, weights))


@lru_cache(maxsize=1)
def _measured(model: Any) -> tuple[int, int]:
    return parameter_count(model), weight_bytes(model)


def _rounded(count: int) -> str:
    """A number of parameters as Ollama writes it: 7.6B, 494.03M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _time(seconds: float, later: timedelta = timedelta()) -> str:
    return (datetime.fromtimestamp(seconds, timezone.utc) + later).isoformat().replace("+00:00", "Z")


def _fill(context: ServerContext) -> FillFormat | None:
    """How the model fills gaps; None if it can't."""
    try:
        return fill_format(context.engine.tokenizer, context.settings.fim_tokens)
    except RequestError:
        return None


def _gap(tokenizer: Any, form: FillFormat) -> str:
    """How a gap is filled, in the language of Ollama's templates: clients look for `.Suffix` in them."""
    before, between, after = ("".join(tokenizer.convert_ids_to_tokens(list(marks))) for marks in form[:3])
    first, second = (".Suffix", ".Prompt") if form.suffix_first else (".Prompt", ".Suffix")
    return f"{{{{ if .Suffix }}}}{before}{{{{ {first} }}}}{between}{{{{ {second} }}}}{after}{{{{ end }}}}"


def _capabilities(context: ServerContext) -> list[str]:
    tokenizer = context.engine.tokenizer
    found = ["completion"]
    if has_chat_template(tokenizer):
        if shows_tools(tokenizer.chat_template):
            found.append("tools")
        if "enable_thinking" in template_variables(tokenizer):
            found.append("thinking")
    return [*found, "insert"] if _fill(context) else found


def _served(context: ServerContext, name: str) -> str:
    """The served name that a client means by NAME or NAME:latest. Raises ApiError 404 if there is none."""
    context.engine  # noqa: B018  # 503 while it is being loaded
    bare = name.removesuffix(":latest")
    found = name if name in context.settings.model_names or bare not in context.settings.model_names else bare
    context.check_model(found)
    return found


def _accept(body: OllamaRequest, context: ServerContext) -> str:
    """Log what is ignored, and return the served name. Raises ApiError for another model."""
    served = _served(context, body.model)
    context.log_ignored(ignored_fields(body))
    context.log_ignored(body.options.notes())
    return served


def _in_chat(said: AnswerPiece) -> Json:
    message: Json = {"role": "assistant", "content": said.text}
    message |= {"thinking": said.thought} if said.thought else {}
    return {"message": message | {"tool_calls": list(said.calls)} if said.calls else message}


def _in_text(said: AnswerPiece) -> Json:
    return {"response": said.text} | ({"thinking": said.thought} if said.thought else {})


async def _idle(body: OllamaRequest, form: Form) -> Response:
    """The answer to an empty request, by which clients load or unload a model; here it stays loaded."""
    reason = {"done": True, "done_reason": "unload" if body.unloads else "load"}
    line = {"model": body.model, "created_at": _time(time.time())} | form(AnswerPiece()) | reason
    return Response(await encoded(line), media_type="application/json")


async def _respond(writer: LinesWriter) -> Response:
    seconds = writer.generation.context.settings.write_seconds
    return await respond(writer, stream=writer.streams, write_seconds=seconds, lines=True)


class LinesWriter(ChatResponseWriter):
    """Writes thoughts, text and complete calls as lines."""

    def __init__(
        self,
        body: OllamaRequest,
        request: GenerationRequest,
        generation: Generation,
        info: RequestInfo,
        tools: Calling | None,
        form: Form,
    ) -> None:
        """`form`: where a line of this route has what it adds."""
        super().__init__(request, generation, info.id, tools)
        self.streams = body.stream
        self._model = body.model
        self._received = info.received
        self._form = form
        self._call: Json | None = None  # the call that is being written
        self._arguments = ""

    async def full(self) -> Json:
        """Generate everything and return the answer."""
        whole = AnswerPiece()
        try:
            async for said in self._pieces():
                whole = whole.then(said)
        finally:
            self.generation.close()
        return self._line(whole) | self._ending()

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the lines of a stream as they are generated."""
        try:
            async for said in self._pieces():
                yield self._line(said)
            yield self._line(AnswerPiece()) | self._ending()
        finally:
            self.generation.close()

    async def _pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces of thoughts and text, and calls once they are complete."""
        async for part in self.shown_parts():
            if isinstance(part, CallPiece) and part.name is None:
                self._arguments += part.arguments
                continue
            for said in self._complete():
                yield said
            if isinstance(part, TextPiece):
                yield AnswerPiece(text=part.text)
            elif isinstance(part, ThoughtPiece):
                yield AnswerPiece(thought=part.text)
            else:
                self._call = {"id": part.id, "index": part.index, "name": part.name}
                self._arguments = part.arguments
        for said in self._complete():
            yield said

    def _complete(self) -> Iterator[AnswerPiece]:
        """Yield the call that has been written, if there is one."""
        call = self._call
        self._call = None
        if call is not None:
            function = call | {"arguments": as_object(self._arguments)}
            yield AnswerPiece(calls=({"id": function.pop("id"), "function": function},))

    def _line(self, said: AnswerPiece) -> Json:
        line = {"model": self._model, "created_at": _time(time.time()), **self._form(said), "done": False}
        if self.generation.with_logprobs:
            scored = self.unwritten
            self.unwritten = []
            line["logprobs"] = chat_logprobs(self.token_texts, scored)["content"]
        return line

    def _ending(self) -> Json:
        """The statistics of the answer, in tokens and nanoseconds."""
        output = self.generation.outputs[0]
        stats = output.stats or Stats()
        return {
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": round(1e9 * (time.monotonic() - self._received)),
            "load_duration": 0,
            "prompt_eval_count": self.generation.request.prompt_tokens,
            "prompt_eval_duration": round(1e9 * stats.prefill_seconds),
            "eval_count": len(output.token_ids),
            "eval_duration": round(1e9 * stats.decode_seconds),
        }
