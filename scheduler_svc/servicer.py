"""SchedulerService over gRPC: checks frames, calls the domain, maps errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio

from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.rpc.limits import MAX_TERM
from octavo.rpc.seal import SealCheck
from scheduler_svc.admin_convert import cancel_target, list_query, list_response
from scheduler_svc.convert import cancel_reason, request_record
from scheduler_svc.drains import Drains
from scheduler_svc.engine_loop import EngineFailedError, EngineLoop
from scheduler_svc.gateways import Attachment, Gateways, stopping_error
from scheduler_svc.kv_convert import kv_query, kv_response
from scheduler_svc.load_convert import load_response
from scheduler_svc.tasks import until_first
from scheduler_svc.term import StaleTermError, Term

logger = logging.getLogger(__name__)

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

_AttachContext = grpc.aio.ServicerContext[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves gateways. `cell` is the one that this scheduler is for."""

    def __init__(self, engine_loop: EngineLoop, gateways: Gateways, term: Term, cell: str, drains: Drains) -> None:
        self._drains = drains
        self._engine_loop = engine_loop
        self._gateways = gateways
        self._term = term
        self._cell = cell

    async def Attach(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[scheduler_pb2.AttachRequest],  # noqa: ARG002 - frames are read from the context
        context: _AttachContext,
    ) -> None:
        """Serve one gateway's stream until either side ends it."""
        hello = await self._read_hello(context)
        if hello is None:
            return
        term = await self._agree_on_term(hello)
        with _engine_at_work():
            attachment = self._gateways.attach(hello.incarnation, hello.live_requests, term)
            try:
                await until_first(
                    attachment.closed(), self._read_frames(attachment, context), _write_frames(attachment, context)
                )
            finally:
                self._gateways.detach(attachment)

    async def GetLoad(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.GetLoadRequest,  # noqa: ARG002 - it has no fields
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.GetLoadResponse:
        """Tell the load in full."""
        term = await self._term.fixed()
        with _engine_at_work():
            return load_response(term, len(self._gateways), self._engine_loop.load())

    async def ListRequests(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.ListRequestsResponse:
        """List a page of the live requests."""
        term = await self._term.fixed()
        after, limit = list_query(request, term)
        with _engine_at_work():
            return list_response(self._engine_loop.list_requests(after, limit), term)

    async def CancelRequest(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.CancelRequestRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.CancelRequestResponse:
        """End a live request for an operator."""
        incarnation, counter = cancel_target(request)
        with _engine_at_work():
            self._gateways.cancel_for_operator(incarnation, counter)
        return scheduler_pb2.CancelRequestResponse()

    async def GetKvState(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.GetKvStateRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.GetKvStateResponse:
        """Account for every block."""
        term = await self._term.fixed()
        query = kv_query(request, term)
        with _engine_at_work():
            return kv_response(self._engine_loop.kv_state(query), term)

    async def FlushPrefixCache(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.FlushPrefixCacheRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.FlushPrefixCacheResponse:
        """Forget what the prefix cache holds."""
        with _engine_at_work():
            num_freed_blocks = self._engine_loop.flush_prefix_cache(request.executor)
        return scheduler_pb2.FlushPrefixCacheResponse(num_freed_blocks=num_freed_blocks)

    async def Drain(  # noqa: N802 - the contract's name
        self,
        request: scheduler_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - grpc passes it
    ) -> scheduler_pb2.DrainResponse:
        """Have a service of the cell stop."""
        match request.WhichOneof("target"):
            case "scheduler" if request.scheduler:
                self._drains.drained.set()
            case "executor":
                if not self._drains.drain_executor(request.executor):
                    raise _not_there("EXECUTOR_NOT_FOUND", f"no executor at {request.executor!r} is in session")
            case "gateway":
                if not self._gateways.drain_gateway(request.gateway):
                    raise _not_there("GATEWAY_NOT_FOUND", f"no gateway {request.gateway!r} is attached")
            case _:
                violation = FieldViolation("target", "must be the scheduler, an executor or a gateway")
                raise invalid_argument([violation])
        return scheduler_pb2.DrainResponse()

    async def _read_hello(self, context: _AttachContext) -> scheduler_pb2.Hello | None:
        frame = await context.read()
        if not isinstance(frame, scheduler_pb2.AttachRequest):
            return None  # the gateway went away
        if frame.WhichOneof("frame") != "hello" or not frame.hello.incarnation:
            raise invalid_argument([FieldViolation("hello.incarnation", "Hello must come first and name the gateway")])
        if frame.hello.cell != self._cell:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "WRONG_CELL",
                f"this scheduler serves cell {self._cell!r}, the gateway was started for {frame.hello.cell!r}",
                metadata={"scheduler_cell": self._cell, "gateway_cell": frame.hello.cell},
            )
        if frame.hello.highest_term > MAX_TERM:
            raise invalid_argument([FieldViolation("hello.highest_term", f"must be at most {MAX_TERM}")])
        return frame.hello

    async def _agree_on_term(self, hello: scheduler_pb2.Hello) -> int:
        try:
            self._term.heard(f"gateway {hello.incarnation}", hello.highest_term)
            return await self._term.fixed()
        except StaleTermError as error:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "STALE_TERM",
                str(error),
                metadata={"term": str(error.term), "told": str(error.told)},
            ) from error

    async def _read_frames(self, attachment: Attachment, context: _AttachContext) -> None:
        """Take frames in until the gateway ends the stream."""
        seals = SealCheck()
        attachment.num_received_frames = 1  # Hello
        while True:
            frame = await context.read()
            if not isinstance(frame, scheduler_pb2.AttachRequest) or not attachment.is_open:
                return
            if not seals.is_whole(frame):
                raise invalid_argument([FieldViolation("checksum", "is missing, though earlier frames had one")])
            attachment.num_received_frames += 1
            match frame.WhichOneof("frame"):
                case "submit":
                    self._submit(attachment, frame.submit)
                case "cancel":
                    self._cancel(attachment, frame.cancel)
                case "ack":
                    self._gateways.acknowledge(attachment, frame.ack.sequence)
                case "take_up":
                    asked = frame.take_up
                    first_id = (asked.first_gateway, asked.first_request)
                    self._gateways.take_up(attachment, asked.request, first_id, asked.tenant)
                case other:
                    violation = FieldViolation("frame", f"{other or 'nothing'} does not belong here")
                    raise invalid_argument([violation])

    def _submit(self, attachment: Attachment, submit: scheduler_pb2.Submit) -> None:
        try:
            record = request_record(attachment.incarnation, submit)
        except ServiceError as error:
            self._gateways.reject(attachment, submit.request, error)
        else:
            self._gateways.submit(attachment, record)

    def _cancel(self, attachment: Attachment, cancel: scheduler_pb2.Cancel) -> None:
        self._gateways.cancel(
            attachment,
            cancel.request,
            cancel.choice if cancel.HasField("choice") else None,
            cancel.kept_tokens if cancel.HasField("kept_tokens") else None,
            cancel_reason(cancel),
        )


def _not_there(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.NOT_FOUND, reason, f"{message}; `octavo load` (GetLoad) lists what is there")


@contextmanager
def _engine_at_work() -> Iterator[None]:
    """Turn a failure of the engine into UNAVAILABLE: the process ends, and another will answer."""
    try:
        yield
    except EngineFailedError as error:
        raise stopping_error() from error


async def _write_frames(attachment: Attachment, context: _AttachContext) -> NoReturn:
    """Write what the gateway is owed, for ever."""
    while True:
        await context.write(await attachment.next_frame())
