"""B12: what grpcio's asyncio server does around cancellation, and how the handlers stand up to it.

Each trap is shown on a server without our interceptor where it can be, so that a grpcio without it is noticed.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.servicer import ExecutorService
from gateway.admin_servicer import AdminServicer
from gateway.model_servicer import ModelServicer
from gateway.servicer import InferenceServicer
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.rpc.interceptors import ErrorInterceptor
from octavo.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.servicer import SchedulerServicer

ROOT = Path(__file__).parents[3]
PACKAGES = ("octavo", "gateway", "scheduler_svc", "executor_svc")
TIMEOUT = 10
HANGS_FOR = 0.5
"""Seconds after which a call that should have ended is taken to hang."""

FULL = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full", retry_delay=1.5)
LARGE = inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="a" * 100_000))


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Ends in the way that the request's text names, and keeps what it saw."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.finished = asyncio.Event()
        self.context: Any = None
        self.num_written = 0
        self.cancelled_in_callback: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def _end(self, how: str, context: Any) -> None:
        self.context = context
        self.started.set()
        try:
            if how == "raise":
                raise asyncio.CancelledError
            if how == "inner":
                inner = asyncio.ensure_future(asyncio.sleep(TIMEOUT))
                inner.cancel()
                await inner
            if how == "error":
                raise FULL
            if how == "broken":
                raise grpc.aio.InternalError
            context.add_done_callback(lambda done: self.cancelled_in_callback.set_result(done.cancelled()))
            await asyncio.sleep(TIMEOUT)
        finally:
            self.finished.set()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:  # noqa: N802
        await self._end(request.text, context)
        return inference_pb2.TokenizeResponse()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        if request.text != "flood":
            await context.write(inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="a")))
            await self._end(request.text, context)
            return
        try:
            while True:
                await context.write(LARGE)
                self.num_written += 1
        finally:
            self.finished.set()


class YieldingServicer(Servicer):
    """The same stream written with yield, as reflection and health in grpcio are."""

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="a"))
        await self._end(request.text, context)


@asynccontextmanager
async def serving(
    servicer: Servicer, *interceptors: grpc.aio.ServerInterceptor
) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """A server with these interceptors, and a stub of it."""
    server = grpc.aio.server(interceptors=interceptors)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(0)


async def call(stub: inference_pb2_grpc.InferenceServiceAsyncStub, kind: str, how: str) -> None:
    """Make a call of a kind and wait for its end."""
    if kind == "unary":
        await stub.Tokenize(inference_pb2.TokenizeRequest(text=how))
    else:
        async for _ in stub.Generate(inference_pb2.GenerateRequest(text=how)):
            pass


@pytest.mark.asyncio
async def test_grpc_leaves_the_client_of_a_self_cancelled_handler_waiting() -> None:
    """The trap: a CancelledError that the handler itself raised is answered with nothing (grpc#29248)."""
    async with serving(Servicer()) as stub:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HANGS_FOR):
                await call(stub, "unary", "raise")


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Servicer, YieldingServicer])
@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("how", ["raise", "inner"])
async def test_a_self_cancelled_handler_ends_its_call(make: type[Servicer], kind: str, how: str) -> None:
    """With the interceptor the client of a handler that was cancelled by nobody gets INTERNAL, at once."""
    async with serving(make(), ErrorInterceptor()) as stub, asyncio.timeout(TIMEOUT):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(stub, kind, how)
        assert from_rpc_error(raised.value).reason == "INTERNAL"


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Servicer, YieldingServicer])
@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_client_that_cancels_ends_the_handler(
    make: type[Servicer], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A real cancel reaches a waiting handler's finally-blocks, and is no error in the log.

    The call itself is cancelled: cancelling a task that iterates over it leaves the call alive where the cancel arrives
    before the first message.
    """
    servicer = make()
    async with serving(servicer, ErrorInterceptor()) as stub, asyncio.timeout(TIMEOUT):
        waiting: Any = (
            stub.Tokenize(inference_pb2.TokenizeRequest(text="wait"))
            if kind == "unary"
            else stub.Generate(inference_pb2.GenerateRequest(text="wait"))
        )
        await servicer.started.wait()
        waiting.cancel()
        await servicer.finished.wait()
        assert await waiting.code() is grpc.StatusCode.CANCELLED
        assert await servicer.cancelled_in_callback is False
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.asyncio
async def test_cancelled_says_no_after_a_cancel() -> None:
    """The trap: context.cancelled() is False for a call that its client cancelled (grpc#36193)."""
    servicer = Servicer()
    async with serving(servicer, ErrorInterceptor()) as stub, asyncio.timeout(TIMEOUT):
        task = asyncio.create_task(call(stub, "unary", "wait"))
        await servicer.started.wait()
        task.cancel()
        assert await servicer.cancelled_in_callback is False
        assert servicer.context.cancelled() is False


def test_no_code_asks_a_context_whether_it_was_cancelled() -> None:
    """Endings are finally-blocks: nothing of ours relies on add_done_callback or cancelled() of a context."""
    for path, node in nodes():
        if isinstance(node, ast.Attribute) and node.attr in ("cancelled", "add_done_callback", "add_callback"):
            owner = ast.unparse(node.value)
            assert "context" not in owner, f"{path}:{node.lineno} relies on {owner}.{node.attr}"


@pytest.mark.asyncio
async def test_a_write_that_a_cancel_breaks_off_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that writes to a client that left ends, its finally-blocks run, and no error is logged (grpc#22874).

    Whether the write fails or the handler is cancelled first is chance: the next test has the failure for certain.
    """
    async with asyncio.timeout(TIMEOUT):
        for _ in range(10):
            servicer = Servicer()
            async with serving(servicer, ErrorInterceptor()) as stub:
                stream = stub.Generate(inference_pb2.GenerateRequest(text="flood"))
                await stream.read()
                written = -1
                while written != servicer.num_written:  # until a write waits for the client to read
                    written = servicer.num_written
                    await asyncio.sleep(0.02)
                stream.cancel()
                await servicer.finished.wait()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_broken_write_ends_the_call_quietly(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What grpc raises from a write to nobody is the client's doing: CANCELLED, and no error in the log."""
    async with serving(Servicer(), ErrorInterceptor()) as stub, asyncio.timeout(TIMEOUT):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(stub, kind, "broken")
    assert from_rpc_error(raised.value).reason == "CLIENT_GONE"
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class GoneContext:
    """The context of a call whose client left a moment ago: nothing can be sent any more, and nobody has been told."""

    def trailing_metadata(self) -> None:
        """Return what the handler set: nothing."""

    async def abort(self, *status: object) -> None:
        """Fail as grpc does."""
        raise grpc.aio.InternalError(f"cannot send {status}")


@pytest.mark.asyncio
async def test_a_status_that_reaches_nobody_ends_the_call_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """An error for a client that left as it was sent ends as a cancel, with no error in the log."""

    async def fail(request: object, context: object) -> None:
        raise FULL

    async def continuation(details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(fail)

    handler = await ErrorInterceptor().intercept_service(continuation, SimpleNamespace(method="/a/b"))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(None, GoneContext())
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "servicer", [InferenceServicer, ModelServicer, AdminServicer, SchedulerServicer, ExecutorService]
)
def test_no_handler_yields(servicer: type) -> None:
    """Our streams are coroutines that write: grpc does not close a generator that is left suspended at its yield."""
    rpcs = [method for name, method in vars(servicer).items() if name[:1].isupper()]
    assert rpcs
    assert all(inspect.iscoroutinefunction(rpc) for rpc in rpcs)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Servicer, YieldingServicer])
@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_an_abort_ends_the_call(make: type[Servicer], kind: str) -> None:
    """An error before and after the first message of a stream ends the call with that error (grpc#28989)."""
    async with serving(make(), ErrorInterceptor()) as stub, asyncio.timeout(TIMEOUT):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(stub, kind, "error")
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason, error.retry_delay) == (FULL.code, FULL.reason, FULL.retry_delay)


def test_no_server_with_threads() -> None:
    """The threaded server, where abort in a stream can hang, is started nowhere."""
    for path, node in nodes():
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "grpc.server", f"{path}:{node.lineno}"


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every node of our source."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    return [(path.relative_to(ROOT), node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
