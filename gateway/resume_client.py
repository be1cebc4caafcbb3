"""Taking up requests whose streams were lost, here or at another gateway, and ending them for their clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc

from gateway.cell import Cell
from gateway.detached import Detached
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.logprob_record import RecordError
from gateway.requests import GenerateCommand
from gateway.resume_tokens import ResumeTokens
from gateway.scheduler_client import OnTakenUp
from gateway.served_models import ServedModels
from gateway.takeover_convert import take_over
from gateway.validation import check_resume
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument

RequestId = tuple[str, int]


class HandsOver(Protocol):
    """What is needed of the scheduler."""

    def take_up(self, counter: int, first_id: RequestId, tenant: str, on_taken_up: OnTakenUp) -> None:
        """Ask for a request. Raises ServiceError where no scheduler is there."""

    def submit(self, request: LiveRequest) -> None:
        """Send the full record of a request."""

    def cancel_counter(self, counter: int) -> None:
        """Tell that a request is not wanted, by its counter alone."""


class Resumption:
    """Takes requests up."""

    def __init__(
        self,
        tokens: ResumeTokens,
        models: ServedModels,
        live: LiveRequests,
        cell: Cell,
        scheduler: HandsOver,
        detached: Detached,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, the event loop's."""
        self._tokens = tokens
        self._models = models
        self._live = live
        self._cell = cell
        self._scheduler = scheduler
        self._detached = detached
        self._clock = clock

    def token_of(self, request: LiveRequest) -> str:
        """Return what takes a request up; empty where it cannot be."""
        return "" if request.resume_grace is None else self._tokens.make(request.first_id, request.tenant)

    async def take_up(self, command: GenerateCommand, tenant: str, *, streaming: bool) -> LiveRequest:
        """Return the request of a token, which is this gateway's from now on. Raises ServiceError."""
        assert command.resume is not None
        if violations := list(check_resume(command, streaming=streaming)):
            raise invalid_argument(violations)
        first_id = self._tokens.open(command.resume.token, tenant, "resume.token")
        counter = self._live.mint()
        answer: asyncio.Future[LiveRequest] = asyncio.get_running_loop().create_future()

        def on_taken_up(record: scheduler_pb2.Submit | None, error: ServiceError | None) -> None:
            # Now, and not when the waiter runs: outputs come right behind.
            try:
                request = self._taken_over(record, counter)
            except ServiceError as fault:
                request, error = None, fault
            if request is None:
                if not answer.done():
                    assert error is not None, "a scheduler hands over a record or says why not"
                    answer.set_exception(error)
                return
            if error is not None:
                request.fail(error, released=True)
            elif not request.is_complete:
                # The record is here: who had it is told only now. Were the scheduler to die before, that one has it.
                self._scheduler.submit(request)
            if answer.done():
                self._detached.hold(request)
            else:
                answer.set_result(request)

        self._scheduler.take_up(counter, first_id, tenant, on_taken_up)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._detached.hold(answer.result())
            raise

    def cancel(self, token: str, tenant: str) -> None:
        """End the request of a token, wherever it is. Raises ServiceError for what is no token of this tenant's."""
        if not token:
            raise invalid_argument([FieldViolation("resume_token", "is required")])
        first_id = self._tokens.open(token, tenant, "resume_token")
        request = self._live.find_by_first_id(first_id)
        if request is not None:
            message = "the client has cancelled the request"
            request.fail(ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_BY_CLIENT", message), released=False)
            return
        counter = self._live.mint()
        self._scheduler.take_up(counter, first_id, tenant, lambda _record, _error: None)
        self._scheduler.cancel_counter(counter)

    def _taken_over(self, record: scheduler_pb2.Submit | None, counter: int) -> LiveRequest | None:
        if record is None:
            return None
        model = next((each for each in self._models if each.name == record.model), None)
        if model is None or model.prepared.revision != record.model_revision:
            self._scheduler.cancel_counter(counter)
            message = f"this gateway does not serve revision {record.model_revision} of model {record.model}"
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_REVISION_MISMATCH", message)
        # Who has it meanwhile keeps it, and hands it over to the next who asks.
        self._live.check_not_closed()
        try:
            request = take_over(self._live, record, counter, model.name, self._clock())
        except (RecordError, ValueError) as fault:
            self._scheduler.cancel_counter(counter)
            message = f"the record of the request is damaged: {fault}"
            raise ServiceError(grpc.StatusCode.INTERNAL, "OUTPUT_FAULT", message) from fault
        request.resume_token = self.token_of(request)
        return request
