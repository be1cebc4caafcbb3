"""From a client's request to its events: checks it, gives it to the scheduler, ends it whatever happens.

Every way in (streaming, unary) reads the same events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import grpc
import grpc.aio

from gateway import validation
from gateway.cell import Cell
from gateway.choice_reader import ChoiceReader
from gateway.ending import CANCELLED, FAILED, FINISHED, Ending
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.prompts import tokenize
from gateway.requests import CancelReason, Event, FinishReason, GenerateCommand, Started, Usage
from gateway.served_models import ServedModel, ServedModels
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.rpc.telemetry import bind_request

logger = logging.getLogger(__name__)

CANCELLED_BY_OPERATOR = "CANCELLED_BY_OPERATOR"
"""The scheduler's reason where an operator wanted the end."""
_SLACK = 0.05
"""Seconds between a client's timer and ours that are the network's."""

_TOLD_REASONS = {CANCELLED[reason]: reason for reason in (CancelReason.DEADLINE, CancelReason.SHUTDOWN)}
"""What the scheduler is told of an end that it does not know of; for any other, that it is the client's."""


class Scheduler(Protocol):
    """What a request needs of the scheduler. Neither call waits: what a connection loses, the next one makes good."""

    def submit(self, request: LiveRequest) -> None:
        """Send the full record of a request."""

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Tell that a request is not wanted any more, in whatever state it is."""


class Generation:
    """The events of one request."""

    def __init__(self, request: LiveRequest, model: ServedModel) -> None:
        self._request = request
        self._choices = [
            ChoiceReader(index, choice, model.tokenizer.vocabulary, request.prompt_token_ids)
            for index, choice in enumerate(request.choices)
        ]
        self._has_started = False
        self._has_finished = False

    @property
    def request_id(self) -> str:
        """The id that the gateway gave the request."""
        return self._request.id

    async def next_events(self) -> list[Event]:
        """Return what has happened since the last call, waiting for it; nothing where all has been told.

        In all: Started, then Deltas and one ChoiceFinished per choice, then Usage. Raises the ServiceError that ends
        the request.
        """
        request = self._request
        while not self._has_finished:
            if request.error is not None:
                raise request.error
            if events := self._take_events():
                return events
            await request.changed.wait()
            request.changed.clear()
        return []

    def _take_events(self) -> list[Event]:
        request = self._request
        events: list[Event] = []
        if not request.confirmed:
            return events
        if not self._has_started:
            self._has_started = True
            events.append(self._started())
        for choice in sorted(request.news):
            reader = self._choices[choice]
            events.extend(reader.take_events())
            if not reader.has_unread_tokens:
                request.news.discard(choice)
        if request.is_complete and not request.news:
            self._has_finished = True
            events.append(Usage(len(request.prompt_token_ids), request.num_output_tokens))
        return events

    def _started(self) -> Started:
        request = self._request
        return Started(
            request_id=request.id,
            model=request.model,
            model_revision=request.model_revision,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.stopping.max_tokens,
        )


class Generator:
    """Runs requests."""

    def __init__(
        self,
        models: ServedModels,
        live: LiveRequests,
        cell: Cell,
        scheduler: Scheduler,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, the event loop's."""
        self._models = models
        self._live = live
        self._cell = cell
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock

    def check_open(self) -> None:
        """Raise ServiceError (UNAVAILABLE) where the gateway is shutting down."""
        self._live.check_open()

    @asynccontextmanager
    async def generate(
        self, command: GenerateCommand, *, deadline: float | None = None, traceparent: str = ""
    ) -> AsyncIterator[Generation]:
        """Run a request while the context is open. However that is left, the scheduler is told, and nothing stays.

        `deadline` is on the clock. Raises ServiceError: before anything is queued where the request is not to be run,
        and DEADLINE_EXCEEDED when its time is up, whatever the body waits for.
        """
        try:
            async with asyncio.timeout_at(deadline):
                with self._refusals_counted(deadline):
                    self.check_open()
                    model = self._models.resolve(command.model)
                    request = await self._accept(command, model, deadline, traceparent)
                with bind_request(request.id), self._submitted(request):
                    yield Generation(request, model)
        except TimeoutError:
            raise _deadline_exceeded() from None

    async def _accept(
        self, command: GenerateCommand, model: ServedModel, deadline: float | None, traceparent: str
    ) -> LiveRequest:
        """Check everything and start the record."""
        prepared = model.prepared
        violations = list(validation.check_parameters(command, prepared.vocab_size))
        bad_input = list(validation.check_input(command.input, prepared))
        prompt_token_ids: list[int] = []
        max_tokens = 0
        lengths: dict[str, str] = {}
        if command.input is not None and not bad_input:
            prompt_token_ids, bad_input = await tokenize(model, command.input)
        if command.input is not None and not bad_input:
            pool = self._cell.pool(prepared)
            max_model_len = pool.max_model_len if pool else prepared.max_position_embeddings
            bad_input += validation.check_prompt_length(command.input, len(prompt_token_ids), max_model_len)
            # Whoever is refused for the length learns whether the model could be served with a longer one.
            own = prepared.max_position_embeddings
            lengths = {"max_model_len": str(max_model_len), "max_position_embeddings": str(own)}
            max_tokens = validation.resolve_max_tokens(command, len(prompt_token_ids), max_model_len)
        if not bad_input:
            violations += validation.check_min_tokens(command, max_tokens)
        _raise_violations(bad_input + violations, lengths if bad_input else {})
        self._cell.require(prepared)
        if deadline is not None and self._clock() >= deadline:
            raise _deadline_exceeded()
        return self._live.add(
            label=command.label,
            model=prepared.name,
            model_revision=prepared.revision,
            prompt_token_ids=prompt_token_ids,
            sampling=validation.resolve_sampling(command, prepared),
            stopping=validation.resolve_stopping(command, prepared, max_tokens),
            num_choices=1 if command.n is None else command.n,
            deadline=deadline,
            traceparent=traceparent,
        )

    @contextmanager
    def _refusals_counted(self, deadline: float | None) -> Iterator[None]:
        """Count a request that does not get past the body."""
        try:
            yield
        except ServiceError as error:
            self._metrics.refuse(error.code)
            raise
        except asyncio.CancelledError:
            is_late = deadline is not None and self._clock() >= deadline
            self._metrics.refuse(grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED)
            raise
        except BaseException:
            self._metrics.refuse(grpc.StatusCode.INTERNAL)
            raise

    @contextmanager
    def _submitted(self, request: LiveRequest) -> Iterator[None]:
        """Give a request to the scheduler, and take it back however the body ends."""
        try:
            logger.info("request accepted", extra={"fields": _fields_of_accepted(request)})
            self._scheduler.submit(request)
            yield
        except BaseException as error:
            self._end(request, error)
            raise
        else:
            self._end(request, None)

    def _end(self, request: LiveRequest, ended_by: BaseException | None) -> None:
        ending = self._ending(request, ended_by)
        self._live.remove(request, ending)
        if not request.is_released:
            self._scheduler.cancel(request, _TOLD_REASONS.get(ending, CancelReason.CLIENT))
        error = ended_by.reason if isinstance(ended_by, ServiceError) else None
        logger.info("request finished", extra={"fields": self._fields_of_finished(request, ending, error)})

    def _ending(self, request: LiveRequest, ended_by: BaseException | None) -> Ending:
        """Return how a request has ended whose client was served until `ended_by`; None: to the end."""
        match ended_by:
            case None if request.is_complete:
                reasons = {choice.end.reason for choice in request.choices if choice.end is not None}
                return FINISHED[FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP]
            # InternalError: a write to a client that left before its cancel arrived.
            case None | asyncio.CancelledError() | grpc.aio.InternalError():
                if self._live.is_closed:
                    return CANCELLED[CancelReason.SHUTDOWN]
                return CANCELLED[CancelReason.DEADLINE if self._is_late(request) else CancelReason.CLIENT]
            case ServiceError(reason="SHUTTING_DOWN") if self._live.is_closed:
                return CANCELLED[CancelReason.SHUTDOWN]
            case ServiceError(reason=reason) if reason == CANCELLED_BY_OPERATOR:
                return CANCELLED[CancelReason.OPERATOR]
            case ServiceError(code=grpc.StatusCode.DEADLINE_EXCEEDED):
                return CANCELLED[CancelReason.DEADLINE]
            case ServiceError(code=code):
                return FAILED[code]
        return FAILED[grpc.StatusCode.INTERNAL]

    def _is_late(self, request: LiveRequest) -> bool:
        """Tell whether a request that is being ended has run out of time."""
        if request.deadline is None:
            return False
        # A client's own timer fires first, and its cancel does not say why: deadlines travel rounded up by a percent.
        slack = _SLACK + 0.02 * (request.deadline - request.accepted_at)
        return self._clock() >= request.deadline - slack

    def _fields_of_finished(self, request: LiveRequest, ending: Ending, error: str | None) -> dict[str, object]:
        first = request.first_token_at
        return {
            "outcome": ending.outcome.value,
            "reason": ending.reason,
            "error": error,
            "completion_tokens": request.num_output_tokens,
            "ttft_s": None if first is None else round(first - request.accepted_at, 4),
            "total_s": round(self._clock() - request.accepted_at, 4),
        }


def _fields_of_accepted(request: LiveRequest) -> dict[str, object]:
    return {
        "label": request.label,
        "model": request.model,
        "prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.stopping.max_tokens,
        "choices": len(request.choices),
    }


def _raise_violations(violations: list[FieldViolation], metadata: Mapping[str, str]) -> None:
    if violations:
        raise invalid_argument(violations, metadata)


def _deadline_exceeded() -> ServiceError:
    message = "the deadline of the call passed before the output was complete"
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message)
