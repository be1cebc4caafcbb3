"""Who calls, and what the call itself says: its key, its deadline, its trace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import ApiKeys
from gateway.early_refusals import EarlyRefusals
from gateway.http.connection import send_failure
from gateway.http.errors import failure_from, failure_of_status
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument

OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/openapi.json"})
"""What needs no key."""
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""What generates."""
MAX_BODY_BYTES = 16 * 1024 * 1024
"""More than any model's context, as ids or as text. A body is read on the event loop: every stream waits for it."""
TOO_LARGE = failure_of_status(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large")
BODY_TIMEOUT = 120.0
"""Seconds from the headers of a request to the end of its body: a client that leaves in between says nothing."""
TOO_SLOW = failure_of_status(408, f"the body did not come whole within {BODY_TIMEOUT:g} s", "body_too_slow")
ENCODED = failure_of_status(415, "content-encoding: bodies are taken as they are, leave it out", "body_encoded")
TIMEOUT_HEADER = "X-Request-Timeout"
_MAX_TIMEOUT = 1e6


class KeyCheck:
    """Turns away whoever has no key, before anything of the body is read, and notes the tenant of the others."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer it 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                tenant = self._keys.tenant_of(Headers(scope=scope).get("authorization"))
            except ServiceError as error:
                await send_failure(send, failure_from(error))
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


class QueueCheck:
    """Turns away a request for output that no queue has a place for, before anything of the body is read."""

    def __init__(self, app: ASGIApp, early_refusals: EarlyRefusals) -> None:
        self._app = app
        self._early_refusals = early_refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer it 429."""
        if scope["type"] == "http" and scope["path"] in GENERATION_PATHS and scope["method"] == "POST":
            try:
                self._early_refusals.check_all()
            except ServiceError as error:
                await send_failure(send, failure_from(error))
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Turns away what is packed, too slow, or too large: by its length where that is told, else once it is so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer it 408, 413 or 415."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if scope["method"] == "POST" and headers.get("content-encoding", "identity").lower() != "identity":
                await send_failure(send, ENCODED)
                return
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > MAX_BODY_BYTES:
                await send_failure(send, TOO_LARGE)
                return
            receive = _limited(receive)
        await self._app(scope, receive, send)


def _limited(receive: Receive) -> Receive:
    left = MAX_BODY_BYTES
    deadline: float | None = asyncio.get_running_loop().time() + BODY_TIMEOUT

    async def limited() -> Message:
        nonlocal left, deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(TOO_SLOW.status) from None
        if not message.get("more_body", False):
            # What comes behind the body is the client's leaving, which is waited for as long as the answer takes.
            deadline = None
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(TOO_LARGE.status)
        return message

    return limited


def call_of(request: Request, clock: Callable[[], float]) -> dict[str, Any]:
    """Return what the domain wants to know of a call. Raises ServiceError (INVALID_ARGUMENT)."""
    return {
        "deadline": _deadline(request, clock),
        "traceparent": request.headers.get("traceparent", ""),
        "tenant": request.state.tenant,
    }


def _deadline(request: Request, clock: Callable[[], float]) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise invalid_argument(
            [FieldViolation(TIMEOUT_HEADER, f"must be seconds, above 0 and at most {_MAX_TIMEOUT:g}")]
        )
    return clock() + seconds
