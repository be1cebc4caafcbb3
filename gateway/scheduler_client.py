"""The one Attach stream to the scheduler, kept up for the life of the gateway.

A request is its record: after a lost connection Hello names the live ones, the scheduler says which of them it does not
know, and these are submitted again with the tokens they have. So nothing here waits for an answer, and nothing is lost
with a stream.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from gateway.cell import Cell
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.requests import CancelReason
from gateway.scheduler_convert import (
    cancel_from,
    end_from,
    error_from,
    logprobs_from,
    pools_from,
    prompt_logprobs_from,
    stop_from,
    submit_from,
)
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds without Welcome after which the log says so: a wrong address looks like a scheduler that is not up yet."""

_ACK_EVERY = 16
"""Frames. The scheduler keeps up to 16 MiB for a gateway: some hundred of the largest."""
_ACK_WITHIN = 0.25
"""Seconds, where fewer frames come."""

_Call = grpc.aio.StreamStreamCall[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


@dataclass(frozen=True)
class Backoff:
    """Seconds between attempts: doubled from `initial` up to `maximum`, then spread over [half, whole] by chance."""

    initial: float = 0.1
    maximum: float = 2.0

    def delay(self, num_failures: int) -> float:
        """Return the pause after this many failures in a row, at least 1."""
        whole = min(self.maximum, self.initial * 2.0 ** min(num_failures - 1, 30))
        return whole * random.uniform(0.5, 1.0)


class _DetachedError(Exception):
    """The stream has ended, or must; the message says why."""


class SchedulerClient:
    """Applies the scheduler's frames to the live requests and the cell, and sends it Submit, Cancel and Ack."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        live: LiveRequests,
        cell: Cell,
        *,
        cell_name: str,
        clock: Callable[[], float],
        backoff: Backoff,
        check_invariants: bool = False,
    ) -> None:
        """`clock`: seconds, the event loop's. `check_invariants`: those of the records, after every frame."""
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._live = live
        self._cell = cell
        self._cell_name = cell_name
        self._clock = clock
        self._backoff = backoff
        self._check_invariants = check_invariants
        self._highest_term = 0
        self._num_failures = 0
        self._outbox: _Outbox | None = None
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
            self._outbox.put(submit_from(request, self._clock()))

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Tell that a request is not wanted; without a stream the next Hello will not name it."""
        if self._outbox is not None:
            self._outbox.put(cancel_from(request.counter, reason))

    def stop_choice(self, request: LiveRequest, choice: int) -> None:
        """Tell that a choice has ended by its text; without a stream that is said after the next Welcome."""
        if self._outbox is not None:
            self._outbox.put(stop_from(request.counter, choice, len(request.choices[choice].token_ids)))

    async def _run(self) -> None:
        reported = ""
        while not self._is_closing:
            try:
                await self._attach()
            except _DetachedError as error:
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
        # The channel knows best when the scheduler can be reached again.
        call: _Call = self._stub.Attach(wait_for_ready=True)
        outbox = _Outbox()
        outbox.put(self._hello())
        silence = asyncio.get_running_loop().call_later(PATIENCE, self._report_silence)
        # From here on cancels follow Hello, which has just named the live requests.
        self._outbox = outbox
        reader = asyncio.create_task(self._read(call, outbox), name="scheduler-reader")
        writer = asyncio.create_task(outbox.write_to(call), name="scheduler-writer")
        try:
            # The reader always ends with an exception; the writer ends well only when closing, and the reader goes on.
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            silence.cancel()
            self._outbox = None
            self._is_attached = False
            self._cell.detach()
            # In this order: a task that waits on a cancelled call is told that it was cancelled itself.
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            call.cancel()
        for result in results:
            if isinstance(result, Exception):
                raise result
        raise _DetachedError("the stream was cancelled")

    def _report_silence(self) -> None:
        if not self._is_attached:
            fields = {"reason": f"no answer within {PATIENCE:g} s: is the scheduler up, and its address right?"}
            logger.warning("not attached to the scheduler", extra={"fields": fields})

    def _hello(self) -> scheduler_pb2.AttachRequest:
        hello = scheduler_pb2.Hello(
            incarnation=self._live.incarnation,
            cell=self._cell_name,
            highest_term=self._highest_term,
            live_requests=[request.counter for request in self._live.unended()],
        )
        return scheduler_pb2.AttachRequest(hello=hello)

    async def _read(self, call: _Call, outbox: _Outbox) -> None:
        is_welcome = False
        async for frame in call:
            if is_welcome:
                self._apply(frame, outbox)
                if self._check_invariants:
                    self._live.check_invariants()
            elif frame.WhichOneof("frame") == "welcome":
                is_welcome = True
                self._be_welcome(frame.welcome, outbox)
            else:
                raise _DetachedError("the scheduler did not begin with Welcome")
        raise _DetachedError("the scheduler closed the stream")

    def _be_welcome(self, welcome: scheduler_pb2.Welcome, outbox: _Outbox) -> None:
        if welcome.term < self._highest_term:
            raise _DetachedError(f"the scheduler's term {welcome.term} is below {self._highest_term}, seen before")
        self._highest_term = welcome.term
        self._num_failures = 0
        resumed = [request for each in welcome.unknown_requests if (request := self._live.find_unended(each))]
        for request in resumed:
            outbox.put(submit_from(request, self._clock()))
        for request in self._live.unended():
            # What it had been told of these may have been lost with the stream before. Twice does no harm.
            for choice in request.choices_stopped_here():
                self.stop_choice(request, choice)
        self._is_attached = True
        self._cell.attach()
        logger.info("attached to the scheduler", extra={"fields": {"term": welcome.term, "resumed": len(resumed)}})

    def _apply(self, frame: scheduler_pb2.AttachResponse, outbox: _Outbox) -> None:
        match frame.WhichOneof("frame"):
            case "step_outputs":
                step = frame.step_outputs
                for output in step.outputs:
                    self._apply_output(output)
                columns = (step.requests, step.choices, step.token_indexes, step.token_ids)
                if len(set(map(len, columns))) > 1:
                    raise _DetachedError("the scheduler sent columns of different lengths")
                for request, choice, index, token_id in zip(*columns, strict=True):
                    self._live.apply(request, choice, index, (token_id,), None, None)
                outbox.acknowledge(frame.step_outputs.sequence)
            case "finished":
                if frame.finished.HasField("error"):
                    self._live.fail(frame.finished.request, error_from(frame.finished.error))
                else:
                    self._live.finish(frame.finished.request)
                outbox.acknowledge(frame.finished.sequence, at_once=True)
            case "accepted":
                self._live.confirm(frame.accepted.request, frame.accepted.num_cached_tokens)
            case "rejected":
                self._live.fail(frame.rejected.request, error_from(frame.rejected.error))
            case "model_pools":
                self._cell.set_pools(pools_from(frame.model_pools))
            case _:  # the load is of no use to a gateway of one cell; a later scheduler may say more
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


class _Outbox:
    """Frames to the scheduler, in order. The latest Ack stands for all before it, and goes when nothing else waits."""

    def __init__(self) -> None:
        self._frames: deque[scheduler_pb2.AttachRequest] = deque()
        self._acknowledged = 0
        self._ack_written = 0
        self._ack_is_due = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, frame: scheduler_pb2.AttachRequest) -> None:
        """Append a frame."""
        self._frames.append(frame)
        self._changed.set()

    def acknowledge(self, sequence: int, *, at_once: bool = False) -> None:
        """Say that everything up to this sequence number was applied: at once, or soon, with what comes until then.

        An Ack lets the scheduler forget; one for every step would wake it, and this process, once more in each.
        """
        self._acknowledged = sequence
        if at_once or sequence - self._ack_written >= _ACK_EVERY:
            self._owe_ack()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_WITHIN, self._owe_ack)

    def _owe_ack(self) -> None:
        self._ack_is_due = True
        self._changed.set()

    def close(self) -> None:
        """Write nothing behind what is here now."""
        self._is_closed = True
        self._changed.set()

    async def write_to(self, call: _Call) -> None:
        """Write until closed."""
        while True:
            while self._frames:
                await _write(call, self._frames.popleft())
            if self._ack_is_due:
                self._ack_is_due = False
                self._ack_written = self._acknowledged
                if self._ack_timer is not None:
                    self._ack_timer.cancel()
                    self._ack_timer = None
                await _write(call, scheduler_pb2.AttachRequest(ack=scheduler_pb2.Ack(sequence=self._ack_written)))
            elif self._is_closed:
                await call.done_writing()
                return
            else:
                await self._changed.wait()
                self._changed.clear()


async def _write(call: _Call, frame: scheduler_pb2.AttachRequest) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        # This is how grpc says that the stream had ended before the write.
        raise _DetachedError(f"the scheduler ended the stream: {(await call.code()).name}") from None
