"""Errors as clients of OpenAI expect them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from eyas.errors import QueueFullError, RequestError, UsageError
from eyas.serve.api.schema.base import reason_for
from eyas.serve.engine_thread import EngineStoppedError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """An answer that is an error. It never leaves the server."""

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
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        kind = TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """The whole answer; the scope remembers its code (`error_code`)."""
        scope.setdefault("state", {})["error_code"] = self.code or self.body["error"]["type"]
        return JSONResponse(self.body, self.status, self.headers)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with it."""
        await self.response(scope)(scope, receive, send)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """503: not now, perhaps soon."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": _seconds(retry_after)})


def as_api_error(error: Exception) -> ApiError:
    """Whatever was raised, as an answer; what nobody expected tells a client nothing but that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStoppedError):
        return unavailable(str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": _seconds(error.retry_after)})
    if isinstance(error, RequestError | UsageError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RequestValidationError):
        return validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _sentence(error), code=_CODES.get(error.status_code), headers=error.headers)
    return ApiError(500, "the server failed on this request; its log says how", code="internal_error")


def validation_error(error: RequestValidationError) -> ApiError:
    """400 that names the first bad field."""
    errors = error.errors()
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    text = _said(first)
    if where and where[-1] == "str":  # the first of several things the field may be
        where, whole = where[:-1], first["loc"][:-1]
        text = ", or ".join(dict.fromkeys(_said(each) for each in errors if each["loc"][: len(whole)] == whole))
    field = _path(where)
    unknown = first["type"] == "extra_forbidden"
    known = reason_for(where)
    if known is not None:
        message, code = f"{field} is not supported here: {known}", "unsupported_parameter"
    elif unknown:
        message, code = f"unknown field {field}", "unknown_parameter"
    elif first["type"] == "missing" and not where:
        message, code = "the request needs a JSON body (Content-Type: application/json)", "missing_body"
    elif first["type"] == "missing":
        message, code = f"{field} is missing", "missing_required_parameter"
    else:
        message, code = f"{field or 'the body'}: {text}", "invalid_value"
    return ApiError(400, message[:1000], code=code, param=field or None)


def _path(parts: list[str]) -> str:
    """`messages[0].content`, without the names of union members that pydantic puts in between."""
    path = ""
    for part in parts:
        if part.isdigit():
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path[:200]


def _said(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _seconds(value: float) -> str:
    """Retry-After takes whole seconds."""
    return str(max(1, round(value)))


def _sentence(error: HTTPException) -> str:
    known = {404: "there is nothing at this address", 405: "this address doesn't take that method"}
    return known.get(error.status_code, str(error.detail))


async def handle(request: Request, error: Exception) -> JSONResponse:
    """The one exception handler of the app."""
    return as_api_error(error).response(request.scope)


def error_code(scope: Scope) -> str:
    """The code of the error that was answered."""
    code: str = scope["state"].get("error_code", "")
    return code
