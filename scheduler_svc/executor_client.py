"""One executor address: dial, agree, run a session, and start again when it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio

from octavo.internal.executor.v1 import executor_pb2
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.rpc.progress import StallWatch
from octavo.rpc.seal import SealCheck, sealed_stream
from scheduler_svc.batch import ExecutorSpec, ScheduledBatch
from scheduler_svc.convert import WireError, batch_result, begin_frame, executor_spec, step_batch_frame
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.suspects import Loss
from scheduler_svc.tasks import until_first
from scheduler_svc.term import Term

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT = 5.0
"""Seconds for an executor to say Welcome after the dial. Ready may take as long as its earlier work needs."""

FIRST_DELAY = 0.1
LAST_DELAY = 0.5
"""Bounds in seconds of the wait before another dial. It doubles with every failure; up to half is taken off at random.
A dial that is refused costs a millisecond, and an executor that has just loaded its model is to be found at once."""
HANG_TIMEOUT = 5.0
"""Seconds without a sign of progress after which a session is given up."""

_Call = grpc.aio.StreamStreamCall[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]

_PATH = "/octavo.internal.executor.v1.ExecutorService/Execute"
_FAREWELLS = {"DEVICE_FAILED": Loss.DIED, "UNAVAILABLE": Loss.LOST}
"""What UNAVAILABLE at the end of a session means, by its reason. Without one of the executor's the connection broke."""


class RefusedError(Exception):
    """We do not want this executor, or it does not want us; the message says why."""


class HungError(Exception):
    """The executor gives no sign of progress: it is stopped, its device hangs, or the way to it is cut."""


