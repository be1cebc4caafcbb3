"""The one thread that owns the device, and the sessions whose steps it runs in order.

Everything outside the thread lives on the event loop: sessions are opened, steps handed over and events received there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, Protocol, TypeVar, runtime_checkable

from executor_svc.batch import StepBatch, StepFailureReason, StepResult
from executor_svc.flights import Flights, Landed, LaunchingRunner
from executor_svc.ticks import DeviceTicks

logger = logging.getLogger(__name__)

_SHOWN_FRAMES = 12


class SessionRunner(Protocol):
    """What the thread drives: a StepRunner or a LaunchingRunner. All of it runs on the thread."""

    def reset(self) -> None:
        """Forget every sequence."""

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""


@runtime_checkable
class StepRunner(SessionRunner, Protocol):
    """Runs a step to its end before the next one begins."""

    def announce(self, batch: StepBatch) -> None:
        """Hear of a step that will be run or refused in its turn, unless its session ends. Alone of all this it is
        called on the event loop, also while a step runs.
        """

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step. Errors of the step are part of the result; what it raises ends the thread."""

    def refuse(self, batch: StepBatch) -> StepResult:
        """Answer a step that was in flight behind a failed one, without running it."""


RunnerType = TypeVar("RunnerType", bound=SessionRunner)
Runner = StepRunner | LaunchingRunner[Any]


@dataclass(frozen=True)
class SessionReady:
    """The session is open: earlier device work has ended and nothing is left of it."""

    session: int


SessionEvent = SessionReady | StepResult


class Session:
    """One session's end on the event loop. Its steps run in the order of `submit`; its events come in the same order.

    After `close` no event is delivered and no further step is run: one that runs at this moment goes to its end
    unheard.
    """

    def __init__(
        self,
        number: int,
        queue: SimpleQueue[_Item],
        deliver: Callable[[SessionEvent], None],
        announce: Callable[[StepBatch], None] | None = None,
    ) -> None:
        """`announce`: takes each step before it is queued."""
        self.number = number
        self.closed = False
        self._queue = queue
        self._announce = announce
        self._deliver = deliver
        self._failures_told = 0

    def submit(self, batch: StepBatch) -> None:
        """Queue a step."""
        if self._announce is not None:
            self._announce(batch)
        self._queue.put(_Step(self, batch, self._failures_told, perf_counter()))

    def answering(self, result: StepResult) -> None:
        """Say that a result is being sent now. If its step failed, steps submitted before are refused, later ones
        run.
        """
        if result.failure is not None and result.failure.reason is not StepFailureReason.REFUSED:
            self._failures_told += 1

    def close(self) -> None:
        """End the session."""
        self.closed = True

    def receive(self, event: SessionEvent) -> None:
        """Take an event from the device thread, on the event loop."""
        if not self.closed:
            self._deliver(event)


@dataclass
class _Begin:
    session: Session


@dataclass
class _Step:
    session: Session
    batch: StepBatch
    failures_told: int
    submitted: float


_Item = _Begin | _Step | Landed[Any] | None
"""What the thread is told: a session begins, a step is to be run, a launched one can land; None: stop."""


