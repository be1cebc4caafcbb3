"""The device thread over a runner that launches: what is in the air together, the order of answers, failures, ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from fake_device import FakeDevice
from fakes_executor import make_limits, make_sequence
from fakes_pipeline import ExactModel, Watched, make_pipelined, make_plain

from executor_svc.batch import StageTimings, StepBatch, StepFailure, StepFailureReason, StepResult
from executor_svc.worker import SessionEvent, SessionReady, Worker

TIMEOUT = 10.0


@dataclass
class ScriptedFlight:
    """Lands when its gate is open."""

    batch: StepBatch
    result: StepResult | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        assert self.gate.wait(TIMEOUT)
        if self.error is not None:
            raise self.error


class LaunchingScript:
    """Records every call. Flights wait for the test; steps in `failing` fail at their launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.air: list[ScriptedFlight] = []
        self.launched: dict[int, ScriptedFlight] = {}
        self.happened = threading.Condition()
        self.failing: set[int] = set()
        self.room = 2

    def load(self) -> LaunchingScript:
        return self

    def reset(self) -> None:
        assert not self.air
        self._note("reset", 0)

    def check_invariants(self) -> None:
        self._note("check", 0)

    def can_launch(self) -> bool:
        return len(self.air) < self.room

    def launch(self, batch: StepBatch) -> ScriptedFlight:
        assert self.can_launch()
        flight = ScriptedFlight(batch)
        if batch.step in self.failing:
            failure = StepFailure(StepFailureReason.INTERNAL, "scripted")
            flight.result = StepResult(batch.session, batch.step, failure=failure)
            flight.gate.set()
        return self._fly("launch", flight)

    def refuse(self, batch: StepBatch) -> ScriptedFlight:
        failure = StepFailure(StepFailureReason.REFUSED, "")
        flight = ScriptedFlight(batch, StepResult(batch.session, batch.step, failure=failure))
        flight.gate.set()
        return self._fly("refuse", flight)

    def land(self, flight: ScriptedFlight) -> StepResult:
        assert self.air.pop(0) is flight
        self._note("land", flight.batch.step)
        return flight.result or StepResult(flight.batch.session, flight.batch.step, timings=StageTimings(idle=0.5))

    def _fly(self, call: str, flight: ScriptedFlight) -> ScriptedFlight:
        self.air.append(flight)
        self.launched[flight.batch.step] = flight
        self._note(call, flight.batch.step)
        return flight

    def _note(self, call: str, step: int) -> None:
        with self.happened:
            self.calls.append((call, step))
            self.threads.add(threading.current_thread().name)
            self.happened.notify_all()

    async def until(self, call: str, step: int) -> None:
        """Wait until a call was made."""

        def wait() -> bool:
            with self.happened:
                return self.happened.wait_for(lambda: (call, step) in self.calls, TIMEOUT)

        assert await asyncio.to_thread(wait), self.calls


@pytest.fixture(name="runner")
def _runner() -> LaunchingScript:
    return LaunchingScript()


@pytest_asyncio.fixture(name="worker")
async def _worker(runner: LaunchingScript) -> AsyncIterator[Worker]:
    worker = Worker()
    await worker.start(runner.load)
    yield worker
    for flight in runner.air:
        flight.gate.set()
    await worker.stop()
    assert {"device", "landing"}.isdisjoint(thread.name for thread in threading.enumerate())


async def _next(events: asyncio.Queue[SessionEvent]) -> SessionEvent:
    return await asyncio.wait_for(events.get(), TIMEOUT)


@pytest.mark.asyncio
async def test_steps_are_launched_while_others_are_in_the_air(runner: LaunchingScript, worker: Worker) -> None:
    """Two fly together; the third is launched as soon as the first has landed, whether or not anything new has come.
    Answers keep the order, and carry the device's own times.
    """
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(4, events.put_nowait)
    for step in (1, 2, 3):
        session.submit(StepBatch(4, step))
    assert await _next(events) == SessionReady(4)
    await runner.until("launch", 2)
    assert ("launch", 3) not in runner.calls
    assert worker.is_busy
    # The second has ended on the device; its turn comes behind the first.
    runner.launched[2].gate.set()
    assert events.empty()
    runner.launched[1].gate.set()
    results = [await _next(events) for _ in range(2)]
    await runner.until("launch", 3)
    runner.launched[3].gate.set()
    results.append(await _next(events))
    assert [result.step for result in results if isinstance(result, StepResult)] == [1, 2, 3]
    assert all(result.timings.queue > 0 for result in results if isinstance(result, StepResult))
    assert {result.timings.idle for result in results if isinstance(result, StepResult)} == {0.5}
    assert runner.threads == {"device"}
    assert [call for call in runner.calls if call[0] != "check"][:4] == [
        ("reset", 0),
        ("launch", 1),
        ("launch", 2),
        ("land", 1),
    ]


