"""Attached gateways: who is attached, what each is told, and what becomes of a gateway's requests when it goes.

A gateway that is gone keeps its requests running for the grace, in case it comes back; then they are cancelled. One
that attaches again is reconciled: what it does not list is cancelled, what it lists and nobody knows it is told, and
frames it has not acknowledged are sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import NoReturn

import grpc

from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import QUEUE_FULL
from scheduler_svc.batch import RequestDone
from scheduler_svc.convert import (
    Frame,
    accepted_frame,
    drain_frame,
    model_pools_frame,
    rejected_frame,
    welcome_frame,
)
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.full_queues import FullQueues
from scheduler_svc.load import ModelPoolView
from scheduler_svc.load_convert import load_report_frame
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.output_streams import OutputStream, OutputStreams, lapsed_error
from scheduler_svc.request_log import format_request_id
from scheduler_svc.request_record import FinishReason, RequestId, RequestRecord
from scheduler_svc.resume_convert import taken_up_frame

logger = logging.getLogger(__name__)

LOAD_INTERVAL = 0.25
"""Seconds between LoadReports: they are the scheduler's signs of life, and a gateway waits for no more than a few."""

_MOST_CONTROL_FRAMES = 10_000
_MOST_NOTED_CANCELS = 1_000
_MOST_OPERATOR_CANCELS = 10_000


def replaced_error() -> ServiceError:
    """Return the status of a stream whose gateway has opened another."""
    return ServiceError(grpc.StatusCode.ABORTED, "REPLACED", "this gateway has attached again")


def stopping_error() -> ServiceError:
    """Return the status of a stream whose scheduler goes away."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "SCHEDULER_STOPPING", "the scheduler is stopping; attach again", retry_delay=1.0
    )


def _cancelled_by_operator() -> ServiceError:
    message = "an operator has cancelled the request"
    return ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", message)


def _taken_up() -> ServiceError:
    message = "the request was taken up elsewhere, by its resume token"
    return ServiceError(grpc.StatusCode.ABORTED, "TAKEN_UP", message)


def _nothing_to_resume() -> ServiceError:
    message = "the cell holds no such request any more: it has ended too long ago, or was lost with its holders"
    return ServiceError(grpc.StatusCode.NOT_FOUND, "NOTHING_TO_RESUME", message)


def _not_live(request_id: RequestId) -> ServiceError:
    name = format_request_id(request_id)
    message = f"no request {name} is live; it may have ended a moment ago"
    return ServiceError(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", message, metadata={"request_id": name})


class Attachment:
    """One live stream of a gateway: what is written to it next, and why it ends.

    Answers (Welcome, Accepted, Rejected) go before outputs, so Accepted always precedes a request's first output. Of
    pools and load only the newest is kept.
    """

    def __init__(self, incarnation: str, outputs: OutputStream) -> None:
        self.incarnation = incarnation
        self.noted_cancels: set[int] = set()
        self.num_received_frames = 0
        self._outputs = outputs
        self._answers: deque[Frame] = deque()
        self._pools: Frame | None = None
        self._load: Frame | None = None
        self._wake = asyncio.Event()
        self._error: ServiceError | None = None
        self._closed = asyncio.Event()
        outputs.notify = self._notify
        outputs.rewind()

    @property
    def is_open(self) -> bool:
        """Whether this is still its gateway's stream."""
        return self._error is None

    def answer(self, frame: Frame) -> None:
        """Write an answer."""
        self._answers.append(frame)
        if len(self._answers) > _MOST_CONTROL_FRAMES:
            self.close(lapsed_error())
        self._wake.set()

    def put_pools(self, frame: Frame) -> None:
        """Write the newest pools."""
        self._pools = frame
        self._wake.set()

    def put_load(self, frame: Frame) -> None:
        """Write the newest load."""
        self._load = frame
        self._wake.set()

    def close(self, error: ServiceError) -> None:
        """End the stream with `error`; nothing more is taken from it or written to it."""
        if self._error is None:
            self._error = error
            self._closed.set()

    async def closed(self) -> NoReturn:
        """Wait for `close` and raise its error."""
        await self._closed.wait()
        assert self._error is not None
        raise self._error

    async def next_frame(self) -> Frame:
        """Return what to write next, waiting for it."""
        while True:
            self._wake.clear()
            if self._error is None and (frame := self._take()) is not None:
                return frame
            await self._wake.wait()

    def _take(self) -> Frame | None:
        if self._answers:
            return self._answers.popleft()
        if self._load is not None:
            # Before outputs: a gateway that hears nothing of its own frames gives the stream up. Before pools: by these
            # it begins to serve, perhaps a queue that is full.
            frame, self._load = self._load, None
            return frame
        if self._pools is not None:
            frame, self._pools = self._pools, None
            return frame
        return self._outputs.next_frame()

    def _notify(self) -> None:
        if self._outputs.lapsed:
            self.close(lapsed_error())
        self._wake.set()


