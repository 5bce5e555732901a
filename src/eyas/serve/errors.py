"""Error responses in OpenAI's form: a status, and `{"error": {"message", "type", "param", "code"}}`.

Routes under `/v1/messages` use Anthropic's form: `{"type": "error", "error": {"type", "message"}}`, and Ollama's
routes under `/api` the form `{"error": message}`.

`as_api_error` turns any exception into an error response. Unexpected exceptions reveal no details to the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from eyas.errors import VALUE_ERROR, QueueFullError, RequestError, UsageError
from eyas.serve.engine_thread import EngineStoppedError
from eyas.serve.schema.request import why_not_served

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC = "/v1/messages"
"""Path of Anthropic's API, where errors have a different form."""
_ANTHROPIC_TYPES = {
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Error types that have a different name in Anthropic's API than in OpenAI's."""
OLLAMA, LM_STUDIO = "/api/", "/api/v0/"
"""Where the paths of Ollama's API begin, and, below them, those of LM Studio's, whose errors have OpenAI's form."""
_NO_EMBEDDINGS = "eyas generates text: embeddings and scores need another server"
_TEXT_ONLY = "eyas generates text: it serves neither images nor sound"
_STATELESS = "nothing is stored here: send the whole conversation to /v1/responses or /v1/chat/completions"
_NO_BATCHES = "there are no batches: send the requests at the same time, they are decoded together"
_ONE_MODEL = "the server has one model, from its start to its end: eyas serve MODEL"
_NO_ROUTES = {
    "/v1/embeddings": _NO_EMBEDDINGS,
    "/v1/rerank": _NO_EMBEDDINGS,
    "/v1/score": _NO_EMBEDDINGS,
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/moderations": "nothing is moderated",
    "/v1/responses": _STATELESS,
    "/v1/conversations": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/files": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/slots": "sequences have no slots of their own; /load and /metrics say how busy the server is",
    "/v1/batches": _NO_BATCHES,
    "/v1/messages/batches": _NO_BATCHES,
    "/v1/fine_tuning": "eyas trains drafters (eyas train), and serves the target model unchanged",
    "/api/pull": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/blobs": _ONE_MODEL,
    "/api/copy": f"{_ONE_MODEL}, and --served-model-name gives it several names",
    "/api/delete": _ONE_MODEL,
    "/api/push": "models aren't published from here",
    "/api/embed": _NO_EMBEDDINGS,
    "/api/embeddings": _NO_EMBEDDINGS,
    "/api/v0/embeddings": _NO_EMBEDDINGS,
}
"""Routes of OpenAI's, Anthropic's and Ollama's APIs that are not served, including their subpaths -> the reason."""
_HTTP = {
    404: ("there is nothing at this address", "not_found"),
    405: ("this address doesn't take that method", "method_not_allowed"),
}
"""Status of an error raised by the router -> its message and code."""
_PLAIN_NAME = re.compile(r"[\w-]+")


class ApiError(Exception):
    """An exception that the server answers with this error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the error response."""
        kind = _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body of the error response in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, self.body["error"]["type"])
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The JSON body of the error response in Ollama's form."""
        return {"error": self.message}

    def response(self, scope: Scope) -> JSONResponse:
        """Make the response, and store its code in the scope for `error_code`."""
        state = scope.setdefault("state", {})
        path = scope["path"]
        state["error_code"] = self.code or self.body["error"]["type"]
        if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
            body = self.anthropic_body | {"request_id": state.get("request_id")}
            return JSONResponse(body, self.status, self.headers)
        if path.startswith(OLLAMA) and not path.startswith(LM_STUDIO):
            return JSONResponse(self.ollama_body, self.status, self.headers)
        return JSONResponse(self.body, self.status, self.headers)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, from ASGI middleware."""
        await self.response(scope)(scope, receive, send)


def too_late() -> ApiError:
    """Error 504: the request exceeded the server's time limit."""
    return ApiError(504, "the request took longer than this server allows", code="deadline_exceeded")


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """Error 503: the client may retry after `retry_after` seconds."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": _seconds(retry_after)})


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception; 500 without details if the exception is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return unavailable(str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": _seconds(error.retry_after)})
    if isinstance(error, RequestError | UsageError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        message, code = _HTTP.get(error.status_code, (str(error.detail), None))
        return ApiError(error.status_code, message, code=code, headers=error.headers)
    return ApiError(500, "the server failed on this request; see its log", code="internal_error")


@contextmanager
def translating(body: Any) -> Iterator[None]:
    """Report what is wrong with a translation of a `body` as if the client had sent it."""
    try:
        yield
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_context=False)]
        raise RequestValidationError(found, body=body) from error


def _validation_error(error: RequestValidationError) -> ApiError:
    """Error 400 that names the first invalid field."""
    errors = error.errors()
    first = errors[0]
    location = list(first["loc"][1:])  # the first part is "body"
    text = _problem(first)
    if location and location[-1] == "str":  # the first member of a union: say what every member expects
        location, union = location[:-1], first["loc"][:-1]
        text = ", or ".join(dict.fromkeys(_problem(each) for each in errors if each["loc"][: len(union)] == union))
    field = _path(location, error.body, absent=first["type"] == "missing")
    reason = why_not_served(location)
    if reason is not None:
        message = f"{field} is not supported here: {reason}"
        code = "unsupported_parameter"
    elif first["type"] == "extra_forbidden":
        message = f"unknown field {field}"
        code = "unknown_parameter"
    elif first["type"] == "missing" and not location:
        message, code = "the request needs a JSON body (Content-Type: application/json)", "missing_body"
    elif first["type"] == "missing":
        message = f"{field} is missing"
        code = "missing_required_parameter"
    else:
        message = f"{field or 'the body'}: {text}"
        code = "invalid_value"
    return ApiError(400, message[:1000], code=code, param=field or None)


def _path(location: Sequence[str | int], body: Any, absent: bool) -> str:
    """The path of a field, such as `messages[0].content`, without the type names that pydantic inserts for unions.

    A part that isn't in the body is such a name, unless it is the last part and the field is `absent`.
    """
    path = ""
    value = body
    for index, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif (inside := isinstance(value, Mapping) and part in value) or (absent and index == len(location) - 1):
            named = part if _PLAIN_NAME.fullmatch(part) else json.dumps(part)
            path += f"{'.' if path else ''}{named}"
            value = value[part] if inside else None
    return path[:200]


def _problem(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix(VALUE_ERROR)
    return text[:1].lower() + text[1:]


def _seconds(value: float) -> str:
    return str(max(1, round(value)))  # Retry-After takes whole seconds


async def handle(request: Request, error: Exception) -> JSONResponse:
    """Answer a request with the error response for the exception it raised. The app's only exception handler."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.scope["path"]
        why = next((_NO_ROUTES[route] for route in _NO_ROUTES if f"{path}/".startswith(f"{route}/")), None)
        if why is not None:
            error = ApiError(404, f"{path[:100]} is not served: {why}", code="not_served")
    return as_api_error(error).response(request.scope)


def error_code(scope: Scope) -> str:
    """The `code` of the error response that was sent, or its type if it has none."""
    code: str = scope["state"].get("error_code", "")
    return code
