"""ExecutorService over gRPC: who may open a session, and the frames of one. Nothing here runs the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from executor_svc import convert
from executor_svc.batch import ExecutorInfo
from executor_svc.worker import Session, SessionEvent, SessionReady, Worker
from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.internal.executor.v1 import executor_pb2_grpc
from octavo.rpc.errors import ServiceError
from octavo.rpc.limits import MAX_TERM
from octavo.rpc.seal import SealCheck

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.ExecuteRequest, pb.ExecuteResponse]
OpenSession = Callable[["_Stream", pb.Begin], Session]

PROGRESS_INTERVAL = 0.25
"""Seconds between two signs of life in a session."""


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves sessions, one at a time. Raises ServiceError for octavo.rpc's interceptor to turn into a status.

    `drained` is set once a scheduler has asked the executor to stop.
    """

    def __init__(self, info: ExecutorInfo, worker: Worker) -> None:
        self.drained = asyncio.Event()
        self._info = info
        self._worker = worker
        self._highest_term = 0
        self._session_number = 0
        self._streams: set[_Stream] = set()
        self._owner: _Stream | None = None
        self._refusal: ServiceError | None = None

    @property
    def has_session(self) -> bool:
        """Whether a scheduler's session is open."""
        return self._owner is not None

    def end_streams(self, error: ServiceError) -> None:
        """End every stream with the error, and answer every later one with it."""
        self._refusal = error
        for stream in self._streams:
            stream.end(error)

    async def Execute(self, _request_iterator: Any, context: Context) -> None:  # noqa: N802 - the contract's name
        """Say Welcome, take Begin, and run the session until either side ends it. Frames are read from the context."""
        if self._refusal is not None:
            raise self._refusal
        stream = _Stream(context, self._worker, self.drained)
        self._streams.add(stream)
        try:
            await context.write(convert.welcome(self._info, self._highest_term))
            await stream.run(self._open_session)
        finally:
            self._streams.discard(stream)
            if self._owner is stream:
                self._owner = None

    def _open_session(self, stream: _Stream, begin: pb.Begin) -> Session:
        """Judge a Begin; on success the stream owns the executor, and the stream that owned it has been ended."""
        if begin.term == 0 or begin.session == 0:
            raise convert.malformed("begin", "term and session must not be 0")
        if begin.term > MAX_TERM:
            raise convert.malformed("begin.term", f"must be at most {MAX_TERM}")
        if begin.term < self._highest_term:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "STALE_TERM",
                f"term {begin.term} is over: a scheduler of term {self._highest_term} was here",
                metadata={"highest_term": str(self._highest_term)},
            )
        if self._owner is not None:
            if begin.term == self._highest_term and begin.session <= self._session_number:
                raise ServiceError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "SESSION_EXISTS",
                    f"session {self._session_number} of term {begin.term} is live; a higher one may take its place",
                )
            replaced = f"session {begin.session} of a scheduler of term {begin.term} has taken over"
            self._owner.end(ServiceError(grpc.StatusCode.ABORTED, "SESSION_REPLACED", replaced))
        self._highest_term = begin.term
        self._session_number = begin.session
        self._owner = stream
        logger.info("session begins", extra={"fields": {"term": begin.term, "session": begin.session}})
        return self._worker.open(begin.session, stream.deliver)


class _Stream:
    """One call of Execute: a task that reads frames, one that writes them, and an end that others may bring about."""

    def __init__(self, context: Context, worker: Worker, drained: asyncio.Event) -> None:
        self._context = context
        self._worker = worker
        self._drained = drained
        self._seals = SealCheck()
        # None: a sign of life is due.
        self._events: asyncio.Queue[SessionEvent | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
        self._session: Session | None = None

    def deliver(self, event: SessionEvent) -> None:
        """Take an event of the session, to be written."""
        self._events.put_nowait(event)

    def end(self, error: ServiceError) -> None:
        """End the stream with an error: its session hears nothing more. The first end counts."""
        if self._session is not None:
            self._session.close()
        if not self._end.done():
            self._end.set_result(error)

    async def run(self, open_session: OpenSession) -> None:
        """Serve until the peer closes the stream; raise ServiceError where it ends otherwise."""
        read = asyncio.create_task(self._read(open_session))
        write = asyncio.create_task(self._write())
        try:
            ends: list[asyncio.Future[Any]] = [self._end, read, write]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                raise self._end.result()
            await (read if read.done() else write)
        finally:
            if self._session is not None:
                self._session.close()
            if self._timer is not None:
                self._timer.cancel()
            read.cancel()
            write.cancel()
            await asyncio.gather(read, write, return_exceptions=True)

    async def _read(self, open_session: OpenSession) -> None:
        frame = await self._next_frame()
        if frame is None:
            return
        if frame.WhichOneof("frame") != "begin":
            raise convert.malformed("begin", "the first frame must be Begin")
        self._session = session = open_session(self, frame.begin)
        step = 0
        while (frame := await self._next_frame()) is not None:
            if frame.WhichOneof("frame") == "drain":
                self._drained.set()
                continue
            if frame.WhichOneof("frame") != "step_batch":
                raise convert.malformed("frame", "only StepBatch and Drain may follow Begin")
            if frame.step_batch.session != session.number:
                continue
            step += 1
            if frame.step_batch.step != step:
                raise convert.malformed("step_batch.step", f"is {frame.step_batch.step} where {step} comes next")
            session.submit(convert.step_batch(frame.step_batch))

    async def _next_frame(self) -> pb.ExecuteRequest | None:
        frame = await self._context.read()
        # EOF is an object of grpc's own, of no public type.
        if not isinstance(frame, pb.ExecuteRequest):
            return None
        if not self._seals.is_whole(frame):
            raise convert.malformed("checksum", "is missing, though earlier frames had one")
        return frame

    async def _write(self) -> None:
        while True:
            event = await self._events.get()
            if event is None:
                await self._context.write(convert.progress(self._worker.ticks.count))
                continue
            if isinstance(event, SessionReady):
                await self._context.write(convert.ready(event.session))
                self._live()
                continue
            assert self._session is not None
            self._session.answering(event)
            await self._context.write(convert.step_result(event))

    def _live(self) -> None:
        """Have a sign of life written now and from time to time, unless the writer is behind already."""
        if self._events.empty():
            self._events.put_nowait(None)
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_INTERVAL, self._live)
