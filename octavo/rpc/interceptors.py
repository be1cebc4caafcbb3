"""The server interceptor that turns exceptions into statuses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from octavo.rpc.errors import ServiceError, abort

logger = logging.getLogger(__name__)

_Handler = Callable[[Any, Any], Any]
_INTERNAL = ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", "an internal error; the server's log has the cause")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose handler raised: ServiceError as its own status, anything else as INTERNAL without its words.

    Cancellation passes through untouched: grpc needs to see it.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler of one call."""
        # Handlers are typed Any: grpc declares their attributes on no public type.
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: grpc answers UNIMPLEMENTED
            return None
        shape = "stream_" if handler.request_streaming else "unary_"
        shape += "stream" if handler.response_streaming else "unary"
        behaviour: _Handler = getattr(handler, shape)
        wrap = _wrap_generator if inspect.isasyncgenfunction(behaviour) else _wrap
        make_handler = getattr(grpc, f"{shape}_rpc_method_handler")
        return make_handler(
            wrap(behaviour, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _wrap(behaviour: _Handler, method: str) -> _Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _end(error, context, method)

    return call


def _wrap_generator(behaviour: _Handler, method: str) -> _Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _end(error, context, method)

    return call


async def _end(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, ServiceError):
        await abort(context, error)
    if isinstance(error, grpc.aio.AbortError):
        raise error
    logger.error("handler failed", exc_info=error, extra={"fields": {"method": method}})
    await abort(context, _INTERNAL)
