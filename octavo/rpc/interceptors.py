"""The server interceptor that turns exceptions, and messages that are none, into statuses."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from octavo.rpc.errors import ServiceError, abort
from octavo.rpc.seal import SEALED_METHODS, Damaged, DamagedRequest, opened, opened_request, seal

logger = logging.getLogger(__name__)

_DAMAGED_DELAY = 0.1
"""Seconds after which a request that was damaged may be sent again."""

_Handler = Callable[[Any, Any], Any]
_Context = grpc.aio.ServicerContext[Any, Any]
_INTERNAL = ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", "an internal error; the server's log has the cause")
_CLIENT_GONE = ServiceError(grpc.StatusCode.CANCELLED, "CLIENT_GONE", "the client broke the call off")


class _Malformed:
    """What the deserializer gives in place of a message: an exception there would be UNKNOWN, past every handler."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose handler raised: ServiceError as its own status, anything else as INTERNAL without its words.

    The cancellation of a call passes through untouched: grpc needs to see it.
    """

    def __init__(self) -> None:
        # Of methods that exist: a wrapped handler is the same for every call.
        self._handlers: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler of one call."""
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        # Handlers are typed Any: grpc declares their attributes on no public type.
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: grpc answers UNIMPLEMENTED
            return None
        shape = "stream_" if handler.request_streaming else "unary_"
        shape += "stream" if handler.response_streaming else "unary"
        behaviour: _Handler = getattr(handler, shape)
        wrap = _wrap_generator if inspect.isasyncgenfunction(behaviour) else _wrap
        prepare = _checked_stream if handler.request_streaming else _checked
        make_handler = getattr(grpc, f"{shape}_rpc_method_handler")
        is_sealed = shape == "stream_stream" and method.startswith(SEALED_METHODS)
        parse = handler.request_deserializer
        self._handlers[method] = wrapped = make_handler(
            wrap(behaviour, method, prepare),
            request_deserializer=opened(parse) if is_sealed else _tolerant(parse),
            response_serializer=seal if is_sealed else _unless_bytes(handler.response_serializer),
        )
        return wrapped


_Prepare = Callable[[Any, _Context], tuple[Any, Any]]


def _wrap(behaviour: _Handler, method: str, prepare: _Prepare) -> _Handler:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await behaviour(*prepare(request, context))
        except (Exception, asyncio.CancelledError) as error:
            await _end(error, context, method)

    return call


def _wrap_generator(behaviour: _Handler, method: str, prepare: _Prepare) -> _Handler:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(*prepare(request, context)):
                yield response
        except (Exception, asyncio.CancelledError) as error:
            await _end(error, context, method)

    return call


def _unless_bytes(serializer: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return what lets through an answer that its handler has serialized, and sealed, itself."""

    def serialize(message: Any) -> bytes:
        return message if isinstance(message, bytes) else serializer(message)

    return serialize


def _tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    parse = opened_request(deserializer)

    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Malformed()

    return deserialize


def _checked(request: Any, context: _Context) -> tuple[Any, Any]:
    if isinstance(request, DamagedRequest):
        message = "the bytes of the request were changed on the way; send it again"
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DAMAGED_REQUEST", message, retry_delay=_DAMAGED_DELAY)
    if isinstance(request, (_Malformed, Damaged)):
        # A new one each time: an exception that is raised again and again keeps every traceback.
        message = "the bytes are not a message of the type that this rpc takes"
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)
    return request, context


def _checked_stream(requests: AsyncIterator[Any], context: _Context) -> tuple[Any, Any]:
    async def checked() -> AsyncIterator[Any]:
        async for request in requests:
            yield _checked(request, context)[0]

    return checked(), _CheckedContext(context)


class _CheckedContext:
    """The context of a call whose requests are a stream, which handlers may read from it."""

    def __init__(self, context: _Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Return the next request, or grpc's EOF."""
        return _checked(await self._context.read(), self._context)[0]


async def _end(error: Exception | asyncio.CancelledError, context: _Context, method: str) -> None:
    if isinstance(error, ServiceError):
        await _abort(context, error, method)
    if isinstance(error, grpc.aio.AbortError) or (isinstance(error, asyncio.CancelledError) and _is_being_cancelled()):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        # A write to a client that has just left: whether it fails or the handler is cancelled first is chance.
        logger.info("call broken off", extra={"fields": {"method": method}})
        await _abort(context, _CLIENT_GONE, method)
    # Among the rest is a cancellation from inside the handler: grpc would leave its client waiting for ever.
    logger.error("handler failed", exc_info=error, extra={"fields": {"method": method}})
    await _abort(context, _INTERNAL, method)


async def _abort(context: _Context, error: ServiceError, method: str) -> NoReturn:
    try:
        await abort(context, error)
    except grpc.aio.InternalError:
        # The client has left and the server has not heard of it yet: grpc would log that as an error of the handler's.
        logger.info("call broken off", extra={"fields": {"method": method, "unsent": error.reason}})
        raise asyncio.CancelledError from None


def _is_being_cancelled() -> bool:
    """Whether somebody, grpc that is, has asked for the end of the task that runs the handler."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
