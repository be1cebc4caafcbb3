"""The OpenAPI page: what the endpoints answer, beside what FastAPI finds out by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from gateway.http.caller import BODY_TIMEOUT, OPEN_PATHS, TIMEOUT_HEADER
from gateway.http.shapes import Error

_MEANINGS = {
    400: "A field is bad, or unknown.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: f"The body did not come whole within {BODY_TIMEOUT:g} s.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too much is served or waiting; Retry-After says when to try again.",
    499: "An operator cancelled the request.",
    500: "A bug; the server's log has the cause.",
    503: "Nothing runs the model now; Retry-After says when to try again.",
    504: f"The time that {TIMEOUT_HEADER}, queue_ttl or first_token_target gives is up.",
}
_KEY = "bearer"
_TIMEOUT_PARAMETER = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds after which the request is ended with 504. Default: none.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000},
}

Answers = dict[int | str, dict[str, Any]]


def answers(shape: type[BaseModel], *, streams: bool = False, statuses: Sequence[int] = ()) -> Answers:
    """Return what an endpoint answers: `shape`, or as a stream of events; else an error with one of `statuses`."""
    good: dict[str, Any] = {"model": shape, "description": "Done."}
    if streams:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    errors: Answers = {status: {"model": Error, "description": _MEANINGS[status]} for status in statuses}
    return {200: good, **errors}


def make_page(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI's own error for bad bodies, which here is 400.
            operation["responses"].pop("422", None)
            if path not in OPEN_PATHS:
                operation["security"] = [{_KEY: []}, {}]
            if path.startswith("/v1/") and "completions" in path:
                operation.setdefault("parameters", []).append(_TIMEOUT_PARAMETER)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
