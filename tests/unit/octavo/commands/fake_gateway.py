"""A gateway with both of its APIs that says what it is told to.

It is a server with threads: the commands run event loops of their own, as they do for a user, and two loops that run
gRPC at once in one process disturb each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.rpc.errors import ServiceError, to_rpc_status
from octavo.rpc.limits import SERVER_OPTIONS
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, model_pb2, model_pb2_grpc
from octavo.v1 import inference_pb2 as pb

TIMEOUT = 30.0
HANG = "<hang>"
"""A word that is never sent: the stream waits there until its client leaves."""

_Context = grpc.ServicerContext
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
    kv_state: admin_pb2.GetKvStateResponse = field(default_factory=admin_pb2.GetKvStateResponse)
    kv_requests: list[admin_pb2.GetKvStateRequest] = field(default_factory=list)
    flushed: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """Ids that are listed and have ended when they are to be cancelled."""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled_ids: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left a stream that hung."""
    api_key: str = ""
    """What its clients must send, where it is set."""
    address: str = ""
    admin_address: str = ""

    def refuses(self, context: grpc.ServicerContext) -> bool:
        """Whether a call has no such key; its end is then on the way."""
        given = dict(context.invocation_metadata()).get("authorization")
        if not self.api_key or given == f"Bearer {self.api_key}":
            return False
        error = ServiceError(grpc.StatusCode.UNAUTHENTICATED, "MISSING_API_KEY", "an API key is required")
        # Not abort, which raises, and would make a generator of none.
        context.set_trailing_metadata((("grpc-status-details-bin", to_rpc_status(error).SerializeToString()),))
        context.set_code(error.code)
        context.set_details(error.message)
        return True

    def conversations(self) -> list[list[tuple[str, str]]]:
        """Return the messages of each request, as (role, content)."""
        names = {pb.CHAT_ROLE_SYSTEM: "system", pb.CHAT_ROLE_USER: "user", pb.CHAT_ROLE_ASSISTANT: "assistant"}
        return [[(names[each.role], each.content) for each in request.chat.messages] for request in self.requests]


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    def Generate(self, request: pb.GenerateRequest, context: _Context) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        """Stream the script, a word a token."""
        if self._fake.refuses(context):
            return
        self._fake.requests.append(request)
        words = self._fake.script(request)
        if isinstance(words, ServiceError):
            _abort(context, words)
            return
        if HANG in words and not context.add_callback(self._fake.left.set):
            # Before the first word: grpc asks for no further one once the client has left.
            self._fake.left.set()
        yield pb.GenerateResponse(started=pb.Started(prompt_tokens=5, seed=7))
        for index, word in enumerate(words):
            if word == HANG:
                self._fake.left.wait()
                return
            yield pb.GenerateResponse(delta=pb.Delta(first_token_index=index, text=word, token_ids=[index]))
        reason = pb.FINISH_REASON_LENGTH if request.stopping.max_tokens == len(words) else pb.FINISH_REASON_STOP
        finished = pb.ChoiceFinished(reason=reason, completion_tokens=len(words))
        yield pb.GenerateResponse(choice_finished=finished)
        usage = pb.Usage(prompt_tokens=5, completion_tokens=len(words), cached_tokens=self._fake.cached_tokens)
        yield pb.GenerateResponse(usage=usage)

    def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:  # noqa: N802
        """A token for each word."""
        self._fake.refuses(context)
        text = request.text or " ".join(each.content for each in request.chat.messages)
        return pb.TokenizeResponse(token_ids=range(len(text.split())))


class _Models(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """List them on one page."""
        self._fake.refuses(context)
        return model_pb2.ListModelsResponse(models=self._fake.models)


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, fake: FakeGateway) -> None:
        self._fake = fake

    def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: _Context
    ) -> admin_pb2.ListRequestsResponse:
        """List them on one page."""
        return admin_pb2.ListRequestsResponse(requests=self._fake.live)

    def CancelRequest(  # noqa: N802
        self, request: admin_pb2.CancelRequestRequest, context: _Context
    ) -> admin_pb2.CancelRequestResponse:
        """Note what is to be cancelled."""
        if request.request_id in self._fake.gone:
            _abort(context, ServiceError(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", "no such request is live"))
        self._fake.cancelled_ids.append(request.request_id)
        return admin_pb2.CancelRequestResponse()

    def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, context: _Context
    ) -> admin_pb2.GetLoadResponse:
        """Return the scripted load."""
        return self._fake.load

    def GetKvState(  # noqa: N802
        self, request: admin_pb2.GetKvStateRequest, context: _Context
    ) -> admin_pb2.GetKvStateResponse:
        """Return the scripted accounts."""
        self._fake.kv_requests.append(request)
        return self._fake.kv_state

    def FlushPrefixCache(  # noqa: N802
        self, request: admin_pb2.FlushPrefixCacheRequest, context: _Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Note whose cache is flushed; one block becomes free."""
        self._fake.flushed.append(request.executor)
        return admin_pb2.FlushPrefixCacheResponse(freed_blocks=1)


def _abort(context: _Context, error: ServiceError) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", to_rpc_status(error).SerializeToString()),))
    context.abort(error.code, error.message)


def _server(threads: ThreadPoolExecutor, *services: str) -> tuple[grpc.Server, str]:
    """Return a server that says SERVING for `services`, and its address; it is not started yet."""
    server = grpc.server(threads, options=SERVER_OPTIONS)
    board = health.HealthServicer()
    for name in services:
        board.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(board, server)
    return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


@contextmanager
def running(fake: FakeGateway) -> Iterator[FakeGateway]:
    """Serve it on free ports."""
    with ThreadPoolExecutor(16, thread_name_prefix="fake gateway") as threads:
        public, fake.address = _server(threads, "", "octavo.v1.InferenceService", "octavo.v1.ModelService")
        admin, fake.admin_address = _server(threads, "", "octavo.v1.AdminService")
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(fake), public)
        model_pb2_grpc.add_ModelServiceServicer_to_server(_Models(fake), public)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(fake), admin)
        public.start()
        admin.start()
        try:
            yield fake
        finally:
            for server in (public, admin):
                assert server.stop(0).wait(TIMEOUT)