class Gateways:
    """All gateways of the cell. `grace`: seconds that a lost gateway's requests go on."""

    def __init__(
        self, engine_loop: EngineLoop, outputs: OutputStreams, metrics: SchedulerMetrics, grace: float
    ) -> None:
        self._engine_loop = engine_loop
        self._metrics = metrics
        self._outputs = outputs
        self._grace = grace
        self._attached: dict[str, Attachment] = {}
        self._absent: dict[str, asyncio.TimerHandle] = {}
        # Requests without a gateway that may be taken up, until their grace is over.
        self._detached: dict[RequestId, asyncio.TimerHandle] = {}
        # Who had a request that was handed over, by its new id, until the new gateway has shown that it has the record.
        self._handed_over: dict[RequestId, RequestId] = {}
        self.is_stalled = False
        self._full_queues = FullQueues(engine_loop.full_queue, engine_loop.now)
        engine_loop.watch_rounds(self._look_at_queues)
        # A gateway whose frames were thrown away submits what it holds; what an operator has ended stays ended. Oldest
        # first.
        self._operator_cancels: OrderedDict[RequestId, None] = OrderedDict()
        self._closing: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, incarnation: str, live: Collection[int], term: int) -> Attachment:
        """Take a gateway's stream, in place of any earlier one, and answer its Hello.

        `live` are the requests it believes to be live. Raises ServiceError once `close` was called.
        """
        if self._closing is not None:
            raise self._closing
        earlier = self._attached.pop(incarnation, None)
        if earlier is not None:
            earlier.close(replaced_error())
        timer = self._absent.pop(incarnation, None)
        if timer is not None:
            timer.cancel()
        is_whole = self._outputs.has(incarnation)
        outputs = self._outputs.open(incarnation)
        if outputs.lapsed:
            self._abandon(incarnation)
            is_whole, outputs = False, self._outputs.open(incarnation)
        for request_id in [each for each in self._detached if each[0] == incarnation]:
            self._detached.pop(request_id).cancel()
        listed = set(live)
        known = self._engine_loop.requests_of(incarnation)
        if not is_whole:
            # What these have got meanwhile was thrown away: their gateway is to submit what it holds of them.
            for counter in sorted(known & listed):
                self._engine_loop.cancel((incarnation, counter), publish=False)
            known -= listed
        for counter in sorted(known - listed):
            if (incarnation, counter) in self._handed_over:
                # It has never heard that it got it: somebody may ask again.
                self._keep((incarnation, counter))
            else:
                # The gateway has forgotten it, so nobody is to be told.
                self._engine_loop.cancel((incarnation, counter), publish=False)
        unknown = sorted(listed - known - outputs.finished_requests)
        attachment = Attachment(incarnation, outputs)
        attachment.answer(welcome_frame(term, unknown))
        attachment.put_pools(model_pools_frame(self._engine_loop.pools()))
        self._attached[incarnation] = attachment
        if self._full_queues.queues:
            self._put_load()
        fields = {"gateway": incarnation, "live": len(listed), "unknown": len(unknown), "dropped": len(known - listed)}
        logger.info("gateway attached", extra={"fields": fields})
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """A stream has ended. Its gateway's requests go on for the grace, unless another stream took its place."""
        incarnation = attachment.incarnation
        if self._attached.get(incarnation) is not attachment:
            return
        attachment.close(stopping_error())
        del self._attached[incarnation]
        logger.info("gateway detached", extra={"fields": {"gateway": incarnation}})
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._absent[incarnation] = loop.call_later(self._grace, self._abandon, incarnation)

    def submit(self, attachment: Attachment, record: RequestRecord) -> None:
        """Take a request in and answer Accepted or Rejected."""
        counter = record.id[1]
        num_cached_tokens = 0
        earlier_id = self._handed_over.pop(record.id, None)
        if earlier_id is not None:
            self._outputs.publish([RequestDone(earlier_id, _taken_up(), 0)])
        # A request that has ended but whose end is on its way is known too.
        if not self._outputs.open(attachment.incarnation).owes_finish_of(counter):
            try:
                if record.id in self._operator_cancels:
                    raise _cancelled_by_operator()
                num_cached_tokens = self._engine_loop.submit(record)
            except ServiceError as error:
                self.reject(attachment, counter, error)
                if error.reason == QUEUE_FULL:
                    self._full_queues.note_refusal(record.model, len(record.choices), len(record.prompt_token_ids))
                    self._look_at_queues()
                return
        attachment.answer(accepted_frame(counter, num_cached_tokens))
        # Right behind it, changed or not: a gateway counts what it has submitted until a report does.
        if self._full_queues.look() or self._full_queues.queues:
            self._put_load()

    def take_up(self, attachment: Attachment, counter: int, first_id: RequestId, tenant: str) -> None:
        """Hand a request over to the gateway of this stream. Who had it is told once that one submits it in turn: were
        this scheduler to die in between, somebody would have the record.
        """
        taken = self._engine_loop.take_up(first_id, (attachment.incarnation, counter), tenant)
        if taken is None:
            attachment.answer(taken_up_frame(counter, None, _nothing_to_resume()))
            return
        if taken.earlier_id is not None:
            timer = self._detached.pop(taken.earlier_id, None)
            if timer is not None:
                timer.cancel()
            # Where that one has not shown the record either, it is whoever had it before.
            earlier_id = self._handed_over.pop(taken.earlier_id, taken.earlier_id)
            self._handed_over[attachment.incarnation, counter] = earlier_id
        attachment.answer(taken_up_frame(counter, taken.record, taken.error))

    def drain_gateway(self, incarnation: str) -> bool:
        """Ask a gateway to stop; returns whether it is attached."""
        attachment = self._attached.get(incarnation)
        if attachment is not None:
            attachment.answer(drain_frame())
        return attachment is not None

    def reject(self, attachment: Attachment, counter: int, error: ServiceError) -> None:
        """Refuse a request."""
        fields = {
            "request_id": format_request_id((attachment.incarnation, counter)),
            "code": error.code.name,
            "reason": error.reason,
            "error": error.message,
        }
        logger.info("request rejected", extra={"fields": fields})
        self._metrics.rejected(error.code)
        attachment.answer(rejected_frame(counter, error))

    def cancel(self, attachment: Attachment, counter: int, choice: int | None, kept: int | None, reason: str) -> None:
        """End a request or one choice of it. What is not live stays as it is; that is noted once for each request."""
        request_id = (attachment.incarnation, counter)
        # A choice that its text has ended is not a cancelled one.
        is_stop = choice is not None and reason == FinishReason.STOP.value
        end = FinishReason.STOP if is_stop else FinishReason.CANCELLED
        if self._engine_loop.cancel(request_id, choice, kept, reason=end):
            return
        noted = attachment.noted_cancels
        if counter not in noted and len(noted) < _MOST_NOTED_CANCELS:
            noted.add(counter)
            fields = {"request_id": format_request_id(request_id), "reason": reason}
            logger.info("cancel of what is not live", extra={"fields": fields})

    def cancel_for_operator(self, incarnation: str, counter: int) -> None:
        """End a live request of any gateway, attached or not, with CANCELLED. Raises NOT_FOUND where it is not live."""
        request_id = (incarnation, counter)
        if not self._engine_loop.abort(request_id, _cancelled_by_operator()):
            raise _not_live(request_id)
        self._operator_cancels[request_id] = None
        if len(self._operator_cancels) > _MOST_OPERATOR_CANCELS:
            self._operator_cancels.popitem(last=False)
        fields = {"request_id": format_request_id(request_id)}
        logger.info("request cancelled by an operator", extra={"fields": fields})

    def acknowledge(self, attachment: Attachment, sequence: int) -> None:
        """Forget the outputs up to a sequence number. Raises ServiceError where that one was never sent."""
        self._outputs.open(attachment.incarnation).acknowledge(sequence)

    def pools_changed(self, pools: Sequence[ModelPoolView]) -> None:
        """Tell every gateway which models can run."""
        for attachment in self._attached.values():
            attachment.put_pools(model_pools_frame(pools))

    async def report_load(self, interval: float = LOAD_INTERVAL) -> NoReturn:
        """Tell every gateway how busy the cell is, for ever."""
        while True:
            await asyncio.sleep(interval)
            # Nothing else may come to pass before a queue has been open for long enough.
            self._full_queues.look()
            self._put_load()

    def close(self, error: ServiceError) -> None:
        """End every stream with `error` and take no more. Requests stay: their gateways hold the records."""
        self._closing = error
        for attachment in self._attached.values():
            attachment.close(error)
        for timer in (*self._absent.values(), *self._detached.values()):
            timer.cancel()
        self._absent.clear()
        self._detached.clear()

    def _look_at_queues(self) -> None:
        if self._full_queues.look():
            self._put_load()

    def _put_load(self) -> None:
        if not self._attached:
            return
        load = self._engine_loop.load()
        for attachment in self._attached.values():
            num_frames, queues = attachment.num_received_frames, self._full_queues.queues
            attachment.put_load(load_report_frame(load, num_frames, queues, is_stalled=self.is_stalled))

    def _abandon(self, incarnation: str) -> None:
        """Cancel what is left of a gateway that did not come back, or keep it for whoever takes it up."""
        self._absent.pop(incarnation, None)
        # First, so that the cancels make no frames.
        self._outputs.discard(incarnation)
        counters = self._engine_loop.requests_of(incarnation)
        num_kept = 0
        for counter in sorted(counters):
            if self._keep((incarnation, counter)):
                num_kept += 1
            else:
                self._engine_loop.cancel((incarnation, counter), publish=False)
        fields = {"gateway": incarnation, "cancelled": len(counters) - num_kept, "kept": num_kept}
        logger.info("gateway abandoned", extra={"fields": fields})

    def _keep(self, request_id: RequestId) -> bool:
        """Keep a request that may be taken up for its grace; returns whether it may be."""
        grace = self._engine_loop.resume_grace_of(request_id)
        if grace is not None and request_id not in self._detached:
            loop = asyncio.get_running_loop()
            self._detached[request_id] = loop.call_later(grace, self._give_up, request_id)
        return grace is not None

    def _give_up(self, request_id: RequestId) -> None:
        """Cancel a request that nobody has taken up, unless its gateway has come back with it."""
        self._detached.pop(request_id, None)
        is_unheard = self._handed_over.pop(request_id, None) is not None
        if is_unheard or request_id[0] not in self._attached:
            self._engine_loop.cancel(request_id, publish=False)
