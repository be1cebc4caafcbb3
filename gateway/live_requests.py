"""All live requests of this gateway, by the counters that name them to the scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import grpc

from gateway.ending import Ending
from gateway.live_request import LiveRequest
from gateway.logprob_record import RecordError
from gateway.metrics import GatewayMetrics
from gateway.requests import (
    ALL_SHOWN,
    ANY_TIME,
    SHARED,
    CacheParams,
    ChoiceEnd,
    LogprobColumns,
    OutputParams,
    SamplingParams,
    SchedulingParams,
    StoppingParams,
)
from octavo.rpc.errors import ServiceError

RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


class LiveRequests:
    """The mint of ids and the home of every live request's record.

    A request stays from `add` to `remove`, which its handler calls however it ends; so what is here is what is served,
    and each of the two counts it once.
    A counter is never used twice. Frames about requests that are not here change nothing: they crossed a cancel.
    """

    def __init__(
        self, incarnation: str, clock: Callable[[], float], metrics: GatewayMetrics, *, stream_interval: int = 1
    ) -> None:
        """`incarnation`: this process, lower-case hex. `clock`: seconds, the event loop's.

        `stream_interval`: tokens of a choice that are told together, see LiveRequest.
        """
        self._stream_interval = stream_interval
        self.incarnation = incarnation
        self._clock = clock
        self._metrics = metrics
        self._requests: dict[int, LiveRequest] = {}
        self._last_counter = 0
        self._is_closed = False
        self._is_draining = False
        self._left: list[int] = []
        self._removed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def is_closed(self) -> bool:
        """The gateway is shutting down."""
        return self._is_closed

    def mint(self) -> int:
        """Return a counter that was never used."""
        self._last_counter += 1
        return self._last_counter

    def find_by_first_id(self, first_id: tuple[str, int]) -> LiveRequest | None:
        """Return the request that had an id first and has not ended."""
        return next((each for each in self.unended() if each.first_id == first_id), None)

    def refuse_new(self) -> None:
        """Take no more requests; those here go on."""
        self._is_draining = True

    def check_not_closed(self) -> None:
        """Raise ServiceError (UNAVAILABLE) once `close` was called: what comes now would be served by nobody."""
        if self._is_closed:
            raise _shutting_down()

    def check_open(self) -> None:
        """Raise ServiceError (UNAVAILABLE) where the gateway is shutting down."""
        if self._is_closed or self._is_draining:
            raise _shutting_down()

    def add(
        self,
        *,
        label: str,
        model: str,
        model_revision: str,
        tenant: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        num_choices: int,
        deadline: float | None,
        traceparent: str,
        scheduling: SchedulingParams = ANY_TIME,
        cache: CacheParams = SHARED,
        output: OutputParams = ALL_SHOWN,
        resume_grace: float | None = None,
        first_id: tuple[str, int] | None = None,
        counter: int | None = None,
        age: float = 0.0,
    ) -> LiveRequest:
        """Mint an id and start a record: the request is accepted. Raises ServiceError when closed.

        `model` is one of those that the metrics know. Of a request that is taken up: `counter` is one that was minted
        for it, `first_id` the id that it had first, `age` the seconds since then; it is taken in until `close`.
        """
        if counter is None:
            self.check_open()
        self.check_not_closed()
        metrics = self._metrics.by_model[model]
        request = LiveRequest(
            counter=self.mint() if counter is None else counter,
            incarnation=self.incarnation,
            label=label,
            model=model,
            model_revision=model_revision,
            tenant=tenant,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stopping=stopping,
            num_choices=num_choices,
            accepted_at=self._clock() - age,
            deadline=deadline,
            traceparent=traceparent,
            scheduling=scheduling,
            cache=cache,
            metrics=metrics,
            output=output,
            resume_grace=resume_grace,
            first_id=first_id,
            stream_interval=self._stream_interval,
        )
        self._requests[request.counter] = request
        self._empty.clear()
        metrics.accept(len(prompt_token_ids))
        return request

    def remove(self, request: LiveRequest, ending: Ending) -> None:
        """Forget a request that has ended so. Idempotent."""
        self._removed.set()
        if self._requests.pop(request.counter, None) is not None:
            self._metrics.by_model[request.model].end(ending, self._clock() - request.accepted_at)
        if not self._requests:
            self._empty.set()

    def count_by_model(self) -> Counter[str]:
        """Return how many are live now."""
        return Counter(request.model for request in self._requests.values())

    def unended(self) -> list[LiveRequest]:
        """Return those that the scheduler still has to do with, oldest first."""
        return [request for request in self._requests.values() if not request.has_ended]

    def wanted(self) -> list[int]:
        """Return the counters of what the scheduler is to keep: of `unended`, and of what was left to it by `close`."""
        return [*(request.counter for request in self.unended()), *self._left]

    def num_resumable(self) -> int:
        """Return how many of them may be taken up elsewhere."""
        return sum(request.resume_grace is not None for request in self.unended())

    def find_unended(self, counter: int) -> LiveRequest | None:
        """Return a request that has not ended."""
        request = self._requests.get(counter)
        return None if request is None or request.has_ended else request

    def confirm(self, counter: int, num_cached_tokens: int) -> None:
        """Note that the scheduler has a request, and how much of its prompt is in the cache now."""
        if request := self.find_unended(counter):
            request.confirm(num_cached_tokens)

    def note_cached_tokens(self, counter: int, choice: int, count: int) -> None:
        """Note how much of a request's prompt a choice, the first that ran, took from the cache."""
        if request := self.find_unended(counter):
            request.note_cached_tokens(choice, count)

    def apply(
        self,
        counter: int,
        choice: int,
        first_token_index: int,
        token_ids: Sequence[int],
        logprobs: LogprobColumns | None,
        end: ChoiceEnd | None,
    ) -> None:
        """Apply what one choice got. What cannot follow from the record fails the request and is logged."""
        request = self.find_unended(counter)
        if request is None:
            return
        try:
            request.apply(choice, first_token_index, token_ids, logprobs, end, self._clock())
        except RecordError as fault:
            self._fail_internally(request, f"choice {choice}: {fault}", released=False)

    def apply_tokens(
        self, counters: Sequence[int], choices: Sequence[int], indexes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Apply one token each of choices that got nothing else, as columns. Faults are dealt with as in `apply`."""
        now = self._clock()
        requests = self._requests
        for counter, choice, index, token_id in zip(counters, choices, indexes, token_ids, strict=True):
            request = requests.get(counter)
            if request is not None and not request.append(choice, index, token_id, now):
                self.apply(counter, choice, index, (token_id,), None, None)

    def apply_prompt_logprobs(self, counter: int, first_token_index: int, columns: LogprobColumns) -> None:
        """Apply logprobs of a request's prompt. A fault is dealt with as in `apply`."""
        request = self.find_unended(counter)
        if request is None:
            return
        try:
            request.apply_prompt_logprobs(first_token_index, columns)
        except RecordError as fault:
            self._fail_internally(request, f"prompt logprobs: {fault}", released=False)

    def fail(self, counter: int, error: ServiceError) -> None:
        """End a request with the scheduler's error."""
        if request := self.find_unended(counter):
            request.fail(error, released=True)

    def fault(self, counter: int, what: str) -> None:
        """End a request of which the scheduler sent something that makes no sense."""
        if request := self.find_unended(counter):
            self._fail_internally(request, what, released=False)

    def finish(self, counter: int) -> None:
        """Note that the scheduler is done with a request: all its choices must have ended."""
        if request := self.find_unended(counter):
            self._fail_internally(request, "the request finished, but not all of its choices have", released=True)

    def close(self) -> None:
        """Take no more requests, and end those here with UNAVAILABLE. What may be taken up is left to the scheduler."""
        self._is_closed = True
        self._left += [request.counter for request in self.unended() if request.resume_grace is not None]
        for request in self._requests.values():
            request.fail(_shutting_down(), released=False)

    async def wait_served(self, detached: Callable[[], set[LiveRequest]]) -> None:
        """Return when no request with a client is left; `detached`: those without one."""
        while set(self._requests.values()) - detached():
            self._removed.clear()
            await self._removed.wait()

    async def wait_empty(self) -> None:
        """Return when no request is left."""
        await self._empty.wait()

    def check_invariants(self) -> None:
        """Raise AssertionError where a record contradicts itself or the mint."""
        assert self._empty.is_set() == (not self._requests)
        assert len({request.id for request in self._requests.values()}) == len(self._requests)
        live = self.count_by_model()
        for model, metrics in self._metrics.by_model.items():
            assert metrics.num_accepted == sum(metrics.num_ended.values()) + live[model], f"{model}: a request is lost"
        for counter, request in self._requests.items():
            assert request.counter == counter <= self._last_counter
            assert not self._is_closed or request.has_ended, f"request {request.id} outlives the gateway"
            request.check_invariants()

    def _fail_internally(self, request: LiveRequest, what: str, *, released: bool) -> None:
        logger.error("output contradicts the record", extra={"fields": {"request_id": request.id, "fault": what}})
        error = ServiceError(grpc.StatusCode.INTERNAL, "OUTPUT_FAULT", "the output of the request was damaged")
        request.fail(error, released=released)


def _shutting_down() -> ServiceError:
    # A new one each time: an exception that is raised again and again keeps every traceback.
    message = "the gateway is shutting down: try again shortly"
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", message, retry_delay=RETRY_SECONDS)
