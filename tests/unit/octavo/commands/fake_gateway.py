"""A gateway with both of its APIs that says what it is told to, on an event loop in a thread of its own.

The commands run loops of their own in the main thread, as they do for a user.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from octavo.rpc.errors import ServiceError
from octavo.rpc.server import RpcServer
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, model_pb2, model_pb2_grpc
from octavo.v1 import inference_pb2 as pb

TIMEOUT = 30.0
HANG = "<hang>"
"""A word that is never sent: the stream waits there until its client leaves."""

_Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[[pb.GenerateRequest], Sequence[str] | ServiceError]


@dataclass
class FakeGateway:
    """What is scripted, and what was asked."""

    script: Script = lambda request: ["yes"]
    models: list[model_pb2.Model] = field(
        default_factory=lambda: [model_pb2.Model(name="m", supports_chat=True, ready_executors=1)]
    )
    live: list[admin_pb2.RequestInfo] = field(default_factory=list)
    load: admin_pb2.GetLoadResponse = field(default_factory=admin_pb2.GetLoadResponse)
    gone: set[str] = field(default_factory=set)
    """Ids that are listed and have ended when they are to be cancelled."""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled_ids: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left a stream that hung."""
    address: str = ""
    admin_address: str = ""

    def conversations(self) -> list[list[tuple[str, str]]]:
        """Return the messages of each request, as (role, content)."""
        names = {pb.CHAT_ROLE_SYSTEM: "system", pb.CHAT_ROLE_USER: "user", pb.CHAT_ROLE_ASSISTANT: "assistant"}
        return [[(names[each.role], each.content) for each in request.chat.messages] for request in self.requests]


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream the script, a word a token."""
        self._fake.requests.append(request)
        words = self._fake.script(request)
        if isinstance(words, ServiceError):
            raise words
        await context.write(pb.GenerateResponse(started=pb.Started(prompt_tokens=5, seed=7)))
        for index, word in enumerate(words):
            if word == HANG:
                try:
                    await asyncio.Event().wait()
                finally:
                    self._fake.left.set()
            delta = pb.Delta(first_token_index=index, text=word, token_ids=[index])
            await context.write(pb.GenerateResponse(delta=delta))
        reason = pb.FINISH_REASON_LENGTH if request.stopping.max_tokens == len(words) else pb.FINISH_REASON_STOP
        finished = pb.ChoiceFinished(reason=reason, completion_tokens=len(words))
        await context.write(pb.GenerateResponse(choice_finished=finished))
        await context.write(pb.GenerateResponse(usage=pb.Usage(prompt_tokens=5, completion_tokens=len(words))))


class _Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """List them on one page."""
        return model_pb2.ListModelsResponse(models=self._fake.models)


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: _Context
    ) -> admin_pb2.ListRequestsResponse:
        """List them on one page."""
        return admin_pb2.ListRequestsResponse(requests=self._fake.live)

    async def CancelRequest(  # noqa: N802
        self, request: admin_pb2.CancelRequestRequest, context: _Context
    ) -> admin_pb2.CancelRequestResponse:
        """Note what is to be cancelled."""
        if request.request_id in self._fake.gone:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", "no such request is live")
        self._fake.cancelled_ids.append(request.request_id)
        return admin_pb2.CancelRequestResponse()

    async def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, context: _Context
    ) -> admin_pb2.GetLoadResponse:
        """Return the scripted load."""
        return self._fake.load


async def _serve(fake: FakeGateway, is_up: threading.Event, stop: asyncio.Event) -> None:
    public, admin = RpcServer("127.0.0.1", 0), RpcServer("127.0.0.1", 0)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(fake), public.server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(fake), public.server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(fake), admin.server)
    await public.start("octavo.v1.InferenceService", "octavo.v1.ModelService")
    await admin.start("octavo.v1.AdminService")
    await public.health.set("octavo.v1.InferenceService", True)
    await admin.health.set("octavo.v1.AdminService", True)
    fake.address, fake.admin_address = f"127.0.0.1:{public.port}", f"127.0.0.1:{admin.port}"
    is_up.set()
    await stop.wait()
    await public.stop(0)
    await admin.stop(0)


@contextmanager
def running(fake: FakeGateway) -> Iterator[FakeGateway]:
    """Serve it on free ports."""
    is_up, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(fake, is_up, stop))

    thread = threading.Thread(target=serve, name="fake gateway")
    thread.start()
    try:
        assert is_up.wait(TIMEOUT)
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive()
