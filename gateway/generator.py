"""Runs requests: accepts them, gives them to the scheduler, ends them whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from gateway.acceptance import Acceptance
from gateway.auth import DEFAULT_TENANT
from gateway.cell import Cell
from gateway.ending import CANCELLED, FAILED, FINISHED, Ending
from gateway.generation import Generation
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import (
    ANY_TIME,
    SHARED,
    CacheParams,
    CancelReason,
    FinishReason,
    GenerateCommand,
    SamplingParams,
    SchedulingParams,
    ScoreCommand,
    Scores,
    StoppingParams,
    Usage,
)
from gateway.scoring import STOPPING, sampling_of, score_of
from gateway.served_models import ServedModel, ServedModels
from gateway.time_limits import DEADLINE, FIRST_TOKEN_TARGET, QUEUE_TTL, TimeLimits, deadline_exceeded
from octavo.rpc.errors import ServiceError
from octavo.rpc.telemetry import bind_request

logger = logging.getLogger(__name__)

CANCELLED_BY_OPERATOR = "CANCELLED_BY_OPERATOR"
"""The scheduler's reason where an operator wanted the end."""
_SLACK = 0.05
"""Seconds between a client's timer and ours that are the network's."""

_LIMITS = {
    DEADLINE: CancelReason.DEADLINE,
    QUEUE_TTL: CancelReason.QUEUE_TTL,
    FIRST_TOKEN_TARGET: CancelReason.FIRST_TOKEN_TARGET,
}
_TOLD_REASONS = {
    CANCELLED[CancelReason.SHUTDOWN]: CancelReason.SHUTDOWN,
    **{CANCELLED[reason]: CancelReason.DEADLINE for reason in _LIMITS.values()},
}
"""What the scheduler is told of an end that it does not know of; for any other, that it is the client's."""


@dataclass(frozen=True)
class _Call:
    """What a call says beside its message, and when it came. `deadline` and `came_at`: on the clock."""

    tenant: str
    deadline: float | None
    traceparent: str
    came_at: float


class Scheduler(Protocol):
    """What a request needs of the scheduler. No call waits: what a connection loses, the next one makes good."""

    def submit(self, request: LiveRequest) -> None:
        """Send the full record of a request."""

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Tell that a request is not wanted any more, in whatever state it is."""

    def stop_choice(self, request: LiveRequest, choice: int) -> None:
        """Tell that a choice has ended by its text, with the tokens that its record has."""


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
        self._acceptance = Acceptance(cell)
        self._time_limits = TimeLimits(cell, clock)
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock

    def check_open(self) -> None:
        """Raise ServiceError (UNAVAILABLE) where the gateway is shutting down."""
        self._live.check_open()

    @asynccontextmanager
    async def generate(
        self,
        command: GenerateCommand,
        *,
        tenant: str = DEFAULT_TENANT,
        deadline: float | None = None,
        traceparent: str = "",
        streaming: bool = True,
    ) -> AsyncIterator[Generation]:
        """Run a request while the context is open. However that is left, the scheduler is told, and nothing stays.

        `deadline` is on the clock. `streaming`: the client is told events as they happen, and not all at the end.
        Raises ServiceError: before anything is queued where the request is not to be run, and DEADLINE_EXCEEDED when
        its time is up, whatever the body waits for.
        """
        call = _Call(tenant, deadline, traceparent, self._clock())
        async with self._until(call):
            with self._refusals_counted(deadline):
                self.check_open()
                model = self._models.resolve(command.model)
                accepted = await self._acceptance.accept(command, model, streaming=streaming)
                request = self._add(
                    call,
                    model,
                    command.label,
                    accepted.prompt_token_ids,
                    accepted.sampling,
                    accepted.stopping,
                    accepted.num_choices,
                    accepted.scheduling,
                    accepted.cache,
                )

            def stop_choice(choice: int, num_kept: int, stop_string: str) -> None:
                if request.stop_choice(choice, num_kept, stop_string):
                    self._scheduler.stop_choice(request, choice)

            with bind_request(request.id), self._submitted(request):
                yield Generation(request, model.tokenizer.vocabulary, accepted.output, stop_choice)

    async def score(
        self,
        command: ScoreCommand,
        *,
        tenant: str = DEFAULT_TENANT,
        deadline: float | None = None,
        traceparent: str = "",
    ) -> Scores:
        """Return how likely continuations are, each run as a request of its own. Raises ServiceError as `generate`."""
        call = _Call(tenant, deadline, traceparent, self._clock())
        async with self._until(call):
            with self._refusals_counted(deadline):
                self.check_open()
                model = self._models.resolve(command.model)
                accepted = await self._acceptance.accept_score(command, model)
            before, continuations = accepted.prompt_token_ids, accepted.continuations
            with ExitStack() as submitted:
                requests: list[LiveRequest] = []
                for continuation in continuations:
                    prompt = [*before, *continuation]
                    sampling = sampling_of(len(before))
                    request = self._add(call, model, command.label, prompt, sampling, STOPPING, 1)
                    requests.append(request)
                    submitted.enter_context(self._submitted(request))
                await _wait_for_all(requests)
            scores = []
            for request, continuation in zip(requests, continuations, strict=True):
                assert request.prompt_logprobs is not None, "scores ask for them"
                scores.append(score_of(request.prompt_logprobs, len(before), continuation))
            num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
            return Scores(scores, Usage(num_prompt_tokens, 0, sum(each.num_cached_tokens for each in requests)))

    @asynccontextmanager
    async def _until(self, call: _Call) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(call.deadline):
                yield
        except TimeoutError:
            raise self._late(call) from None

    def _late(self, call: _Call) -> ServiceError:
        now = self._clock()
        limit = now if call.deadline is None else call.deadline
        return deadline_exceeded(limit - call.came_at, now - call.came_at)

    def _add(
        self,
        call: _Call,
        model: ServedModel,
        label: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        num_choices: int,
        scheduling: SchedulingParams = ANY_TIME,
        cache: CacheParams = SHARED,
    ) -> LiveRequest:
        """Start the record of a request that was accepted."""
        if call.deadline is not None and self._clock() >= call.deadline:
            raise self._late(call)
        return self._live.add(
            label=label,
            model=model.name,
            model_revision=model.prepared.revision,
            tenant=call.tenant,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stopping=stopping,
            num_choices=num_choices,
            deadline=call.deadline,
            traceparent=call.traceparent,
            scheduling=scheduling,
            cache=cache,
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
            with self._time_limits.watched(request):
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
            case ServiceError(code=grpc.StatusCode.DEADLINE_EXCEEDED, reason=reason):
                return CANCELLED[_LIMITS.get(reason, CancelReason.DEADLINE)]
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
            "cached_tokens": request.num_cached_tokens,
            "ttft_s": None if first is None else round(first - request.accepted_at, 4),
            "total_s": round(self._clock() - request.accepted_at, 4),
        }


async def _wait_for_all(requests: Sequence[LiveRequest]) -> None:
    """Return once all are complete. Raises the ServiceError of the first that fails."""
    tasks = [asyncio.create_task(request.wait_complete()) for request in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fields_of_accepted(request: LiveRequest) -> dict[str, object]:
    return {
        "label": request.label,
        "model": request.model,
        "prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.stopping.max_tokens,
        "choices": len(request.choices),
        "tenant": request.tenant,
    }
