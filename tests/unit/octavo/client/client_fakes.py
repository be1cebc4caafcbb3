"""A gateway that does as a test says, and both clients behind one face.

It is a server with threads: two event loops that run gRPC at once in one process disturb each other, and the asyncio
client under test has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.client import AsyncClient, AsyncGenerateStream, Client, Delta, GenerateStream
from octavo.client.discovery import ADMIN, GATEWAY
from octavo.rpc.errors import ServiceError, to_rpc_status
from octavo.rpc.limits import SERVER_OPTIONS
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, model_pb2, model_pb2_grpc
from octavo.v1 import inference_pb2 as pb

TIMEOUT = 10.0
STARTED = pb.Started(
    request_id="g-1", model="m", model_revision="r", seed=7, prompt_tokens=3, max_tokens=9, cached_tokens=1
)
NO_EXECUTOR = ("NO_EXECUTOR", "no executor is ready for the model")


class Call:
    """One call, as a behaviour sees it."""

    def __init__(self, gateway: FakeGateway, context: Any) -> None:
        self.gateway = gateway
        self._context = context

    def accept(self) -> None:
        """Send the headers."""
        self._context.send_initial_metadata(())

    def abort(self, error: ServiceError) -> None:
        """End the call with an error, details included."""
        self._context.set_trailing_metadata((("grpc-status-details-bin", to_rpc_status(error).SerializeToString()),))
        self._context.abort(error.code, error.message)

    def drop(self) -> None:
        """End the call as a server of gRPC's does that closes before it has begun it."""
        self._context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the call has ended, at once where it has."""
        if not self._context.add_callback(callback):
            callback()


Behaviour = Callable[[Call], Iterator[Any]]
"""Yields the answers of one call."""


class FakeGateway:
    """Serves every rpc. The n-th call gets the n-th of `behaviours`, the last one where there are no more."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.behaviours = behaviours
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.began = threading.Event()
        """A call is in its handler."""
        self.ended = threading.Event()
        """A hanging call has ended."""
        self.address = ""
        self.checksum = 0
        """That of the last request, where it had one."""
        self._changed = threading.Condition()
        self._num_ended = 0

    def note_end(self) -> None:
        """Take note of the end of a hanging call."""
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()
        self.ended.set()

    def wait_all_ended(self) -> bool:
        """Wait until no call is in its handler; for a gateway that only hangs. False after TIMEOUT."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_ended == len(self.requests), TIMEOUT)

    def answers(self, request: Any, context: Any) -> Iterator[Any]:
        """Serve one call."""
        behaviour = self.behaviours[min(len(self.requests), len(self.behaviours) - 1)]
        if isinstance(request, pb.GenerateRequest | pb.GenerateOnceRequest | pb.ScoreRequest):
            self.checksum = request.checksum
            request.ClearField("checksum")  # tests compare what was asked
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.began.set()
        yield from behaviour(Call(self, context))

    def answer(self, request: Any, context: Any) -> Any:
        """Serve one call that has one answer."""
        return next(self.answers(request, context), pb.Usage())  # a call that was cut is answered to nobody

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():  # an rpc has a name like Generate
            raise AttributeError(name)
        return self.answers if name == "Generate" else self.answer


def answer(*words: str) -> Behaviour:
    """Stream one word a token, as an accepted request."""

    def behave(call: Call) -> Iterator[Any]:
        call.accept()
        yield pb.GenerateResponse(started=STARTED)
        yield from deltas_of(words)
        end = pb.ChoiceFinished(reason=pb.FINISH_REASON_STOP, stop_token_id=2, completion_tokens=len(words))
        yield pb.GenerateResponse(choice_finished=end)
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=len(words), cached_tokens=2))

    return behave


def deltas_of(words: Sequence[str]) -> Iterator[pb.GenerateResponse]:
    """One word a token."""
    for index, word in enumerate(words):
        yield pb.GenerateResponse(delta=pb.Delta(first_token_index=index, text=word, token_ids=[index + 10]))


def send(*events: pb.GenerateResponse) -> Behaviour:
    """Stream just these events."""
    return lambda call: iter(events)


def reply(*messages: Any) -> Behaviour:
    """Answer a unary call; the n-th call with the n-th message."""
    left = list(messages)
    return lambda call: iter([left.pop(0) if len(left) > 1 else left[0]])


def fail(
    code: grpc.StatusCode, reason: str, message: str, *, after: Sequence[pb.GenerateResponse] = (), **details: Any
) -> Behaviour:
    """End the call with an error: at once, or after some events."""

    def behave(call: Call) -> Iterator[Any]:
        yield from after
        call.abort(ServiceError(code, reason, message, **details))

    return behave


def hang(*words: str) -> Behaviour:
    """Stream some words, then wait until the call is cut."""

    def behave(call: Call) -> Iterator[Any]:
        cut = threading.Event()
        # grpc does not go on with the iterator of a call that was cut while it wrote.
        call.when_ended(call.gateway.note_end)
        call.when_ended(cut.set)
        yield from deltas_of(words)
        cut.wait(TIMEOUT)

    return behave


@contextlib.contextmanager
def serving(
    *behaviours: Behaviour, port: int = 0, is_serving: bool = True, services: Sequence[str] | None = None
) -> Iterator[FakeGateway]:
    """Serve a FakeGateway; `services`: those its health knows, by default both APIs."""
    gateway = FakeGateway(*behaviours)
    status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
    board = health.HealthServicer()
    for name in (GATEWAY.service, ADMIN.service) if services is None else services:
        board.set(name, status)
    with ThreadPoolExecutor(8, thread_name_prefix="fake-gateway") as pool:
        server = grpc.server(pool, options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(board, server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(gateway, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(gateway, server)
        gateway.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        server.start()
        try:
            yield gateway
        finally:
            server.stop(0).wait(TIMEOUT)


class SyncFace:
    """The blocking client, as tests of both use it."""

    def call(self, address: str | Sequence[str] | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Make one call with a client of its own."""
        with Client(address) as client:
            return getattr(client, method)(*args, **kwargs)

    def read(
        self, address: str | Sequence[str] | None, prompt: Any, *, into: list[str] | None = None, **options: Any
    ) -> tuple[list[Delta], GenerateStream]:
        """Generate and read to the end; each text goes `into` a list as it comes."""
        deltas, texts = [], [] if into is None else into
        with Client(address) as client:
            stream = client.generate(prompt, **options)
            for delta in stream:
                deltas.append(delta)
                texts.append(delta.text)
        return deltas, stream

    def collect(self, stream: Any) -> list[Delta]:
        """Loop over a stream."""
        return list(stream)


