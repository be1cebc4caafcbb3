"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from octavo.rpc.errors import ServiceError

_CODES: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    # Not 409, which clients try again: somebody wanted the end of the request.
    grpc.StatusCode.CANCELLED: (499, "cancelled_error"),
    grpc.StatusCode.ABORTED: (499, "cancelled_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "server_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
_OTHER = (500, "server_error")
_TYPES = {413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error"}

Rename = Callable[[str], str]
"""Takes a field's path in octavo.v1 and returns the name that the HTTP request has for it."""


@dataclass(frozen=True)
class Failure:
    """An error as it is sent. `retry_after`: seconds, None where trying again cannot help."""

    status: int
    type: str
    message: str
    param: str | None
    code: str
    retry_after: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to it. Retry-After has whole seconds; OpenAI's clients read the other one first."""
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            headers["retry-after-ms"] = str(round(self.retry_after * 1000))
        return headers


def failure_from(error: ServiceError, rename: Rename = str) -> Failure:
    """Return an error of the domain; every bad field is named as the HTTP request names it."""
    status, kind = _CODES.get(error.code, _OTHER)
    message, param = error.message, None
    if error.violations:
        named = [(rename(each.field), each.description) for each in error.violations]
        message = "; ".join(f"{name}: {description}" for name, description in named)
        param = named[0][0]
    elif error.reason == "MODEL_NOT_FOUND":
        param = "model"
    retry_after = error.retry_delay
    if retry_after is None and status in (429, 503):
        retry_after = 1.0
    return Failure(status, kind, message, param, error.reason.lower(), retry_after)


def failure_of_status(status: int, message: str, code: str, param: str | None = None) -> Failure:
    """Return an error that HTTP itself knows, such as a path that leads nowhere."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return Failure(status, kind, message, param, code)


INTERNAL = failure_of_status(500, "an internal error; the server's log has the cause", "internal")