class ExecutorClient:
    """Keeps a session with the executor at `address` whenever there can be one.

    dial: opens a channel. session_numbers: shared by all clients, so that numbers are unique within the term; the
    number on the wire is given before Ready, the engine's own only after. incarnations: shared too, the address of
    each executor in session by incarnation: where two addresses lead to one executor the second is left alone. links:
    the links of those in session, by address.
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
        links: dict[str, Link] | None = None,
        hang_timeout: float = HANG_TIMEOUT,
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
        self._links = {} if links is None else links
        self._hang_timeout = hang_timeout
        # The process whose session was lost without a word: dead, or cut off.
        self._missing: str | None = None
        self._first_delay = first_delay
        self._last_delay = last_delay
        self._delay = first_delay
        self._told = ""
        self._retired = False
        # The engine's, while there is one.
        self._session_number: int | None = None
        self._retire = asyncio.Event()

    def set_retired(self, retired: bool) -> None:
        """Say whether the address is out of use. A retired client ends with its session, or at once without one.

        In a session it drains meanwhile: new work goes to others, what runs there runs on.
        """
        if retired != self._retired and self._session_number is not None:
            self._engine_loop.set_draining(self._session_number, retired)
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
                    await self._session(sealed_stream(channel, _PATH, executor_pb2.ExecuteResponse)())
            except (grpc.aio.AioRpcError, RefusedError, HungError, WireError, TimeoutError) as error:
                self._tell(error)
                if isinstance(error, grpc.aio.AioRpcError) and "connection refused" in (error.details() or "").lower():
                    self._settle("")
            finally:
                self._term.heard(self.address)
            await self._wait()

    def _settle(self, incarnation: str) -> None:
        """Say what became of the process that is missing; `incarnation`: of the one that answers now, empty: none."""
        missing, self._missing = self._missing, None
        if missing is None:
            return
        if missing == incarnation:
            self._engine_loop.was_cut_off(missing)
        else:
            self._engine_loop.death_is_certain(missing)

    async def _session(self, call: _Call) -> None:
        frames = _Frames(call)
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT):
                welcome = await frames.read("welcome")
            spec = self._check(welcome.welcome)
            self._settle(spec.incarnation)
            self._incarnations[spec.incarnation] = self.address
            try:
                await self._begin(call, frames, spec)
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

    async def _begin(self, call: _Call, frames: _Frames, spec: ExecutorSpec) -> None:
        number = next(self._session_numbers)
        await _write(call, begin_frame(await self._term.fixed(), number))
        ready = await frames.read("ready")
        if ready.ready.session != number:
            raise WireError(f"Ready for session {ready.ready.session}, not {number}")
        link = Link()
        try:
            session = self._engine_loop.join(spec, link)
        except ServiceError as error:
            raise RefusedError(error.message) from error
        self._delay = self._first_delay
        self._told = ""
        fields = {"address": self.address, "executor": spec.incarnation, "session": number, "model": spec.model}
        logger.info("executor joined", extra={"fields": fields})
        self._links[self.address] = link
        self._session_number = session
        if self._retired:
            self._engine_loop.set_draining(session, True)
        loss = Loss.LEFT
        try:
            await until_first(
                self._read_results(frames, link, number, session),
                _write_batches(call, link, number),
                self._watch(link),
            )
        except HungError:
            loss = Loss.HUNG
            raise
        except (grpc.aio.AioRpcError, WireError):
            loss = await _loss_of(call)
            raise
        finally:
            del self._links[self.address]
            self._session_number = None
            if loss is Loss.LOST:
                self._missing = spec.incarnation
            self._engine_loop.leave(session, loss)
            logger.info("executor left", extra={"fields": fields | {"loss": loss.value}})

    async def _read_results(self, frames: _Frames, link: Link, number: int, session: int) -> NoReturn:
        while True:
            frame = await frames.read("step_result", "progress")
            link.num_frames += 1
            if frame.WhichOneof("frame") == "progress":
                link.num_ticks = frame.progress.num_ticks
                continue
            if frame.step_result.session != number:
                continue
            link.check_answer(frame.step_result.step)
            self._engine_loop.apply(session, batch_result(frame.step_result, session))

    async def _watch(self, link: Link) -> NoReturn:
        """Raise HungError once the executor, or its device while it has steps, has not moved for the timeout."""
        watch = StallWatch(link.is_watched, link.progress, self._hang_timeout)
        while True:
            watch.look(asyncio.get_running_loop().time())
            if watch.is_stalled:
                raise HungError(f"no sign of progress for {watch.stuck_for:.1f} s")
            await asyncio.sleep(watch.interval)

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


class Link:
    """Steps on their way to an executor, and what is heard of it."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.num_ticks: int | None = None
        self.num_answered = 0
        self._num_sent = 0
        self._frames: deque[ScheduledBatch | None] = deque()
        self._wake = asyncio.Event()

    def send(self, batch: ScheduledBatch) -> None:
        """Send a step."""
        self._num_sent += 1
        self._frames.append(batch)
        self._wake.set()

    def check_answer(self, step: int) -> None:
        """Count the answer to a step. Raises WireError where one before it is missing: it would be waited for in vain.

        One that was answered before, or never sent, changes nothing.
        """
        oldest = self.num_answered + 1
        if oldest < step <= self._num_sent:
            raise WireError(f"step {step} is answered, and step {oldest} before it is not")
        if step == oldest:
            self.num_answered += 1

    def drain(self) -> None:
        """Have the executor stop."""
        self._frames.append(None)
        self._wake.set()

    def is_watched(self) -> bool:
        """Whether the executor has shown that it gives signs of life."""
        return self.num_ticks is not None

    def progress(self) -> tuple[bool, int, int]:
        """What changes: with steps to do only as the device moves, without with any frame."""
        if self.num_answered < self._num_sent:
            return True, self.num_ticks or 0, self.num_answered
        return False, self.num_frames, 0

    async def next_frame(self, session: int) -> executor_pb2.ExecuteRequest:
        """Return what to write next, waiting for it."""
        while not self._frames:
            self._wake.clear()
            await self._wake.wait()
        batch = self._frames.popleft()
        if batch is None:
            return executor_pb2.ExecuteRequest(drain=executor_pb2.Drain())
        return step_batch_frame(batch, session)


async def _write_batches(call: _Call, link: Link, number: int) -> NoReturn:
    while True:
        await _write(call, await link.next_frame(number))


async def _loss_of(call: _Call) -> Loss:
    """Tell how a session ended that did not end by our own will."""
    if not call.done():
        return Loss.LEFT
    code = await call.code()
    if code is not grpc.StatusCode.UNAVAILABLE:
        return Loss.LEFT
    error = grpc.aio.AioRpcError(
        code,
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )
    return _FAREWELLS.get(from_rpc_error(error).reason, Loss.LEFT)


async def _write(call: _Call, frame: executor_pb2.ExecuteRequest) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        # This is how grpc says that the stream had ended before the write.
        code, details = await call.code(), await call.details()
        raise WireError(f"the executor ended the stream: {code.name} {details}") from None


class _Frames:
    """What an executor sends, one frame after the other."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._seals = SealCheck()

    async def read(self, *kinds: str) -> executor_pb2.ExecuteResponse:
        """Return the next frame. Raises WireError where it is of no such kind, or damaged, or the stream has ended."""
        frame: Any = await self._call.read()
        if frame is grpc.aio.EOF or frame is None:
            raise WireError("the executor ended the stream")
        if not self._seals.is_whole(frame):
            raise WireError("a frame of the executor was damaged on the way")
        if frame.WhichOneof("frame") not in kinds:
            raise WireError(f"the executor sent {frame.WhichOneof('frame') or 'nothing'} instead of {kinds[0]}")
        answer: executor_pb2.ExecuteResponse = frame
        return answer
