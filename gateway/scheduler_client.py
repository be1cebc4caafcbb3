"""The one Attach stream to the scheduler, kept up for the life of the gateway.

A request is its record: after a lost connection Hello names the live ones, the scheduler says which of them it does not
know, and these are submitted again with the tokens they have. So nothing here waits for an answer, and nothing is lost
with a stream.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from gateway.attach_client import AttachCall, DetachedError, Outbox
from gateway.cell import Cell, no_scheduler
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.requests import CancelReason
from gateway.scheduler_convert import (
    cancel_from,
    end_from,
    error_from,
    full_queues_from,
    logprobs_from,
    pools_from,
    prompt_logprobs_from,
    stop_from,
    submit_from,
    take_up_from,
)
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError
from octavo.rpc.progress import StallWatch
from octavo.rpc.seal import SealCheck, sealed_stream

logger = logging.getLogger(__name__)

_PATH = "/octavo.internal.scheduler.v1.SchedulerService/Attach"
SILENCE = 5.0
"""Seconds without a frame, or without one of ours arriving, after which the stream is given up for cut."""
PATIENCE = 5.0
"""Seconds without Welcome after which the log says so: a wrong address looks like a scheduler that is not up yet."""

OnTakenUp = Callable[[scheduler_pb2.Submit | None, ServiceError | None], None]
"""Takes the record of a request that was handed over, the error that it has ended with, or why it was not."""


@dataclass(frozen=True)
class Backoff:
    """Seconds between attempts: doubled from `initial` up to `maximum`, then spread over [half, whole] by chance."""

    initial: float = 0.1
    maximum: float = 0.5

    def delay(self, num_failures: int) -> float:
        """Return the pause after this many failures in a row, at least 1."""
        whole = min(self.maximum, self.initial * 2.0 ** min(num_failures - 1, 30))
        return whole * random.uniform(0.5, 1.0)


class SchedulerClient:
    """Applies the scheduler's frames to the live requests and the cell, and sends it Submit, Cancel and Ack."""

    def __init__(
        self,
        dial: Callable[[], grpc.aio.Channel],
        live: LiveRequests,
        cell: Cell,
        *,
        cell_name: str,
        clock: Callable[[], float],
        backoff: Backoff,
        check_invariants: bool = False,
        silence: float = SILENCE,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`dial`: opens a channel, for each stream its own: a connection that is cut one way is not used again.
        `clock`: seconds, the event loop's. `check_invariants`: those of the records, after every frame. `on_drain`: the
        gateway is to stop.
        """
        self._dial = dial
        self._silence = silence
        self._on_drain = on_drain
        self._taking_up: dict[int, OnTakenUp] = {}
        self._live = live
        self._cell = cell
        self._cell_name = cell_name
        self._clock = clock
        self._backoff = backoff
        self._check_invariants = check_invariants
        self._highest_term = 0
        self._num_failures = 0
        self._outbox: Outbox | None = None
        self._is_attached = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name="scheduler-client")

    async def stop(self, timeout: float) -> None:
        """Send what is waiting to be sent, end the stream, and return, after `timeout` seconds in any case."""
        if self._task is None:
            return
        self._is_closing = True
        if self._outbox is not None and self._is_attached:
            self._outbox.close()
            await asyncio.wait({self._task}, timeout=timeout)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, request: LiveRequest) -> None:
        """Send the full record of a request; without a stream the next Hello will name it."""
        if self._outbox is not None:
            self._submit(request, self._outbox)

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Tell that a request is not wanted; without a stream the next Hello will not name it."""
        if self._outbox is not None:
            self._outbox.put(cancel_from(request.counter, reason))

    def cancel_counter(self, counter: int) -> None:
        """Tell that a request is not wanted of which there is no record here."""
        if self._outbox is not None:
            self._outbox.put(cancel_from(counter, CancelReason.CLIENT))

    def stop_choice(self, request: LiveRequest, choice: int) -> None:
        """Tell that a choice has ended by its text; without a stream that is said after the next Welcome."""
        if self._outbox is not None:
            self._outbox.put(stop_from(request.counter, choice, len(request.choices[choice].token_ids)))

    def take_up(self, counter: int, first_id: tuple[str, int], tenant: str, on_taken_up: OnTakenUp) -> None:
        """Ask for a request that may be taken up, under a new counter. Raises ServiceError where no scheduler is there.

        `on_taken_up` is called once, with UNAVAILABLE where the stream is lost before the answer.
        """
        if self._outbox is None or not self._is_attached:
            raise no_scheduler("the scheduler is not connected")
        self._taking_up[counter] = on_taken_up
        self._outbox.put(take_up_from(counter, first_id, tenant))

    async def _run(self) -> None:
        reported = ""
        while not self._is_closing:
            try:
                await self._attach()
            except DetachedError as error:
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:
                # A fault here must not leave the gateway detached for ever: the next stream starts from the records.
                logger.exception("the stream to the scheduler failed")
                reason = repr(error)
            if self._is_closing:
                return
            if self._num_failures == 0 or reason != reported:
                reported = reason
                logger.warning("not attached to the scheduler", extra={"fields": {"reason": reason}})
            self._num_failures += 1
            await asyncio.sleep(self._backoff.delay(self._num_failures))

    async def _attach(self) -> None:
        """Hold one stream until it ends. Always raises."""
        async with self._dial() as channel:
            # The channel knows best when the scheduler can be reached again.
            attach = sealed_stream(channel, _PATH, scheduler_pb2.AttachResponse)
            await self._hold(attach(wait_for_ready=True))

    async def _hold(self, call: AttachCall) -> None:
        outbox = Outbox()
        outbox.put(self._hello())
        silence = asyncio.get_running_loop().call_later(PATIENCE, self._report_silence)
        # From here on cancels follow Hello, which has just named the live requests.
        self._outbox = outbox
        reader = asyncio.create_task(self._read(call, outbox), name="scheduler-reader")
        writer = asyncio.create_task(outbox.write_to(call), name="scheduler-writer")
        listener = asyncio.create_task(self._listen(outbox), name="scheduler-listener")
        try:
            # The reader always ends with an exception; the writer ends well only when closing, and the reader goes on.
            await asyncio.wait({reader, writer, listener}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            silence.cancel()
            self._outbox = None
            self._is_attached = False
            self._cell.detach()
            # In this order: a task that waits on a cancelled call is told that it was cancelled itself.
            tasks = (listener, reader, writer)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
            taking_up, self._taking_up = self._taking_up, {}
            for on_taken_up in taking_up.values():
                on_taken_up(None, no_scheduler("the scheduler went away"))
        for result in results:
            if isinstance(result, Exception):
                raise result
        raise DetachedError("the stream was cancelled")

    def _submit(self, request: LiveRequest, outbox: Outbox) -> None:
        self._cell.note_submitted(request.counter, request.model, len(request.choices), len(request.prompt_token_ids))
        outbox.put(submit_from(request, self._clock()))

    def _report_silence(self) -> None:
        if not self._is_attached:
            fields = {"reason": f"no answer within {PATIENCE:g} s: is the scheduler up, and its address right?"}
            logger.warning("not attached to the scheduler", extra={"fields": fields})

    def _hello(self) -> scheduler_pb2.AttachRequest:
        hello = scheduler_pb2.Hello(
            incarnation=self._live.incarnation,
            cell=self._cell_name,
            highest_term=self._highest_term,
            live_requests=self._live.wanted(),
        )
        return scheduler_pb2.AttachRequest(hello=hello)

    async def _listen(self, outbox: Outbox) -> None:
        """Raise once nothing is heard of the scheduler, or nothing of ours arrives, from the first report on."""
        watch = StallWatch(lambda: outbox.has_report, outbox.progress, self._silence)
        while True:
            watch.look(self._clock())
            if watch.is_stalled:
                raise DetachedError(f"the scheduler has been silent for {watch.stuck_for:.1f} s, or does not hear")
            await asyncio.sleep(watch.interval)

    async def _read(self, call: AttachCall, outbox: Outbox) -> None:
        is_welcome = False
        seals = SealCheck()
        async for frame in call:
            if not seals.is_whole(frame):
                raise DetachedError("a frame of the scheduler was damaged on the way")
            outbox.num_heard += 1
            if is_welcome:
                self._apply(frame, outbox)
                if self._check_invariants:
                    self._live.check_invariants()
            elif frame.WhichOneof("frame") == "welcome":
                is_welcome = True
                self._be_welcome(frame.welcome, outbox)
            else:
                raise DetachedError("the scheduler did not begin with Welcome")
        raise DetachedError("the scheduler closed the stream")

    def _be_welcome(self, welcome: scheduler_pb2.Welcome, outbox: Outbox) -> None:
        if welcome.term < self._highest_term:
            raise DetachedError(f"the scheduler's term {welcome.term} is below {self._highest_term}, seen before")
        self._highest_term = welcome.term
        self._num_failures = 0
        resumed = [request for each in welcome.unknown_requests if (request := self._live.find_unended(each))]
        for request in resumed:
            self._submit(request, outbox)
        for request in self._live.unended():
            # What it had been told of these may have been lost with the stream before. Twice does no harm.
            for choice in request.choices_stopped_here():
                self.stop_choice(request, choice)
        self._is_attached = True
        self._cell.attach()
        logger.info("attached to the scheduler", extra={"fields": {"term": welcome.term, "resumed": len(resumed)}})

    def _apply(self, frame: scheduler_pb2.AttachResponse, outbox: Outbox) -> None:
        match frame.WhichOneof("frame"):
            case "step_outputs":
                self._cell.num_signs += 1
                step = frame.step_outputs
                outbox.check_next(step.sequence)
                for output in step.outputs:
                    self._apply_output(output)
                columns = (step.requests, step.choices, step.token_indexes, step.token_ids)
                if len(set(map(len, columns))) > 1:
                    raise DetachedError("the scheduler sent columns of different lengths")
                self._live.apply_tokens(*columns)
                outbox.acknowledge(frame.step_outputs.sequence)
            case "finished":
                outbox.check_next(frame.finished.sequence)
                if frame.finished.HasField("error"):
                    self._live.fail(frame.finished.request, error_from(frame.finished.error))
                else:
                    self._live.finish(frame.finished.request)
                outbox.acknowledge(frame.finished.sequence, at_once=True)
            case "accepted":
                self._cell.note_accepted(frame.accepted.request)
                self._live.confirm(frame.accepted.request, frame.accepted.num_cached_tokens)
            case "rejected":
                self._cell.note_rejected(frame.rejected.request)
                self._live.fail(frame.rejected.request, error_from(frame.rejected.error))
            case "model_pools":
                self._cell.set_pools(pools_from(frame.model_pools))
            case "load_report":
                outbox.take_report(frame.load_report.num_received_frames)
                self._cell.set_stalled(frame.load_report.is_stalled)
                self._cell.set_full_queues(full_queues_from(frame.load_report))
            case "taken_up":
                on_taken_up = self._taking_up.pop(frame.taken_up.request, None)
                if on_taken_up is not None:
                    taken = frame.taken_up
                    record = taken.record if taken.HasField("record") else None
                    on_taken_up(record, error_from(taken.error) if taken.HasField("error") else None)
            case "drain_gateway":
                self._on_drain()
            case _:  # a later scheduler may say more
                pass

    def _apply_output(self, output: scheduler_pb2.ChoiceOutput) -> None:
        try:
            end = end_from(output)
        except ValueError as error:
            self._live.fault(output.request, str(error))
            return
        if output.num_cached_tokens:
            self._live.note_cached_tokens(output.request, output.choice, output.num_cached_tokens)
        if (told := prompt_logprobs_from(output)) is not None:
            self._live.apply_prompt_logprobs(output.request, *told)
            if not output.token_ids and end is None:
                return
        self._live.apply(
            output.request, output.choice, output.first_token_index, output.token_ids, logprobs_from(output), end
        )