@pytest.mark.asyncio
async def test_a_step_that_comes_late_is_launched_at_once(runner: LaunchingScript, worker: Worker) -> None:
    """The device's thread does not sit and wait for a flight while there is something to launch."""
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    session.submit(StepBatch(1, 1))
    await runner.until("launch", 1)
    session.submit(StepBatch(1, 2))
    await runner.until("launch", 2)
    assert ("land", 1) not in runner.calls


@pytest.mark.asyncio
async def test_a_session_begins_when_the_air_is_clear(runner: LaunchingScript, worker: Worker) -> None:
    """What is in the air of a closed session lands unheard, what has not been launched is dropped, then comes Ready."""
    old: asyncio.Queue[SessionEvent] = asyncio.Queue()
    new: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, old.put_nowait)
    for step in (1, 2, 3):
        session.submit(StepBatch(1, step))
    await runner.until("launch", 2)
    session.close()
    worker.open(2, new.put_nowait)
    for step in (1, 2):
        runner.launched[step].gate.set()
    assert await _next(new) == SessionReady(2)
    assert [call for call in runner.calls if call[0] in ("launch", "land")] == [
        ("launch", 1),
        ("launch", 2),
        ("land", 1),
        ("land", 2),
    ]
    assert runner.calls.count(("reset", 0)) == 2


@pytest.mark.asyncio
async def test_behind_a_failed_launch_steps_are_refused_in_their_turn(runner: LaunchingScript, worker: Worker) -> None:
    """A failure is told behind the step before it; what came until then is refused, the first one after it runs."""
    runner.failing = {2}
    runner.room = 4
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    for step in (1, 2, 3):
        session.submit(StepBatch(1, step))
    await runner.until("refuse", 3)
    assert await _next(events) == SessionReady(1)
    assert events.empty()
    runner.launched[1].gate.set()
    results = [await _next(events) for _ in range(3)]
    reasons = [result.failure and result.failure.reason for result in results if isinstance(result, StepResult)]
    assert reasons == [None, StepFailureReason.INTERNAL, StepFailureReason.REFUSED]
    for result in results:
        assert isinstance(result, StepResult)
        session.answering(result)
    session.submit(StepBatch(1, 4))
    await runner.until("launch", 4)


@pytest.mark.asyncio
async def test_a_device_that_fails_ends_the_thread(runner: LaunchingScript) -> None:
    """What waiting for a flight raises is what the thread dies of, and no thread is left."""
    worker = Worker()
    await worker.start(runner.load)
    worker.open(1, lambda event: None).submit(StepBatch(1, 1))
    await runner.until("launch", 1)
    runner.launched[1].error = RuntimeError("the device is lost")
    runner.launched[1].gate.set()
    error = await asyncio.wait_for(worker.wait_ended(), TIMEOUT)
    assert "the device is lost" in str(error)
    await worker.stop()
    assert {"device", "landing"}.isdisjoint(thread.name for thread in threading.enumerate())


@pytest.mark.asyncio
async def test_stop_waits_for_what_is_in_the_air(runner: LaunchingScript) -> None:
    """stop returns when the flights have landed; nothing died."""
    worker = Worker(check_invariants=True)
    await worker.start(runner.load)
    session = worker.open(1, lambda event: None)
    session.submit(StepBatch(1, 1))
    await runner.until("launch", 1)
    stop = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    assert not stop.done()
    runner.launched[1].gate.set()
    await stop
    assert await worker.wait_ended() is None
    assert [call for call, _ in runner.calls] == ["reset", "launch", "land", "check"]


@pytest.mark.asyncio
async def test_a_worker_drives_a_device() -> None:
    """The pipelined runner on the worker's threads, fed as a scheduler does with two steps under way: the CPU's tokens,
    and the device waited for by the landing thread alone.
    """
    limits = make_limits()
    sequence = make_sequence(1, [5, 9, 2], max_tokens=8)
    alone = make_plain(limits, ExactModel(limits.vocab_size))
    device = FakeDevice()
    model = ExactModel(limits.vocab_size)

    worker = Worker(check_invariants=True)
    await worker.start(lambda: Watched(device, lambda: make_pipelined(limits, model, device)))
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    steps = [StepBatch(1, 1, (), (sequence,), (1,), (3,), (0,), (1,), (1,))]
    for step in range(2, 9):
        blocks = (step,) if (step + 1) % limits.block_size == 0 else ()
        steps.append(StepBatch(1, step, (), (), (1,), (1,), (step + 1,), (len(blocks),), blocks))
    try:
        assert await _next(events) == SessionReady(1)
        for step in steps[:2]:
            session.submit(step)
        mine = []
        for step in [*steps[2:], None, None]:
            event = await _next(events)
            assert isinstance(event, StepResult)
            assert event.failure is None
            mine += event.sampled
            if step is not None:
                session.submit(step)
    finally:
        await worker.stop()
    assert mine == [alone.run(step).sampled[0] for step in steps]
    assert await worker.wait_ended() is None