class AsyncFace:
    """The asyncio client, likewise."""

    def call(self, address: str | Sequence[str] | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Make one call with a client of its own."""

        async def call() -> Any:
            async with AsyncClient(address) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(call())

    def read(
        self, address: str | Sequence[str] | None, prompt: Any, *, into: list[str] | None = None, **options: Any
    ) -> tuple[list[Delta], AsyncGenerateStream]:
        """Generate and read to the end; each text goes `into` a list as it comes."""
        deltas, texts = [], [] if into is None else into

        async def read() -> AsyncGenerateStream:
            async with AsyncClient(address) as client:
                stream = client.generate(prompt, **options)
                async for delta in stream:
                    deltas.append(delta)
                    texts.append(delta.text)
            return stream

        return deltas, asyncio.run(read())

    def collect(self, stream: Any) -> list[Delta]:
        """Loop over a stream."""

        async def collect() -> list[Delta]:
            return [delta async for delta in stream]

        return asyncio.run(collect())


Face = SyncFace | AsyncFace


def model(name: str) -> model_pb2.Model:
    """A served model."""
    return model_pb2.Model(
        name=name,
        revision="abc",
        max_model_len=64,
        vocab_size=320,
        eos_token_ids=[2, 3],
        supports_chat=True,
        ready_executors=1,
        default_sampling=model_pb2.DefaultSampling(
            temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, repetition_penalty=1.5
        ),
    )


def request_info(request_id: str) -> admin_pb2.RequestInfo:
    """A live request with a deadline."""
    info = admin_pb2.RequestInfo(
        request_id=request_id,
        label="mine",
        model="m",
        tenant="t",
        state=admin_pb2.REQUEST_STATE_RUNNING,
        prompt_tokens=3,
        completion_tokens=4,
        live_choices=1,
        kv_blocks=5,
        executors=["a:1", "b:2"],
        wait_reason=admin_pb2.WAIT_REASON_NO_FREE_ROW,
        cached_tokens=2,
        priority=-6,
        preemptions=7,
    )
    info.age.FromMilliseconds(1500)
    info.remaining_deadline.FromMilliseconds(250)
    return info
