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
from gateway.detached import Detached
from gateway.ending import CANCELLED, FAILED, FINISHED, Ending
from gateway.generation import Generation
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import (
    ALL_SHOWN,
    ANY_TIME,
    SHARED,
    CacheParams,
    CancelReason,
    FinishReason,
    GenerateCommand,
    OutputParams,
    SamplingParams,
    SchedulingParams,
    ScoreCommand,
    Scores,
    StoppingParams,
    Usage,
)
from gateway.resume_client import HandsOver, Resumption
from gateway.resume_tokens import ResumeTokens
from gateway.scoring import STOPPING, sampling_of, score_of
from gateway.served_models import ServedModel, ServedModels
from gateway.time_limits import DEADLINE, FIRST_TOKEN_TARGET, QUEUE_TTL, TimeLimits, deadline_exceeded
from gateway.validation import count_choices
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


class Scheduler(HandsOver, Protocol):
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
        tokens: ResumeTokens,
    ) -> None:
        """`clock`: seconds, the event loop's. `tokens`: for requests that may be taken up."""
        self._models = models
        self._live = live
        self.detached = Detached(self._end)
        self._resumption = Resumption(tokens, models, live, cell, scheduler, self.detached, clock)
        self._acceptance = Acceptance(cell)
        self._cell = cell
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
                if command.resume is not None:
                    request = await self._resumption.take_up(command, tenant, streaming=streaming)
                    model = self._models.resolve(request.model)
                else:
                    model = self._models.resolve(command.model)
                    with self._cell.coming(model.name, count_choices(command)):
                        accepted = await self._acceptance.accept(command, model, streaming=streaming)
                    self._cell.check_room(model.name, accepted.num_choices, len(accepted.prompt_token_ids))
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
                        accepted.output,
                        accepted.resume_grace,
                    )
                    request.resume_token = self._resumption.token_of(request)

            def stop_choice(choice: int, num_kept: int, stop_string: str) -> None:
                if request.stop_choice(choice, num_kept, stop_string):
                    self._scheduler.stop_choice(request, choice)

            with bind_request(request.id), self._submitted(request, is_new=command.resume is None):
                generation = Generation(request, model.tokenizer.vocabulary, request.output, stop_choice)
                if command.resume is not None:
                    generation.resume_at(command.resume.positions)
                yield generation

    def cancel(self, token: str, tenant: str) -> None:
        """End the request of a resume token, wherever it is. Raises ServiceError for no token of this tenant's."""
        self._resumption.cancel(token, tenant)

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
                with self._cell.coming(model.name, len(command.continuations)):
                    accepted = await self._acceptance.accept_score(command, model)
                before, continuations = accepted.prompt_token_ids, accepted.continuations
                num_tokens = len(before) + min(map(len, continuations))
                self._cell.check_room(model.name, len(continuations), num_tokens)
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
        output: OutputParams = ALL_SHOWN,
        resume_grace: float | None = None,
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
            output=output,
            resume_grace=resume_grace,
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
    def _submitted(self, request: LiveRequest, *, is_new: bool = True) -> Iterator[None]:
        """Give a request to the scheduler, and take it back however the body ends.

        `is_new`: the scheduler has not got it yet. One that may be taken up outlives a client that is lost.
        """
        try:
            what = "request accepted" if is_new else "request taken up"
            logger.info(what, extra={"fields": _fields_of_accepted(request)})
            if is_new:
                self._scheduler.submit(request)
            with self._time_limits.watched(request):
                yield
        except BaseException as error:
            if self._outlives(request, error):
                self.detached.hold(request)
            else:
                self._end(request, error)
            raise
        else:
            self._end(request, None)

    def _end(self, request: LiveRequest, ended_by: BaseException | None) -> None:
        ending = self._ending(request, ended_by)
        self._live.remove(request, ending)
        # At a shutdown the scheduler keeps those that another gateway may take up.
        is_left = ending is CANCELLED[CancelReason.SHUTDOWN] and request.resume_grace is not None
        if not request.is_released and not is_left:
            self._scheduler.cancel(request, _TOLD_REASONS.get(ending, CancelReason.CLIENT))
        error = ended_by.reason if isinstance(ended_by, ServiceError) else None
        logger.info("request finished", extra={"fields": self._fields_of_finished(request, ending, error)})

    def _outlives(self, request: LiveRequest, ended_by: BaseException) -> bool:
        """Tell whether a request goes on without the client that was served until `ended_by`."""
        is_lost = isinstance(ended_by, asyncio.CancelledError | grpc.aio.InternalError)
        may_return = request.is_token_told and request.resume_grace is not None
        return is_lost and may_return and not self._live.is_closed and not self._is_late(request)

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
            case ServiceError(reason="CANCELLED_BY_CLIENT" | "TAKEN_UP"):
                return CANCELLED[CancelReason.CLIENT]
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
