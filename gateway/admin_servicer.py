"""octavo.v1.AdminService: the cell as an operator sees it. Errors are raised; octavo.rpc maps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from gateway.admin_client import AdminClient, SilentSchedulerError
from gateway.admin_convert import kv_state_to_proto, load_to_proto, requests_to_proto
from gateway.live_request import parse_request_id
from gateway.unknown_fields import refuse_unknown_fields
from gateway.validation import DEFAULT_PAGE_SIZE, check_page_size
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, invalid_argument
from octavo.v1 import admin_pb2, admin_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Shows and steers the cell."""

    def __init__(self, scheduler: AdminClient, incarnation: str, drain: Callable[[], None]) -> None:
        """`incarnation`: of this gateway; `drain` has it stop."""
        self._scheduler = scheduler
        self._incarnation = incarnation
        self._drain = drain

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: _Context
    ) -> admin_pb2.ListRequestsResponse:
        """Answer with a page of the cell's live requests. The scheduler made the page token, and checks it."""
        refuse_unknown_fields(request)
        if violations := list(check_page_size(request.page_size)):
            raise invalid_argument(violations)
        page_size = request.page_size or DEFAULT_PAGE_SIZE
        with _told_at_once(context):
            answer = await self._scheduler.list_requests(page_size, request.page_token, context.time_remaining())
        return requests_to_proto(answer)

    async def CancelRequest(  # noqa: N802
        self, request: admin_pb2.CancelRequestRequest, context: _Context
    ) -> admin_pb2.CancelRequestResponse:
        """End a request, whichever gateway serves it."""
        refuse_unknown_fields(request)
        parsed = parse_request_id(request.request_id)
        if parsed is None:
            what = "must be an id that Started or ListRequests gave" if request.request_id else "is required"
            raise invalid_argument([FieldViolation("request_id", what)])
        with _told_at_once(context):
            await self._scheduler.cancel_request(*parsed, context.time_remaining())
        return admin_pb2.CancelRequestResponse()

    async def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, context: _Context
    ) -> admin_pb2.GetLoadResponse:
        """Answer with the load of the cell."""
        refuse_unknown_fields(request)
        with _told_at_once(context):
            return load_to_proto(await self._scheduler.get_load(context.time_remaining()))

    async def GetKvState(  # noqa: N802
        self, request: admin_pb2.GetKvStateRequest, context: _Context
    ) -> admin_pb2.GetKvStateResponse:
        """Answer with the accounts of KV blocks. The scheduler checks the page token, which it made, and the map."""
        refuse_unknown_fields(request)
        if violations := list(check_page_size(request.page_size)):
            raise invalid_argument(violations)
        question = scheduler_pb2.GetKvStateRequest(
            executor=request.executor,
            page_size=request.page_size or DEFAULT_PAGE_SIZE,
            page_token=request.page_token,
            block_ids=request.block_ids,
            map_cells=request.map_cells,
        )
        with _told_at_once(context):
            answer = await self._scheduler.get_kv_state(question, context.time_remaining())
        return kv_state_to_proto(answer)

    async def FlushPrefixCache(  # noqa: N802
        self, request: admin_pb2.FlushPrefixCacheRequest, context: _Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forget what the prefix cache holds."""
        refuse_unknown_fields(request)
        with _told_at_once(context):
            freed_blocks = await self._scheduler.flush_prefix_cache(request.executor, context.time_remaining())
        return admin_pb2.FlushPrefixCacheResponse(freed_blocks=freed_blocks)

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:  # noqa: N802
        """Have a service stop: this gateway itself, or another by way of the scheduler."""
        refuse_unknown_fields(request)
        target = request.WhichOneof("target")
        if target == "gateway" and request.gateway in ("self", self._incarnation):
            self._drain()
            return admin_pb2.DrainResponse()
        if target is None or not getattr(request, target):
            raise invalid_argument([FieldViolation("target", "must name a gateway, the scheduler or an executor")])
        asked = scheduler_pb2.DrainRequest(**{target: getattr(request, target)})
        with _told_at_once(context):
            await self._scheduler.drain(asked, context.time_remaining())
        return admin_pb2.DrainResponse()


@contextlib.contextmanager
def _told_at_once(context: _Context) -> Iterator[None]:
    """Let the client's gRPC not send a call again that nobody answers (gRFC A6, pushback).

    It would wait again each time, and its caller would run out of time without having heard why.
    """
    try:
        yield
    except SilentSchedulerError:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "-1"),))
        raise
