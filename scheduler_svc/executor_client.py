"""One executor address: dial, agree, run a session, and start again when it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc
import grpc.aio

from octavo.internal.executor.v1 import executor_pb2, executor_pb2_grpc
from octavo.rpc.errors import ServiceError, from_rpc_error
from scheduler_svc.batch import ExecutorSpec, ScheduledBatch
from scheduler_svc.convert import WireError, batch_result, begin_frame, executor_spec, step_batch_frame
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.tasks import until_first
from scheduler_svc.term import Term

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT = 5.0
"""Seconds for an executor to say Welcome after the dial. Ready may take as long as its earlier work needs."""

FIRST_DELAY = 0.1
LAST_DELAY = 0.5
"""Bounds in seconds of the wait before another dial. It doubles with every failure; up to half is taken off at random.
A dial that is refused costs a millisecond, and an executor that has just loaded its model is to be found at once."""

_Call = grpc.aio.StreamStreamCall[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]


class RefusedError(Exception):
    """We do not want this executor, or it does not want us; the message says why."""


class ExecutorClient:
    """Keeps a session with the executor at `address` whenever there can be one.

    dial: opens a channel. session_numbers: shared by all clients, so that numbers are unique within the term; the
    number on the wire is given before Ready, the engine's own only after. incarnations: shared too, the address of
    each executor in session by incarnation: where two addresses lead to one executor the second is left alone.
    """

    def __init__(
        self,
        address: str,
        engine_loop: EngineLoop,
        term: Term,
        cell: str,
        *,
        dial: Callable[[str], grpc.aio.Channel],
        session_numbers: Iterator[int],
        incarnations: dict[str, str],
        first_delay: float = FIRST_DELAY,
        last_delay: float = LAST_DELAY,
    ) -> None:
        self.address = address
        self._engine_loop = engine_loop
        self._term = term
        self._cell = cell
        self._dial = dial
        self._session_numbers = session_numbers
        self._incarnations = incarnations
        self._first_delay = first_delay
        self._last_delay = last_delay
        self._delay = first_delay
        self._told = ""
        self._retired = False
        self._retire = asyncio.Event()

    def set_retired(self, retired: bool) -> None:
        """Say whether the address is out of use. A retired client ends with its session, or at once without one."""
        self._retired = retired
        if retired:
            self._retire.set()
        else:
            self._retire.clear()

    async def run(self) -> None:
        """Dial until retired. Raises StaleTermError and EngineFailedError; whatever else goes wrong is tried again."""
        while not self._retired:
            try:
                async with self._dial(self.address) as channel:
                    await self._session(executor_pb2_grpc.ExecutorServiceStub(channel).Execute())
            except (grpc.aio.AioRpcError, RefusedError, WireError, TimeoutError) as error:
                self._tell(error)
            finally:
                self._term.heard(self.address)
            await self._wait()

    async def _session(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT):
                welcome = await _read(call, "welcome")
            spec = self._check(welcome.welcome)
            self._incarnations[spec.incarnation] = self.address
            try:
                await self._begin(call, spec)
            finally:
                del self._incarnations[spec.incarnation]
        finally:
            call.cancel()

    def _check(self, welcome: executor_pb2.Welcome) -> ExecutorSpec:
        if welcome.cell != self._cell:
            raise RefusedError(f"the executor is of cell {welcome.cell!r}, this scheduler of {self._cell!r}")
        spec = executor_spec(self.address, welcome)
        self._term.heard(self.address, welcome.highest_term)
        other = self._incarnations.get(spec.incarnation)
        if other is not None:
            raise RefusedError(f"the same executor as {other}")
        for pool in self._engine_loop.pools():
            if pool.model == spec.model and pool.revision != spec.model_revision:
                revisions = f"{pool.revision} in this cell, {spec.model_revision} in the executor"
                raise RefusedError(f"model {spec.model!r} has another revision: {revisions}")
        return spec

    async def _begin(self, call: _Call, spec: ExecutorSpec) -> None:
        number = next(self._session_numbers)
        await _write(call, begin_frame(await self._term.fixed(), number))
        ready = await _read(call, "ready")
        if ready.ready.session != number:
            raise WireError(f"Ready for session {ready.ready.session}, not {number}")
        link = _Link()
        try:
            session = self._engine_loop.join(spec, link)
        except ServiceError as error:
            raise RefusedError(error.message) from error
        self._delay = self._first_delay
        self._told = ""
        fields = {"address": self.address, "executor": spec.incarnation, "session": number, "model": spec.model}
        logger.info("executor joined", extra={"fields": fields})
        try:
            await until_first(self._read_results(call, number, session), _write_batches(call, link, number))
        finally:
            self._engine_loop.leave(session)
            logger.info("executor left", extra={"fields": fields})

    async def _read_results(self, call: _Call, number: int, session: int) -> NoReturn:
        while True:
            frame = await _read(call, "step_result")
            if frame.step_result.session == number:
                self._engine_loop.apply(session, batch_result(frame.step_result, session))

    def _tell(self, error: Exception) -> None:
        """Log why there is no session, once until the reason changes."""
        if isinstance(error, grpc.aio.AioRpcError):
            refusal = from_rpc_error(error)
            reason = f"{refusal.code.name}: {refusal.message}"
        else:
            reason = str(error) or type(error).__name__
        level = logging.DEBUG if reason == self._told else logging.WARNING
        self._told = reason
        logger.log(level, "no session with the executor", extra={"fields": {"address": self.address, "error": reason}})

    async def _wait(self) -> None:
        """Wait before the next dial, but not longer than until retirement."""
        delay = self._delay * random.uniform(0.5, 1.0)
        self._delay = min(self._delay * 2, self._last_delay)
        try:
            async with asyncio.timeout(delay):
                await self._retire.wait()
        except TimeoutError:
            return


class _Link:
    """Steps on their way to an executor."""

    def __init__(self) -> None:
        self._batches: deque[ScheduledBatch] = deque()
        self._wake = asyncio.Event()

    def send(self, batch: ScheduledBatch) -> None:
        self._batches.append(batch)
        self._wake.set()

    async def next_batch(self) -> ScheduledBatch:
        while not self._batches:
            self._wake.clear()
            await self._wake.wait()
        return self._batches.popleft()


async def _write_batches(call: _Call, link: _Link, number: int) -> NoReturn:
    while True:
        await _write(call, step_batch_frame(await link.next_batch(), number))


async def _write(call: _Call, frame: executor_pb2.ExecuteRequest) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        # This is how grpc says that the stream had ended before the write.
        code, details = await call.code(), await call.details()
        raise WireError(f"the executor ended the stream: {code.name} {details}") from None


async def _read(call: _Call, kind: str) -> executor_pb2.ExecuteResponse:
    """Return the next frame. Raises WireError where it is not of `kind` or where the stream has ended."""
    frame = await call.read()
    if not isinstance(frame, executor_pb2.ExecuteResponse):
        raise WireError("the executor ended the stream")
    if frame.WhichOneof("frame") != kind:
        raise WireError(f"the executor sent {frame.WhichOneof('frame') or 'nothing'} instead of {kind}")
    return frame