class Worker:
    """The device thread.

    on_answer: takes every step with its result, on the event loop, before the session hears of it and also where it
    no longer does. check_invariants: after every step; a state that contradicts itself ends the thread. ticks: counted
    up at both ends of each step.
    """

    def __init__(
        self,
        *,
        on_answer: Callable[[StepBatch, StepResult], None] | None = None,
        check_invariants: bool = False,
        ticks: DeviceTicks | None = None,
    ) -> None:
        self.ticks = DeviceTicks() if ticks is None else ticks
        self._is_at_work = False
        self._on_answer = on_answer
        self._check_invariants = check_invariants
        self._runner: SessionRunner
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._thread: Thread
        self._loop: asyncio.AbstractEventLoop
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: BaseException | None = None
        self._failures = 0
        """Steps of the session that have failed, as far as it is known; of a runner that launches."""

    @property
    def is_busy(self) -> bool:
        """Whether the thread has something to do, or does something."""
        return self._is_at_work or not self._queue.empty()

    def where(self) -> str:
        """Return what the thread does at this moment, as Python sees it: for people, where it hangs."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])

    @property
    def alive(self) -> bool:
        """Whether steps are being run."""
        return self._ready.is_set() and not self._ended.is_set()

    async def start(self, load: Callable[[], RunnerType]) -> RunnerType:
        """Start the thread, and have it load what it is to drive; return that. Raises what `load` raised, the thread
        ended.

        Cancelled, it first waits for `load` to end, which nothing can hurry, and for the thread.
        """
        self._loop = asyncio.get_running_loop()
        loaded: list[RunnerType] = []

        def load_runner() -> SessionRunner:
            loaded.append(load())
            return loaded[0]

        # Not a daemon: the interpreter must not go away under a running kernel.
        self._thread = Thread(target=self._main, args=(load_runner,), name="device", daemon=False)
        self._thread.start()
        try:
            await self._ready.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        if self._error is not None:
            self._thread.join()
            raise self._error
        return loaded[0]

    def open(self, number: int, deliver: Callable[[SessionEvent], None]) -> Session:
        """Open a session behind all work queued so far; SessionReady is its first event. The one before is closed."""
        runner = self._runner
        announce = runner.announce if isinstance(runner, StepRunner) else None
        session = Session(number, self._queue, deliver, announce)
        self._queue.put(_Begin(session))
        return session

    async def wait_ended(self) -> BaseException | None:
        """Wait for the end of the thread; return what it died of, None where it was stopped."""
        await self._ended.wait()
        return self._error

    async def stop(self) -> None:
        """End the thread after what is queued. Steps of closed sessions are not run. Idempotent once started."""
        self._queue.put(None)
        await self._ended.wait()
        self._thread.join()

    def _main(self, load: Callable[[], SessionRunner]) -> None:
        try:
            self._runner = load()
        except BaseException as error:
            self._error = error
        else:
            self._tell(self._ready.set)
            try:
                if isinstance(self._runner, LaunchingRunner):
                    self._work_ahead(self._runner)
                else:
                    assert isinstance(self._runner, StepRunner)
                    self._work(self._runner)
            except BaseException as error:
                logger.critical("the device thread died", exc_info=error)
                self._error = error
        # In this order: whoever waits for the start must find that the thread has ended.
        self._tell(self._ended.set)
        self._tell(self._ready.set)

    def _work(self, runner: StepRunner) -> None:
        failures = 0
        ended: float | None = None
        while (item := self._next_item()) is not None:
            session = item.session
            self.ticks.tick()
            if session.closed:
                continue
            if isinstance(item, _Begin):
                failures, ended = 0, None
                runner.reset()
                self._tell(session.receive, SessionReady(session.number))
                continue
            batch, started = item.batch, perf_counter()
            refused = item.failures_told < failures
            result = runner.refuse(batch) if refused else runner.run(batch)
            # A step of new sequences alone had nothing to go on with: the wait before it was for them to come.
            is_fresh = len(batch.handles) == len(batch.new_sequences)
            idle = None if ended is None or is_fresh else started - ended
            ended = perf_counter()
            if result.failure is not None and not refused:
                failures += 1
            if self._check_invariants:
                runner.check_invariants()
            # The loop puts the times in: whatever is done here makes the device wait.
            self._tell(self._answer, item, result, started - item.submitted, idle)

    def _work_ahead(self, runner: LaunchingRunner[Any]) -> None:
        """Launch each step as soon as it is there and the runner can, and answer the launched ones as they land."""
        waiting: deque[_Begin | _Step] = deque()
        flights: Flights[Any, tuple[_Step, float]] = Flights(runner, self._queue.put)
        is_stopping = False
        self._failures = 0
        with flights:
            while waiting or flights or not is_stopping:
                item = self._next_item(is_at_work=bool(waiting or flights))
                self.ticks.tick()
                if item is None:
                    is_stopping = True
                elif isinstance(item, Landed):
                    (step, queued), result = flights.land(item)
                    if self._check_invariants:
                        self._runner.check_invariants()
                    self._tell(self._answer, step, result, queued, result.timings.idle)
                else:
                    waiting.append(item)
                while waiting and self._advance(runner, flights, waiting[0]):
                    waiting.popleft()

    def _advance(
        self, runner: LaunchingRunner[Any], flights: Flights[Any, tuple[_Step, float]], item: _Begin | _Step
    ) -> bool:
        """Begin a session or launch a step; False where something must land first."""
        session = item.session
        if session.closed:
            return True
        if isinstance(item, _Begin):
            if flights:
                return False
            self._failures = 0
            self._runner.reset()
            self._tell(session.receive, SessionReady(session.number))
            return True
        if not runner.can_launch():
            return False
        queued = perf_counter() - item.submitted
        if item.failures_told < self._failures:
            flights.add(runner.refuse(item.batch), (item, queued))
            return True
        flight = runner.launch(item.batch)
        if flight.result is not None and flight.result.failure is not None:
            self._failures += 1
        flights.add(flight, (item, queued))
        return True

    def _next_item(self, *, is_at_work: bool = False) -> Any:
        """Wait for something to do; is_at_work: whether there is something meanwhile."""
        self._is_at_work = is_at_work
        self.ticks.tick()
        item = self._queue.get()
        self._is_at_work = True
        return item

    def _answer(self, step: _Step, result: StepResult, queue: float, idle: float | None) -> None:
        result = replace(result, timings=replace(result.timings, queue=queue, idle=idle))
        if self._on_answer is not None:
            self._on_answer(step.batch, result)
        step.session.receive(result)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The loop has closed: nobody is left to hear it.
            logger.debug("an event of the device thread found no event loop")
