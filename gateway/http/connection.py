"""One HTTP request's connection: work that ends when the client leaves, and how answers are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Send

from gateway.http.envelope import encode_json
from gateway.http.errors import Failure

_JSON = "application/json"
_EVENT_STREAM = "text/event-stream; charset=utf-8"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client leaves. `receive`: after the body has been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        # Whatever the work holds is given back before the connection is forgotten.
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def send_json(send: Send, fields: Mapping[str, Any], headers: Mapping[str, str], status: int = 200) -> None:
    """Send a whole answer."""
    body = encode_json(fields).encode()
    await _send_start(send, status, {"content-type": _JSON, "content-length": str(len(body)), **headers})
    await send({"type": "http.response.body", "body": body})


async def send_failure(send: Send, failure: Failure) -> None:
    """Send an error before anything else was sent."""
    await send_json(send, failure.body, failure.headers, failure.status)


async def start_events(send: Send, headers: Mapping[str, str]) -> None:
    """Begin a stream of server-sent events."""
    # Proxies that hold answers back until a buffer is full (nginx) are asked not to.
    fixed = {"content-type": _EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}
    await _send_start(send, 200, {**fixed, **headers})


async def send_events(send: Send, events: bytes) -> None:
    """Send server-sent events."""
    await send({"type": "http.response.body", "body": events, "more_body": True})


async def end_events(send: Send) -> None:
    """End the stream."""
    await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
