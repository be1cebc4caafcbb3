"""The operator's questions to the scheduler, one unary call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from gateway.cell import Cell, no_scheduler
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.rpc.errors import ServiceError, from_rpc_error

PATIENCE = 3.0
"""Seconds that the scheduler has to answer. It does at once, or hangs."""

# What grpc says by itself, without details, of a peer that is gone or going.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class SilentSchedulerError(ServiceError):
    """The scheduler is attached and does not answer: another try would only wait as long."""


class AdminClient:
    """Asks the scheduler that this gateway is attached to. It knows the requests of all gateways.

    Each call raises ServiceError: UNAVAILABLE with a retry delay where no scheduler is attached or it does not answer,
    DEADLINE_EXCEEDED where the operator's time is up first, or the scheduler's own. `remaining`: seconds until the
    operator's deadline, None without one.
    """

    def __init__(self, channel: grpc.aio.Channel, cell: Cell) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._cell = cell

    async def list_requests(
        self, page_size: int, page_token: str, remaining: float | None
    ) -> scheduler_pb2.ListRequestsResponse:
        """Return a page of the live requests, oldest first."""
        request = scheduler_pb2.ListRequestsRequest(page_size=page_size, page_token=page_token)
        answer: scheduler_pb2.ListRequestsResponse = await self._ask(self._stub.ListRequests, request, remaining)
        return answer

    async def cancel_request(self, incarnation: str, counter: int, remaining: float | None) -> None:
        """End a request of any gateway. Raises NOT_FOUND where it is not live."""
        request = scheduler_pb2.CancelRequestRequest(gateway=incarnation, request=counter)
        await self._ask(self._stub.CancelRequest, request, remaining)

    async def get_load(self, remaining: float | None) -> scheduler_pb2.GetLoadResponse:
        """Return the load of the cell."""
        answer: scheduler_pb2.GetLoadResponse = await self._ask(
            self._stub.GetLoad, scheduler_pb2.GetLoadRequest(), remaining
        )
        return answer

    async def get_kv_state(
        self, request: scheduler_pb2.GetKvStateRequest, remaining: float | None
    ) -> scheduler_pb2.GetKvStateResponse:
        """Return who holds which KV block. Raises NOT_FOUND where the executor asked for has no session."""
        answer: scheduler_pb2.GetKvStateResponse = await self._ask(self._stub.GetKvState, request, remaining)
        return answer

    async def flush_prefix_cache(self, executor: str, remaining: float | None) -> int:
        """Forget the prefix cache of one executor, empty: of all; return how many blocks became free."""
        request = scheduler_pb2.FlushPrefixCacheRequest(executor=executor)
        answer: scheduler_pb2.FlushPrefixCacheResponse = await self._ask(
            self._stub.FlushPrefixCache, request, remaining
        )
        return answer.num_freed_blocks

    async def drain(self, request: scheduler_pb2.DrainRequest, remaining: float | None) -> None:
        """Have a service of the cell stop. Raises NOT_FOUND where it is not there."""
        await self._ask(self._stub.Drain, request, remaining)

    async def _ask(self, method: Callable[..., Any], request: object, remaining: float | None) -> Any:
        # A scheduler that answers but has refused this gateway, one of another cell for instance, is not to be steered.
        self._cell.require_scheduler()
        timeout = PATIENCE if remaining is None else min(PATIENCE, remaining)
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if timeout < PATIENCE:
                raise ServiceError(error.code, error.code.name, "the deadline passed before the scheduler answered")
            silent = no_scheduler(f"the scheduler did not answer within {PATIENCE:g} s")
            raise SilentSchedulerError(silent.code, silent.reason, silent.message, retry_delay=silent.retry_delay)
        if error.code in _GONE and error.reason == error.code.name:
            raise no_scheduler("the scheduler went away")
        raise error
