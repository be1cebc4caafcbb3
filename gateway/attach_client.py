"""The sending side of an Attach stream, and what tells that the stream works both ways."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc.aio

from octavo.internal.scheduler.v1 import scheduler_pb2

_ACK_EVERY = 16
"""Frames. The scheduler keeps up to 16 MiB for a gateway: some hundred of the largest."""
_ACK_WITHIN = 0.25
"""Seconds, where fewer frames come."""

AttachCall = grpc.aio.StreamStreamCall[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


class DetachedError(Exception):
    """The stream has ended, or must; the message says why."""


class Outbox:
    """Frames to the scheduler, in order. The latest Ack stands for all before it, and goes when nothing else waits."""

    def __init__(self) -> None:
        self._frames: deque[scheduler_pb2.AttachRequest] = deque()
        self._acknowledged = 0
        self._ack_written = 0
        self._ack_is_due = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self.num_heard = 0
        """Frames that have come."""
        self.has_report = False
        self._num_written = 0
        self._num_arrived = 0
        self._last_sequence: int | None = None

    def take_report(self, num_arrived: int) -> None:
        """Note how many of our frames the scheduler says it has; 0: it does not say."""
        self.has_report = True
        self._num_arrived = num_arrived

    def progress(self) -> tuple[int, int]:
        """Return what changes while both directions work: frames that come, and those of ours that arrive."""
        if 0 < self._num_arrived < self._num_written:
            return -1, self._num_arrived
        return self.num_heard, 0

    def check_next(self, sequence: int) -> None:
        """Raise where a frame before this one is missing: the scheduler sends again what was not acknowledged."""
        if self._last_sequence is not None and sequence > self._last_sequence + 1:
            raise DetachedError(f"frame {sequence} has come, and {self._last_sequence + 1} before it has not")
        self._last_sequence = sequence

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

    async def write_to(self, call: AttachCall) -> None:
        """Write until closed."""
        while True:
            while self._frames:
                await _write(call, self._frames.popleft())
                self._num_written += 1
            if self._ack_is_due:
                self._ack_is_due = False
                self._ack_written = self._acknowledged
                if self._ack_timer is not None:
                    self._ack_timer.cancel()
                    self._ack_timer = None
                await _write(call, scheduler_pb2.AttachRequest(ack=scheduler_pb2.Ack(sequence=self._ack_written)))
                self._num_written += 1
            elif self._is_closed:
                await call.done_writing()
                return
            else:
                await self._changed.wait()
                self._changed.clear()


async def _write(call: AttachCall, frame: scheduler_pb2.AttachRequest) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        # This is how grpc says that the stream had ended before the write.
        raise DetachedError(f"the scheduler ended the stream: {(await call.code()).name}") from None
