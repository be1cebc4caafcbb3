"""Steps that were launched and have not landed, and the thread that waits for them in place of the device's thread.

That thread never touches the runner: it waits for the oldest flight, and then has its landing put into the queue that
the device's thread reads anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Generic, Protocol, TypeVar, runtime_checkable

from executor_svc.batch import StepBatch, StepResult


class Flight(Protocol):
    """A launched step."""

    @property
    def result(self) -> StepResult | None:
        """What it gave, where that was known at the launch."""

    def wait(self) -> None:
        """Wait until it can land. What it raises ends the device's thread."""


FlightType = TypeVar("FlightType", bound=Flight)
StepType = TypeVar("StepType")


@runtime_checkable
class LaunchingRunner(Protocol[FlightType]):
    """A runner whose steps are launched one behind the other, and land in that order. All of it runs on one thread."""

    def can_launch(self) -> bool:
        """Whether a step can be launched before another one lands. True where nothing is in the air."""

    def launch(self, batch: StepBatch) -> FlightType:
        """Launch a step. Errors of the step are its result; what it raises ends the thread."""

    def refuse(self, batch: StepBatch) -> FlightType:
        """Answer a step that was in flight behind a failed one, in its turn, without launching it."""

    def land(self, flight: FlightType) -> StepResult:
        """End the oldest flight, which has been waited for."""


@dataclass(frozen=True)
class Landed(Generic[FlightType]):
    """A flight has been waited for. `error`: what that raised."""

    flight: FlightType
    error: Exception | None = None


class Flights(Generic[FlightType, StepType]):
    """What is in the air, oldest first, each with whatever the device's thread wants to know of it at the landing."""

    def __init__(self, runner: LaunchingRunner[FlightType], report: Callable[[Landed[FlightType]], None]) -> None:
        """`report`: takes each landing, on the thread that waits."""
        self._runner = runner
        self._report = report
        self._air: deque[tuple[FlightType, StepType]] = deque()
        self._waiting: SimpleQueue[FlightType | None] = SimpleQueue()
        # Not a daemon, as the device's thread is none: a wait ends with the work before it.
        self._thread = Thread(target=self._wait, name="landing", daemon=False)

    def __len__(self) -> int:
        """How many are in the air."""
        return len(self._air)

    def __enter__(self) -> Flights[FlightType, StepType]:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the thread, once what it waits for has ended."""
        self._waiting.put(None)
        self._thread.join()

    def add(self, flight: FlightType, step: StepType) -> None:
        """Have a flight waited for."""
        self._air.append((flight, step))
        self._waiting.put(flight)

    def land(self, landed: Landed[FlightType]) -> tuple[StepType, StepResult]:
        """End the oldest flight; return what was known of its step, and its result. Raises what waiting for it did."""
        if landed.error is not None:
            raise landed.error
        flight, step = self._air.popleft()
        assert flight is landed.flight, "flights land in their order"
        return step, self._runner.land(flight)

    def _wait(self) -> None:
        while (flight := self._waiting.get()) is not None:
            try:
                flight.wait()
            except Exception as error:
                self._report(Landed(flight, error))
                # What was launched behind it has failed with it: the device's thread ends.
                return
            self._report(Landed(flight))
